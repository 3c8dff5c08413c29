"""A policy that learns from preference pairs in a recipe: measured, kept at its best, resumed, told what it cannot use."""

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripted_runs import RECIPE, Watching, assert_same_training, lines_of, recipe_of, run_recipe
from strop.errors import CannotLearnError, ConfigError, TaskError
from strop.pipeline.run import train
from strop.recipe.load import load_recipe
from strop.reports.trackers import Progress
from strop.rollout.prompt import load_prompt
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.runs.lineage import weights_digest
from strop.stages import dpo as dpo_stage
from strop.stages.context import load_chat
from strop.stages.loop import checkpoints
from word_pairs import write_pairs


def recipe(path, *, later=None, **keys):
    stages = {
        "base": RECIPE["stages"]["base"],
        "prefer": {
            "kind": "dpo",
            "init": "base",
            "path": str(path),
            "test_share": 0.2,
            "batch_size": 8,
            "epochs": 2,
            "validation": {"every_steps": 2},
            "trainer": {"optimizer": {"lr": 0.003}},
            "checkpoint_every": 1,
        }
        | keys,
    } | (later or {})
    return recipe_of(stages)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dpo")
    return run_recipe(directory / "run", recipe(write_pairs(directory / "pairs.jsonl")))


def test_each_step_has_the_loss_of_its_pairs_and_the_first_is_that_of_the_reference(trained):
    lines = lines_of(trained.run, "prefer")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]  # 19 pairs in batches of 8: 3 an epoch
    first, last = lines[0], lines[-1]
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-9)
    assert (first["dpo/accuracy"], first["dpo/margin"]) == (0.5, 0.0)
    assert (first["dpo/chosen_reward"], first["dpo/rejected_reward"]) == (0.0, 0.0)
    assert last["dpo/loss"] < first["dpo/loss"]
    assert last["dpo/accuracy"] == 1.0
    assert last["dpo/margin"] == pytest.approx(last["dpo/chosen_reward"] - last["dpo/rejected_reward"])
    assert all(line["update/grad_norm"] > 0 and line["update/tokens_per_s"] > 0 for line in lines)


def test_held_out_pairs_are_measured_every_so_many_steps_and_after_the_last_and_the_best_policy_is_kept(trained):
    lines = {line["step"]: line for line in lines_of(trained.run, "prefer") if "validation/pair_loss" in line}
    found = {step: (line["validation/pair_accuracy"], -line["validation/pair_loss"]) for step, line in lines.items()}
    assert list(found) == [2, 4, 6]
    record = read_json(trained.run.stage("prefer").best / "validation.json")
    assert (record["accuracy"], -record["loss"]) == max(found.values())  # of equally accurate ones that of the lower loss
    assert record["accuracy"] > 0.5
    assert found[record["step"]] == max(found.values())
    assert record["num_pairs"] == 5  # a fifth of 24 prompts
    AutoModelForCausalLM.from_pretrained(trained.run.stage("prefer").best)
    [(_, summary)] = [each for each in trained.progress.stages if each[0] == "prefer"]
    assert summary.startswith("6 updates on 19 pairs; 5 held out: accuracy ")


