"""Entropies of what was trained on, from the trainer where the engine reports none."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripted_runs import RecordingEngine, lines_of, make_recipe, run_recipe
from strop.analysis.read import read_analysis
from strop.errors import RunError
from strop.run_directory import read_json, read_lines
from strop.types import RolloutKey


class Mute(RecordingEngine):
    """Reports no entropies, as servers do."""

    async def complete(self, request):
        return replace(await super().complete(request), entropies=())


def of_rl(run):
    return [line for line in read_lines(run.metrics) if line["stage"] == "rl"]


def records(run, step):
    groups = read_json(run.stage("rl").selection(step))["groups"]
    return {RolloutKey(**each["key"]): each for group in groups for each in group["rollouts"]}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("scored") / "run", make_recipe(log_entropies=True), make_engine=Mute).run


def test_the_trainers_entropies_are_those_of_the_policy_that_sampled(scored):
    model = AutoModelForCausalLM.from_pretrained(scored.stage("sft").model, dtype=torch.float32)
    of_step, num_rollouts = records(scored, 1), 0
    for line in read_lines(scored.stage("rl").rollouts(1)):
        trajectory = line["rollout"]["trajectory"]
        record = of_step[RolloutKey(**trajectory["key"])]
        assert record["is_kept"] is ("entropies" in record)
        if not record["is_kept"]:
            continue
        ids, sampled = list(trajectory["prompt_ids"]), []
        for turn in trajectory["turns"]:
            sampled += range(len(ids), len(ids) + len(turn["completion"]["ids"]))
            ids += [*turn["completion"]["ids"], *turn["observation_ids"]]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [-(logprobs[place - 1].exp() * logprobs[place - 1]).sum().item() for place in sampled]
        assert record["entropies"] == pytest.approx(expected, abs=2e-4)  # they are rounded to four digits
        num_rollouts += 1
    assert num_rollouts > 6


def test_they_are_curves_and_can_be_analysed(scored):
    for line in of_rl(scored):
        assert 0 < line["tokens/forking_entropy_nats"] < 6
        assert 0 < line["tokens/forking_fraction"] < 1
        assert line["tokens/reflection_fraction"] == 0  # what is said here is sums
        assert "tokens/reflection_entropy_nats" not in line
    analysis = read_analysis(scored, stage="rl")
    trained = [each for step in (1, 2) for each in records(scored, step).values() if each["is_kept"]]
    assert analysis.total.num_rollouts == len(trained)
    total = sum(sum(each["entropies"]) for each in trained)
    tokens = analysis.total.all_tokens
    assert tokens.entropy_nats * tokens.num_tokens == pytest.approx(total)


def test_without_the_key_nothing_is_scored_and_the_analysis_names_it(tmp_path):
    run = run_recipe(tmp_path / "run", make_engine=Mute).run
    assert not any(name.startswith("tokens/") for line in of_rl(run) for name in line)
    assert not any("entropies" in each for each in records(run, 1).values())
    with pytest.raises(RunError, match="Set log_entropies = true in a stage of kind rl"):
        read_analysis(run, stage="rl")


def test_an_engines_own_entropies_are_not_scored_again(tmp_path):
    run = run_recipe(tmp_path / "run", make_recipe(log_entropies=True)).run
    assert not any("entropies" in each for each in records(run, 1).values())
    assert "tokens/forking_fraction" in of_rl(run)[0]


def test_advantages_and_weights_by_entropy_reach_the_trainer(tmp_path):
    norms = set()
    for name, settings in {"plain": {}, "advantage": {"entropy_advantage": 0.5}, "mask": {"high_entropy_share": 0.5}}.items():
        run = run_recipe(tmp_path / name, make_recipe(method={"kind": "grpo", **settings}, steps=1)).run
        norms.add(lines_of(run)[0]["update/grad_norm"])
    assert len(norms) == 3
