"""A reward model that is trained in a recipe, measured, resumed, and asked by the stages after it."""

import json
import math
import re

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from scripted_runs import RECIPE, Watching, assert_same_training, lines_of, recipe_of, run_recipe
from strop.errors import CannotLearnError, ConfigError, TaskError
from strop.pipeline.plan import check_stages
from strop.rewards.reward_model import ExchangeFormat
from strop.rewards.scorers import Exchange
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop import checkpoints
from strop.stages.loop.ledger import read_rollouts
from strop.training import reward_model
from word_pairs import write_labelled, write_pairs


def recipe(path, *, later=None, **keys):
    stages = {
        "base": RECIPE["stages"]["base"],
        "helpful": {
            "kind": "reward_model",
            "init": "base",
            "path": str(path),
            "batch_size": 8,
            "epochs": 2,
            "trainer": {"optimizer": {"lr": 0.01}},
            "checkpoint_every": 1,
        }
        | keys,
    } | (later or {})
    return recipe_of(stages)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reward")
    return run_recipe(directory / "run", recipe(write_pairs(directory / "pairs.jsonl")))


def test_it_measures_itself_on_prompts_that_it_has_not_seen(trained):
    quality = read_json(trained.run.stage("helpful").path / "quality.json")
    assert quality["num"] == 2  # a tenth of 24 prompts
    assert quality["num_left_out"] == 0
    assert set(quality) >= {"accuracy", "auc", "length_correlation", "length_correlation_in_pairs"}


def test_each_step_has_its_loss_and_the_last_batch_of_an_epoch_is_what_is_left(trained):
    lines = lines_of(trained.run, "helpful")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]  # 22 pairs in batches of 8: 3 an epoch
    assert lines[0]["reward_model/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert lines[-1]["reward_model/loss"] < lines[0]["reward_model/loss"]
    assert all(line["update/tokens_per_s"] > 0 and 0 < line["machine/flop_utilisation"] < 1 for line in lines)


def test_batches_of_updates_that_are_not_finite_are_kept_and_the_state_before_them_is_saved(tmp_path, monkeypatch):
    """The first update is made; of all after it the loss is not a number."""
    losses = reward_model.preference_loss
    monkeypatch.setattr(
        reward_model,
        "preference_loss",
        lambda margins: losses(margins) * (1.0 if not margins.any() else math.nan),
    )
    broken = recipe(write_pairs(tmp_path / "pairs.jsonl"), checkpoint_every=9)
    watching = Watching()
    with pytest.raises(CannotLearnError, match="3 updates in a row were skipped"):
        run_recipe(tmp_path / "run", broken, progress=watching)
    stage = RunDirectory(tmp_path / "run").stage("helpful")
    assert checkpoints.latest_step(stage) == 3  # after one update, and two that were skipped
    lines = read_lines(RunDirectory(tmp_path / "run").metrics)
    assert [(line["step"], line["update/skipped"]) for line in lines] == [(1, 0.0), (2, 1.0), (3, 1.0)]
    kept = sorted(stage.skipped.glob("*.pt"))
    assert [path.name for path in kept] == ["step-000002-1.pt", "step-000003-2.pt", "step-000004-3.pt"]
    assert all(any(str(path) in warning for warning in watching.warnings) for path in kept)
    batch = torch.load(kept[0], weights_only=True)
    assert len(batch["ids"]) == 2 * 8
    assert batch["advantages"].sum(1).tolist() == [1.0, -1.0] * 8  # a chosen response before each rejected one
    assert batch["loss_mask"].sum(1).tolist() == [1] * 16


class Impatient(Watching):
    """Ends the program after a step."""

    def step(self, metrics, step):
        if step == 4 and "reward_model/loss" in metrics:
            raise KeyboardInterrupt


def test_a_run_that_is_stopped_ends_with_the_same_model(trained, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(tmp_path / "run", recipe(pairs), progress=Impatient())
    resumed = run_recipe(tmp_path / "run", recipe(pairs))
    events = [line["event"] for line in read_lines(resumed.run.events)]
    assert "resumed" in events
    assert_same_training(resumed.run, trained.run, "helpful")


def test_a_later_stage_is_judged_by_it(tmp_path):
    reward = {"kind": "sum", "parts": {"helpful": {"kind": "scorer", "scorer": {"kind": "embedded", "stage": "helpful"}}}}
    later = {"judged": {"kind": "eval", "init": "base", "num_tasks": 2, "k": 2, "reward": reward}}
    made = run_recipe(tmp_path / "run", recipe(write_pairs(tmp_path / "pairs.jsonl"), later=later, epochs=1))
    helpful = read_json(made.run.stage("judged").evaluation)["parts"]["helpful"]["mean"]
    assert 0 < helpful < 1
    assert read_json(made.run.stage("judged").evaluation)["reward_mean"] == pytest.approx(helpful, abs=1e-12)


@pytest.mark.parametrize("stage", ["base", "helpfull"])
def test_a_scorer_that_names_another_stage_is_told(tmp_path, stage):
    reward = {"kind": "sum", "parts": {"helpful": {"kind": "scorer", "scorer": {"kind": "embedded", "stage": stage}}}}
    later = {"judged": {"kind": "eval", "init": "base", "reward": reward}}
    with pytest.raises(ConfigError, match=rf"reward\.parts\.helpful\.scorer\.stage names '{stage}'"):
        recipe(tmp_path / "pairs.jsonl", later=later)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"trainer": {"lora": {}}}, "trains all of its weights in one process"),
        ({"trainer": {"workers": 2}}, "trains all of its weights in one process"),
    ],
)
def test_what_a_reward_model_cannot_do_is_refused(tmp_path, keys, words):
    with pytest.raises(ConfigError, match=words):
        recipe(tmp_path / "pairs.jsonl", **keys)


