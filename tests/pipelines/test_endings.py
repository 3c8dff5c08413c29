"""Rules that end a stage before its last step: when they hold, what a run does then, and that a fall changes none of it."""

import asyncio
import json
import shutil
from itertools import pairwise

import pytest
from killing import TINY

from scripted_runs import (
    RECIPE,
    Watching,
    answer,
    assert_same_training,
    falling,
    lines_of,
    make_recipe,
    recipe_of,
    run_recipe,
    sometimes_right,
)
from strop.errors import ConfigError
from strop.pipeline.plan import plan
from strop.pipeline.run import train
from strop.recipe.load import load_recipe
from strop.recipe.schedule import MetricRule, why_over
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.runs.lineage import weights_digest
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
    ("share", "over_steps", "rewards", "is_over"),
    [
        (0.5, 2, [0.6, 0.29, 0.3], False),  # at half of the best, not below
        (0.5, 2, [0.6, 0.29, 0.29], True),
        (0.5, 2, [0.6, 0.29], False),  # one step is not two
        (0.5, 2, [0.6, 0.2, 0.4, 0.2], False),  # not in a row
        (0.5, 2, [0.2, 0.6, 0.5, 0.2, 0.1], True),  # the best of all steps, not the first or the one before
        (0.9, 1, [0.6, 0.53], True),
        (0.5, 2, [0.6, 0.2, None], True),  # a step without rollouts says nothing
        (0.5, 1, [-0.1, -0.9], False),  # no share of a best that is not above 0
        (0.5, 1, [0.0, 0.0], False),
        (0.5, 1, [], False),
    ],
)
def test_a_stage_is_over_where_the_reward_is_below_a_share_of_its_best_for_steps_in_a_row(share, over_steps, rewards, is_over):
    lines = steps_of("rollout/reward_mean", *rewards)
    assert bool(why_over([rule(reward_below=share, over_steps=over_steps)], lines)) is is_over


@pytest.mark.parametrize(
    ("over_steps", "found", "is_over"),
    [
        (1, [0.8, 0.3], True),
        (4, [None, 0.8, None, 0.3], False),  # of four steps, one validation was good
        (4, [None, 0.8, None, 0.3, None, 0.2], True),
        (4, [None, 0.8, None, 0.3, None, 0.4], False),  # at half of the best, not below
        (1, [0.8, None], False),  # no validation in the last step
    ],
)
def test_a_stage_is_over_where_validations_are_below_a_share_of_the_best_for_steps_in_a_row(over_steps, found, is_over):
    assert bool(why_over([rule(accuracy_below=0.5, over_steps=over_steps)], accuracies(*found))) is is_over


@pytest.mark.parametrize(
    ("keys", "every_steps", "first"),
    [
        ({"reward_below": 0.5, "over_steps": 20}, 10, 21),
        ({"accuracy_below": 0.5, "over_steps": 20}, 10, 30),  # good after step 10, then bad for 20 steps
        ({"accuracy_below": 0.5}, 10, 20),  # the second validation
    ],
)
def test_a_collapse_is_found_no_earlier_than_after_a_good_step(keys, every_steps, first):
    assert rule(**keys).first_step(every_steps) == first


def test_what_held_is_told_with_its_figures_and_the_rule():
    rules = [rule(accuracy_below=0.2), rule(truncated_above=0.1, over_steps=2)]
    assert why_over(rules, truncated(0.2, 0.3)) == (
        "25.0% of the rollouts of the last 2 steps were truncated (truncated_above = 0.1, over_steps = 2)"
    )
    assert why_over(rules, []) == ""
    assert why_over([rule(reward_below=0.5, over_steps=2)], steps_of("rollout/reward_mean", 0.4, 0.61, 0.2, 0.21)) == (
        "the mean reward was 0.61 at its best (step 2), and at most 0.21 in the last 2 steps"
        " (reward_below = 0.5, over_steps = 2)"
    )
    assert why_over([rule(accuracy_below=0.5)], accuracies(0.75, 0.25)) == (
        "held-out accuracy was 0.75 at its best (step 1), and at most 0.25 in the last step (accuracy_below = 0.5)"
    )


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


def test_a_run_that_falls_after_a_rule_ended_it_trains_no_further(tmp_path, monkeypatch):
    rules = [{"truncated_above": 0.05, "over_steps": 3}]
    recipe = make_recipe(steps=9, end_when=rules, checkpoint_every=9, give_up_after=9)
    with monkeypatch.context() as patched:
        patched.setattr("strop.stages.loop.steps.write_product", fall)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(tmp_path / "run", recipe, say=rambling)
    before = lines_of(RunDirectory(tmp_path / "run"))
    assert before[-1]["step"] == 3
    again = run_recipe(tmp_path / "run", recipe, say=rambling)
    assert lines_of(again.run) == before
    assert len([line for line in read_lines(again.run.events) if line["event"] == "ended_early"]) == 1
    assert "truncated_above = 0.05" in read_json(again.run.stage("rl").done)["summary"]


COLLAPSE = [
    "stages.rl.steps=24",
    "stages.rl.keep_checkpoints=99",
    "stages.rl.give_up_after=9",
    "stages.rl.trainer.optimizer={lr = 0.05, warmup_updates = 100}",  # a rate that rises until it destroys the policy
    "stages.rl.validation={every_steps = 1, num_tasks = 16}",
    "stages.rl.end_when=[{reward_below = 0.5, over_steps = 2}]",
]