def test_the_stage_may_hand_on_its_best_policy(trained, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    made = run_recipe(tmp_path / "run", recipe(pairs, validation={"every_steps": 2, "product": "best"}))
    assert read_json(made.run.stage("prefer").done)["model"] == "stages/prefer/best"
    assert weights_digest(made.run.stage("prefer").best) == weights_digest(trained.run.stage("prefer").best)


class Impatient(Watching):
    """Ends the program after a step."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def step(self, metrics, step):
        if step == self.last and "dpo/loss" in metrics:
            raise KeyboardInterrupt


def test_a_run_that_is_stopped_ends_with_the_same_model(tmp_path):
    """Two steps behind a checkpoint, with LoRA."""
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    made = recipe(pairs, checkpoint_every=3, trainer={"optimizer": {"lr": 0.003}, "lora": {"rank": 2, "alpha": 4}})
    whole = run_recipe(tmp_path / "whole", made).run
    with pytest.raises(KeyboardInterrupt):
        run_recipe(tmp_path / "run", made, progress=Impatient(5))
    resumed = run_recipe(tmp_path / "run", made).run
    assert "resumed" in [line["event"] for line in read_lines(resumed.events)]
    assert_same_training(resumed, whole, "prefer")
    assert weights_digest(resumed.stage("prefer").best) == weights_digest(whole.stage("prefer").best)


def test_prompts_are_posed_as_the_stage_says_and_the_tokens_of_responses_alone_are_learnt_from(tmp_path, monkeypatch):
    seen = {}
    pack = dpo_stage.pack_pairs

    def watch(pairs):
        seen.update({pair.prompt: pair for pair in pairs})
        return pack(pairs)

    monkeypatch.setattr(dpo_stage, "pack_pairs", watch)
    pairs, prompt = write_pairs(tmp_path / "pairs.jsonl", num=4), tmp_path / "kind.toml"
    prompt.write_text(
        'source = "here"\nprefill = "Well, "\nmessages = [{ role = "system", content = "Be kind." },'
        ' { role = "user", content = "Q: {question}" }]\n'
    )
    made = run_recipe(tmp_path / "run", recipe(pairs, epochs=1, prompt=str(prompt)))
    chat = load_chat(made.run.stage("base").model)
    assert len(seen) == 4
    for row in read_lines(pairs):
        pair = seen[load_prompt(str(prompt)).ids(chat, row["prompt"], [])]
        assert chat.decode(pair.prompt).endswith("Well, ")
        for response, ids in ((row["chosen"], pair.chosen), (row["rejected"], pair.rejected)):
            assert chat.decode(ids) == response + chat.decode([chat.end_of_turn_id])
        assert pack([pair]).loss_mask.sum(1).tolist() == [len(pair.chosen), len(pair.rejected)]


def test_long_pairs_are_left_out_and_told(tmp_path):
    path = write_pairs(tmp_path / "pairs.jsonl")
    path.write_text(path.read_text() + json.dumps({"prompt": "long?", "chosen": "a" * 3000, "rejected": "b"}) + "\n")
    watching = Watching()
    run_recipe(tmp_path / "run", recipe(path, epochs=1, max_length=200), progress=watching)
    assert any("1 of 25 preferences are left out: a prompt and a response of more than" in text for text in watching.warnings)


def labelled(path):
    rows = [{"prompt": f"{number}?", "response": "a", "label": "safe"} for number in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_it_cannot_learn_from_is_named(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    other = labelled(tmp_path / "labelled.jsonl")
    faults = [
        (recipe(other), r"stages\.prefer\.path: .*labelled\.jsonl has single responses with labels, and DPO compares two"),
        (recipe(pairs, max_length=2), r"stages\.prefer: 0 preferences are left to learn from .* raise max_length"),
    ]
    for number, (faulty, words) in enumerate(faults):
        with pytest.raises(TaskError, match=words):
            run_recipe(tmp_path / f"run-{number}", faulty)
    schedule = {"optimizer": {"schedule": "cosine", "warmup_updates": 6}}
    with pytest.raises(ConfigError, match=r"stages\.prefer\.trainer\.optimizer\.warmup_updates is 6, but the stage has 6"):
        run_recipe(tmp_path / "run", recipe(pairs, trainer=schedule))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"beta": 0.0}, r"stages\.prefer.*beta"),
        ({"judged_on": "summary"}, "judged_on"),
        ({"init": "prefer"}, "circle"),
    ],
)
def test_settings_without_a_meaning_are_refused(tmp_path, keys, words):
    with pytest.raises(ConfigError, match=words):
        recipe(tmp_path / "pairs.jsonl", **keys)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_shipped_recipe_learns_from_pairs_to_call_its_tool(tmp_path):
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "dpo.toml", ["seed=1"])
    result = asyncio.run(train(recipe, tmp_path / "run", progress=Progress()))
    before, after = result.evaluations
    assert after["accuracy"] > before["accuracy"] + 0.05
    assert after["tool_error_rate"] < 0.75 * before["tool_error_rate"]
    held_out = [line.get("validation/pair_accuracy") for line in read_lines(result.run.metrics)]
    assert [accuracy for accuracy in held_out if accuracy is not None][-1] > 0.9


def test_batches_of_updates_that_are_not_finite_are_kept_and_the_state_before_them_is_saved(tmp_path, monkeypatch):
    """The first update is made; of all after it what a token deserves is not a number."""
    advantages = dpo_stage.with_advantages
    monkeypatch.setattr(
        dpo_stage,
        "with_advantages",
        lambda batch, margins, beta: advantages(batch, margins * (math.nan if margins.any() else 1.0), beta=beta),
    )
    watching = Watching()
    with pytest.raises(CannotLearnError, match=r"stages\.prefer, step 4: .*3 updates in a row were skipped"):
        run_recipe(tmp_path / "run", recipe(write_pairs(tmp_path / "pairs.jsonl"), checkpoint_every=9), progress=watching)
    run = RunDirectory(tmp_path / "run")
    assert checkpoints.latest_step(run.stage("prefer")) == 3
    assert [(line["step"], line["update/skipped"]) for line in lines_of(run, "prefer")] == [(1, 0.0), (2, 1.0), (3, 1.0)]
    batch = torch.load(sorted(run.stage("prefer").skipped.glob("*.pt"))[0], weights_only=True)
    assert len(batch["ids"]) == 2 * 8
    assert set(batch["columns"]) == {"old_logprobs", "reference_logprobs"}