def test_long_pairs_are_left_out_and_told(tmp_path):
    path = write_pairs(tmp_path / "pairs.jsonl")
    row = {"prompt": "long?", "chosen": "a" * 3000, "rejected": "b"}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    watching = Watching()
    made = run_recipe(tmp_path / "run", recipe(path, epochs=1, max_length=200), progress=watching)
    assert any("1 of 25 preferences are left out" in warning for warning in watching.warnings)
    assert read_json(made.run.stage("helpful").path / "quality.json")["num_left_out"] == 1


def test_a_response_that_never_ends_the_thought_that_its_prompt_began_is_left_out_and_not_taken_for_a_summary(tmp_path):
    path = write_pairs(tmp_path / "pairs.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["chosen"], row["rejected"] = (f"so be it</think>{row[name]}" for name in ("chosen", "rejected"))
    rows[3]["rejected"] = "and on and on"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    left_out = {}
    for is_prefilled in (False, True):
        made = run_recipe(tmp_path / f"run-{is_prefilled}", recipe(path, epochs=1, is_prefilled=is_prefilled))
        left_out[is_prefilled] = read_json(made.run.stage("helpful").path / "quality.json")["num_left_out"]
    assert left_out == {False: 0, True: 1}


def test_a_file_of_which_nothing_is_left_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"stages\.helpful: 0 preferences are left"):
        run_recipe(tmp_path / "run", recipe(write_pairs(tmp_path / "pairs.jsonl"), max_length=2))


SAFETY = {"judged_on": "response", "epochs": 20, "batch_size": 10, "test_share": 0.25, "checkpoint_every": 100}


def safety_part(**scorer):
    return {"kind": "scorer", "judged_on": "response", "scorer": {"kind": "embedded", "stage": "helpful"} | scorer}


@pytest.fixture(scope="module")
def safe(tmp_path_factory):
    """A model of single responses, and an RL stage whose reward it is a part of."""
    directory = tmp_path_factory.mktemp("safety")
    parts = {"accuracy": {"kind": "math"}, "safety": safety_part(max_batch=1) | {"weight": 0.5}}
    later = {"rl": RECIPE["stages"]["rl"] | {"init": "base", "reward": {"kind": "sum", "parts": parts}}}
    return run_recipe(directory / "run", recipe(write_labelled(directory / "labelled.jsonl"), later=later, **SAFETY))


