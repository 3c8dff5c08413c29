"""An evaluation tells how many responses are right, well formed and wrong, and not well formed, and shows examples of each."""

import re
from collections import Counter

import pytest

from scripted_runs import RECIPE, recipe_of, run_recipe
from strop.reports.log import read_run
from strop.reports.page import report_page
from strop.reports.rollouts import EXAMPLES, read_rollouts
from strop.run_directory import read_json

REWARD = {"kind": "sum", "parts": {"accuracy": {"kind": "r1_zero"}, "format": {"kind": "r1_zero_format", "weight": 0.0}}}
RIGHT, WELL_FORMED, UNFORMED = "right", "well formed but wrong", "not well formed"


def says(conversation, draw):
    """A third is right, a third well formed, a third neither."""
    first, second = map(int, re.search(r"(\d+)\+(\d+)", conversation).groups())
    said = draw.choice(["right", "wrong", "other"])
    return {
        "right": f"So. </think> <answer> {first + second} </answer>",
        "wrong": f"So. </think> <answer> {first + second + 1} </answer>",
        "other": "I cannot say.",
    }[said]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    stages = {
        "base": RECIPE["stages"]["base"],
        "before": RECIPE["stages"]["before"] | {"init": "base", "num_tasks": 30, "k": 3},
    }
    recipe = recipe_of(stages, reward=REWARD)
    return run_recipe(tmp_path_factory.mktemp("kinds") / "run", recipe, say=says)


def test_the_result_and_the_summary_count_each_kind(done):
    result = read_json(done.run.stage("before").evaluation)
    kinds = result["kinds"]
    assert sum(kinds.values()) == 90
    assert set(kinds) == {RIGHT, WELL_FORMED, UNFORMED}
    assert kinds[RIGHT] / 90 == pytest.approx(result["accuracy"])
    assert (kinds[RIGHT] + kinds[WELL_FORMED]) / 90 == pytest.approx(result["parts"]["format"]["mean"])
    [(_, summary)] = [each for each in done.progress.stages if each[0] == "before"]
    assert f"{kinds[RIGHT]} right, {kinds[WELL_FORMED]} well formed but wrong, {kinds[UNFORMED]} not well formed" in summary


@pytest.mark.parametrize(("kind", "text"), [(RIGHT, "</think> <answer> {} </answer>"), (UNFORMED, "I cannot say {}.")])
def test_kinds_that_no_response_is_of_are_counted_too(tmp_path, kind, text):
    def says(conversation, draw):
        return text.format(sum(map(int, re.search(r"(\d+)\+(\d+)", conversation).groups())))

    before = RECIPE["stages"]["before"] | {"init": "base", "num_tasks": 2, "k": 1}
    done = run_recipe(tmp_path, recipe_of({"base": RECIPE["stages"]["base"], "before": before}, reward=REWARD), say=says)
    kinds = {RIGHT: 0, WELL_FORMED: 0, UNFORMED: 0} | {kind: 2}
    assert read_json(done.run.stage("before").evaluation)["kinds"] == kinds
    words = ", ".join(f"{num} {each}" for each, num in kinds.items())
    assert words in dict(done.progress.stages)["before"]
    log = read_run(done.run)
    assert words in report_page(log, read_rollouts(done.run, log))


def test_the_report_shows_ten_examples_of_each_kind(done):
    log = read_run(done.run)
    [step] = [step for step in read_rollouts(done.run, log).steps if step.stage.name == "before"]
    assert Counter(rollout.fate for rollout in step.rollouts) == dict.fromkeys([RIGHT, WELL_FORMED, UNFORMED], EXAMPLES)
    for rollout in step.rollouts:
        text = rollout.turns[-1].completion.text
        assert (rollout.fate == UNFORMED) is ("I cannot say" in text)
        assert (rollout.fate == RIGHT) is (rollout.scored.reward_parts["accuracy"] == 1)
    page = report_page(log, read_rollouts(done.run, log))
    kinds = read_json(done.run.stage("before").evaluation)["kinds"]
    assert f"{kinds[UNFORMED]} not well formed" in page