def collapse(directory, *, until="after"):
    """The tiny model, trained by its own engine at a rate that makes it forget what it knew."""
    progress = Watching()
    recipe = load_recipe(TINY, COLLAPSE)
    run = asyncio.run(train(recipe, directory, progress=progress, command="strop train tiny.toml", until=until)).run
    return run, progress


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The stages before RL."""
    return collapse(tmp_path_factory.mktemp("begun") / "run", until="sft")[0].path


@pytest.fixture(scope="module")
def collapsed(begun):
    return collapse(shutil.copytree(begun, begun.with_name("collapsed")))


def test_a_policy_that_collapses_ends_its_stage_and_the_best_that_was_measured_is_handed_on(collapsed):
    run, progress = collapsed
    stage, lines = run.stage("rl"), lines_of(run)
    rewards = [line["rollout/reward_mean"] for line in lines]
    held_out = [line["validation/accuracy"] for line in lines]
    assert 3 <= len(lines) < 24
    assert max(rewards[-2:]) < max(rewards) / 2
    assert all(max(each) >= max(rewards) / 2 for each in pairwise(rewards[:-1]))  # it ends at once
    best = held_out.index(max(held_out)) + 1
    assert best < len(lines)
    assert read_json(stage.done)["model"] == "stages/rl/best"
    assert weights_digest(stage.best) == weights_digest(stage.checkpoint(best) / "model") != weights_digest(stage.model)
    # The stage after it evaluates that policy.
    assert {each for line in read_lines(run.stage("after").rollouts(0)) for each in line["weights"].values()} == {
        weights_digest(stage.best)
    }
    # And it is said everywhere.
    [told] = [line for line in read_lines(run.events) if line["event"] == "ended_early"]
    assert told["because"].endswith(f"; the policy is that of step {best}, the best that a validation found")
    assert told["because"] in read_json(stage.done)["summary"]
    assert f"ended after step {len(lines)}: {told['because']}" in progress.warnings
    assert f"the policy is that of step {best}" in run.report.read_text()


def test_a_run_that_falls_as_its_policy_collapses_ends_as_it_would_have(begun, collapsed, tmp_path, monkeypatch):
    whole, _ = collapsed
    directory = shutil.copytree(begun, tmp_path / "run")
    with falling("rl", before=len(lines_of(whole))):  # before the last checkpoint
        collapse(directory)
    with monkeypatch.context() as patched:  # and after it
        patched.setattr("strop.stages.loop.steps.write_product", fall)
        with pytest.raises(KeyboardInterrupt):
            collapse(directory)
    run, _ = collapse(directory)
    assert_same_training(run, whole)
    assert weights_digest(run.stage("rl").best) == weights_digest(whole.stage("rl").best)
    mine, theirs = (read_json(each.stage("rl").done) for each in (run, whole))
    assert (mine["summary"], mine["model"]) == (theirs["summary"], theirs["model"])


def test_held_out_accuracy_that_collapses_ends_a_stage_likewise(tmp_path):
    good = tmp_path / "run" / "stages" / "rl" / "validation" / "step-000002.jsonl"

    def wrong_in_the_end(conversation, draw):
        return answer("none") if good.exists() and len(read_lines(good)) == 2 else sometimes_right(conversation, draw)

    rules = [{"accuracy_below": 0.5, "over_steps": 3}]
    recipe = make_recipe(steps=9, end_when=rules, give_up_after=9, keep_checkpoints=9, validation=VALIDATION)
    run = run_recipe(tmp_path / "run", recipe, say=wrong_in_the_end).run
    found = {line["step"]: line["validation/accuracy"] for line in lines_of(run) if "validation/accuracy" in line}
    assert list(found) == [2, 4, 5]  # steps 3 to 5 have no good validation, and the last is measured
    assert found[2] > found[4] == found[5] == 0
    stage = run.stage("rl")
    assert read_json(stage.done)["model"] == "stages/rl/best"
    assert weights_digest(stage.best) == weights_digest(stage.checkpoint(2) / "model")
    assert "the policy is that of step 2" in read_json(stage.done)["summary"]


def test_the_plan_says_what_would_end_a_stage():
    [rl] = [stage for stage in plan(load_recipe(TINY, COLLAPSE)) if stage.name == "rl"]
    assert rl.arithmetic.endswith("; fewer if before that reward_below = 0.5, over_steps = 2")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"end_when": [{"reward_below": 0.5}]},
            r"rule 1 \(reward_below = 0.5\): it ends with the policy of the best held-out accuracy, but the stage has no"
            r" validation. Give it one \(validation.every_steps\), or leave the rule out",
        ),
        (
            {"end_when": [{"reward_below": 0.5}], "validation": VALIDATION, "reward": SILENT},
            "no part of its reward says what is right",
        ),
        ({"end_when": [{"reward_below": 0.5, "over_steps": 8}], "validation": VALIDATION}, "after step 9 at the earliest"),
        (
            {"end_when": [{"reward_below": 1.0}], "validation": VALIDATION},
            "end_when.0.reward_below: Input should be less than 1",
        ),
        ({"end_when": [{"accuracy_below": 0.5}]}, "it waits for held-out accuracy, but the stage has no validation"),
        ({"end_when": [{"reward_below": 0.5, "accuracy_below": 0.5}]}, "a rule has one of truncated_above, reward_below"),
        ({"end_when": [{}]}, "a rule has one of truncated_above, reward_below"),
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


async def fall(context, *words, **options):
    """In RL; other stages write their product."""
    if context.name == "rl":
        raise KeyboardInterrupt
    return await checkpoints.write_product(context, *words, **options)