def test_a_model_of_single_responses_learns_what_stands_in_thoughts_alone_and_is_measured(safe):
    quality = read_json(safe.run.stage("helpful").path / "quality.json")
    assert (quality["num"], quality["num_left_out"]) == (10, 0)
    assert quality["auc"] >= 0.9
    assert quality["accuracy"] >= 0.8
    assert -1 <= quality["length_correlation"] <= 1
    assert -1 <= quality["length_correlation_in_labels"] <= 1
    assert quality["length_correlation_in_pairs"] is None
    [(_, summary)] = [told for told in safe.progress.stages if told[0] == "helpful"]
    assert f"accuracy {quality['accuracy']:.3f}, AUC {quality['auc']:.3f}" in summary


def test_a_rollout_of_rl_is_judged_by_it_on_all_that_the_policy_wrote(safe):
    directory = safe.run.stage("helpful").model
    model, exchanges = AutoModelForSequenceClassification.from_pretrained(directory).eval(), ExchangeFormat(directory)
    judged = [each for step in (1, 2) for each in read_rollouts(safe.run.stage("rl").rollouts(step))]
    assert len(judged) == 2 * 3 * 6
    for scored in judged:
        written = "".join(turn.completion_text for turn in scored.trajectory.turns)
        question = re.search(r"\d+\+\d+", exchanges.tokenizer.decode(scored.trajectory.prompt_ids))[0]
        with torch.no_grad():
            row = torch.tensor([exchanges.ids(Exchange(prompt=question, response=written))])
            expected = torch.sigmoid(model(input_ids=row).logits).item()
        assert scored.reward_parts["safety"] == pytest.approx(expected, abs=1e-5)
        assert scored.reward == pytest.approx(scored.reward_parts["accuracy"] + 0.5 * scored.reward_parts["safety"])
    assert len({round(scored.reward_parts["safety"], 4) for scored in judged}) > 3  # a part that tells rollouts apart


def test_responses_of_one_label_are_refused_to_learn_from_and_told_of_to_be_measured_on(tmp_path):
    path = write_labelled(tmp_path / "labelled.jsonl")
    rows = path.read_text().splitlines(keepends=True)
    unsafe = tmp_path / "unsafe.jsonl"
    unsafe.write_text("".join(rows[1::2]))
    with pytest.raises(TaskError, match=r"stages\.helpful: 15 responses, all of them labelled unsafe, are left to learn from"):
        run_recipe(tmp_path / "one", recipe(unsafe, **SAFETY))
    path.write_text("".join([*rows[:20:2], *rows[21::2]]))  # one response to each prompt
    made = run_recipe(tmp_path / "both", recipe(path, **SAFETY | {"epochs": 1, "test_share": 0.01}))
    assert read_json(made.run.stage("helpful").path / "quality.json")["auc"] is None
    told = "\n".join(made.progress.warnings)
    assert re.search("1 response, all of them labelled (safe|unsafe), are left to measure on, so there is no AUC", told)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"judged_on": "response"}, 'reward.parts.safety.judged_on is "response", but that of the stage .* is "summary"'),
        ({"think_tag": "reason"}, 'reward.parts.safety.think_tag is "reason", but that of the stage .* is "think"'),
    ],
)
def test_a_model_that_is_shown_another_part_of_a_response_than_it_was_trained_on_is_refused(tmp_path, part, message):
    reward = {"kind": "sum", "parts": {"safety": safety_part() | {"judged_on": "summary"} | part}}
    later = {"judged": {"kind": "eval", "init": "base", "num_tasks": 2, "k": 2, "reward": reward}}
    made = recipe(write_pairs(tmp_path / "pairs.jsonl"), later=later)
    with pytest.raises(ConfigError, match=message):
        check_stages(made, ["judged"])


def test_a_run_warns_of_batches_that_depend_on_the_clock_and_not_of_stages_that_are_done(tmp_path):
    reward = {"kind": "sum", "parts": {"helpful": {"kind": "scorer", "scorer": {"kind": "embedded", "stage": "helpful"}}}}
    later = {"judged": {"kind": "eval", "init": "base", "num_tasks": 2, "k": 2, "reward": reward}}
    made = recipe(write_pairs(tmp_path / "pairs.jsonl"), later=later, epochs=1)
    for expected in (1, 0):
        progress = run_recipe(tmp_path / "run", made).progress
        assert sum("depends on the clock" in warning for warning in progress.warnings) == expected
