"""Rules that end a stage before its last step: when they hold, what a run does then, and that a fall changes none of it."""

import json

import pytest

from scripted_runs import RECIPE, answer, lines_of, make_recipe, recipe_of, run_recipe
from strop.errors import ConfigError
from strop.recipe.schedule import MetricRule, why_over
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop import checkpoints

VALIDATION = {"every_steps": 2, "num_tasks": 2, "k": 1}
SILENT = {"kind": "sum", "parts": {"called": {"kind": "called"}}}  # says nothing of what is right


def rule(**keys):
    return MetricRule.model_validate_json(json.dumps(keys))


def steps_of(key, *values):
    """Lines of as many steps; a step whose value is None has no such metric."""
    return [
        {"stage": "rl", "step": step} | ({} if value is None else {key: value}) for step, value in enumerate(values, start=1)
    ]


def truncated(*values):
    return steps_of("rollout/truncated_fraction", *values)


def accuracies(*values):
    return steps_of("validation/accuracy", *values)


@pytest.mark.parametrize(
    ("keys", "shares", "is_over"),
    [
        ({"truncated_above": 0.1}, [0.1], False),  # above, not at
        ({"truncated_above": 0.1}, [0.11], True),
        ({"truncated_above": 0.1, "over_steps": 2}, [0.3], False),  # one is not two
        ({"truncated_above": 0.1, "over_steps": 2}, [0.3, 0.0], True),  # their mean
        ({"truncated_above": 0.1, "over_steps": 2}, [0.9, 0.0, 0.0], False),  # the last two alone
        ({"truncated_above": 0.1, "over_steps": 2}, [0.3, None, 0.1], True),  # a step that lost all its rollouts tells nothing
    ],
)
def test_a_stage_is_over_where_the_mean_share_of_truncated_rollouts_is_beyond_the_bar(keys, shares, is_over):
    assert bool(why_over([rule(**keys)], truncated(*shares))) is is_over


@pytest.mark.parametrize(
    ("keys", "found", "is_over"),
    [
        ({"plateau_of": 2}, [0.5, 0.4], False),  # one validation since
        ({"plateau_of": 2}, [0.5, 0.4, 0.5], True),  # as good is no better
        ({"plateau_of": 2}, [0.5, 0.4, 0.51], False),
        ({"plateau_of": 2, "min_gain": 0.02}, [0.5, 0.4, 0.51], True),
        ({"plateau_of": 1}, [0.5, None, None], False),  # steps without a validation count for nothing
        ({"plateau_of": 1}, [0.5, None, 0.5], True),
        ({"plateau_of": 2}, [0.2, 0.6, 0.3, 0.4], True),  # the best before, not the last
    ],
)
def test_a_stage_is_over_where_validations_in_a_row_do_not_beat_the_best_before_them(keys, found, is_over):
    assert bool(why_over([rule(**keys)], accuracies(*found))) is is_over


def test_what_held_is_told_with_its_figures_and_the_rule():
    rules = [rule(plateau_of=2, min_gain=0.02), rule(truncated_above=0.1, over_steps=2)]
    assert why_over(rules, truncated(0.2, 0.3)) == (
        "25.0% of the rollouts of the last 2 steps were truncated (truncated_above = 0.1, over_steps = 2)"
    )
    assert why_over(rules, accuracies(0.5, 0.4, 0.51)) == (
        "held-out accuracy was 50.0% at its best, and at most 51.0% in the 2 validations since"
        " (plateau_of = 2, min_gain = 0.02)"
    )
    assert why_over(rules, []) == ""


def rambling(conversation, draw):
    """Words without end, or a wrong number: some rollouts run out of tokens."""
    return draw.choice(["and so on " * 60, answer(1)])


def test_a_run_ends_where_too_many_rollouts_are_truncated_and_its_last_policy_is_measured_saved_and_handed_on(tmp_path):
    rules = [{"truncated_above": 0.05, "over_steps": 3}]
    recipe = make_recipe(steps=9, end_when=rules, checkpoint_every=9, give_up_after=9, validation=VALIDATION)
    done = run_recipe(tmp_path / "run", recipe, say=rambling)
    lines, stage = lines_of(done.run), done.run.stage("rl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["rollout/truncated_fraction"] > 0.05
    assert [line["step"] for line in lines if "validation/accuracy" in line] == [2, 3]
    assert checkpoints.latest_step(stage) == 3
    summary = read_json(stage.done)["summary"]
    assert summary.startswith("3 steps of grpo")
    assert "ended early" in summary
    assert "truncated_above = 0.05" in summary
    (told,) = [line for line in read_lines(done.run.events) if line["event"] == "ended_early"]
    assert told["step"] == 3
    assert told["because"] in summary
    assert len(done.result.evaluations) == 2


def test_law_9_a_run_that_falls_after_a_plateau_ended_it_trains_no_further(tmp_path, monkeypatch):
    rules = [{"plateau_of": 1, "min_gain": 0.99}]
    recipe = make_recipe(steps=9, end_when=rules, checkpoint_every=9, validation=VALIDATION)
    with monkeypatch.context() as patched:
        patched.setattr("strop.stages.rl.write_product", fall)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(tmp_path / "run", recipe)
    before = lines_of(RunDirectory(tmp_path / "run"))
    assert before[-1]["step"] == 4  # the second validation
    again = run_recipe(tmp_path / "run", recipe)
    assert lines_of(again.run) == before
    assert len([line for line in read_lines(again.run.events) if line["event"] == "ended_early"]) == 1
    assert "plateau_of = 1" in read_json(again.run.stage("rl").done)["summary"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"end_when": [{}]}, "a rule has one of truncated_above, plateau_of"),
        ({"end_when": [{"plateau_of": 1}]}, "the stage has no validation"),
        (
            {"end_when": [{"plateau_of": 1}], "validation": VALIDATION, "reward": SILENT},
            "no part of its reward says what is right",
        ),
        ({"end_when": [{"truncated_above": 0.1, "over_steps": 9}]}, "after step 9 at the earliest, but the stage has 9"),
        (
            {"end_when": [{"truncated_above": 0.1}], "trainer": {"optimizer": {"schedule": "cosine"}}},
            r"end_when may end the stage early, but trainer\.optimizer\.schedule is 'cosine'",
        ),
    ],
)
def test_rules_that_cannot_be_meant_are_refused_before_anything_starts(keys, message):
    rl = RECIPE["stages"]["rl"] | {"steps": 9} | keys
    with pytest.raises(ConfigError, match=message):
        recipe_of(RECIPE["stages"] | {"rl": rl})


async def fall(*_):
    raise KeyboardInterrupt
