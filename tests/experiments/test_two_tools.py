"""The arms of experiments/two_tools.py: each differs from the recipe in what it says, and in nothing else."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import two_tools

from strop.config import validate
from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe
from strop.run_directory import RunDirectory, write_text

MODEL = Path("/models/policy")


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(two_tools.RECIPE)


def test_the_recipe_has_the_two_tools_that_are_taken_away_and_no_other(recipe):
    assert set(recipe.tools) == set(two_tools.TOOLS)


@pytest.mark.parametrize("name", two_tools.TOOLS)
def test_taking_a_tool_away_leaves_the_other_as_it_is(recipe, name):
    [(kept, tool)] = two_tools.with_tools(recipe, set(two_tools.TOOLS) - {name}).tools.items()
    assert kept != name
    assert tool == recipe.tools[kept]


def test_an_arm_evaluates_the_policy_of_the_whole_recipe_on_the_same_problems(recipe):
    arm = two_tools.evaluated(recipe, MODEL)
    assert list(arm.stages) == ["model", "after"]
    assert arm.stages["model"].config.path == str(MODEL)
    assert arm.stages["after"].init == "model"
    assert arm.stages["after"].replaced(init="rl") == recipe.stages["after"]
    assert two_tools.evaluated(recipe, MODEL, tools="none").stages["after"].config.tools == "none"


def test_an_arm_with_one_tool_makes_the_recipes_rl_from_its_cold_start(recipe):
    arm = two_tools.trained(two_tools.with_tools(recipe, {"search"}), MODEL)
    assert list(arm.stages) == ["model", "rl", "after"]
    assert arm.stages["rl"].replaced(init="sft") == recipe.stages["rl"]
    assert arm.stages["after"] == recipe.stages["after"]
    assert arm.seed == recipe.seed


@pytest.mark.parametrize("make", [two_tools.evaluated, two_tools.trained])
def test_an_arm_is_a_recipe_that_could_have_been_written(recipe, make):
    arm = make(two_tools.with_tools(recipe, {"python"}), MODEL)
    assert validate(Recipe, arm.model_dump(mode="json", exclude_none=True), place="arm").stages.keys() == arm.stages.keys()


def test_an_arm_that_gave_up_tells_the_accuracy_of_all_its_rollouts(recipe, tmp_path):
    run = RunDirectory(tmp_path)
    assert not two_tools.has_given_up(run, recipe)
    steps = [
        {"stage": "rl", "rollout/accuracy": each, "rollout/tool_calls_mean": 1.0, "rollout/length_tokens_mean": 70.0}
        | {"rollout/void_fraction": 0.0, "update/stuck_steps": stuck}
        for each, stuck in ((0.2, 0), (0.0, 1), (0.0, 2), (0.0, 3))
    ]
    write_text(run.metrics, "".join(json.dumps(step) + "\n" for step in steps[:3]))
    assert not two_tools.has_given_up(run, recipe)
    write_text(run.metrics, "".join(json.dumps(step) + "\n" for step in steps))
    assert two_tools.has_given_up(run, recipe)
    told = two_tools.given_up(run, recipe)
    assert told["accuracy"] == pytest.approx(0.05)
    assert (told["num_tasks"], told["k"], told["gave_up_after_steps"]) == (4 * 16, 8, 4)


def test_bars_hold_or_not_by_the_accuracy_of_their_evaluation():
    figures = {
        "accuracy_low": 0.0,
        "accuracy_high": 1.0,
        "tool_calls_mean": 1.0,
        "length_tokens_mean": 9.0,
        "num_tasks": 4,
        "k": 2,
    }
    accuracies = {"before": 0.5, "after": 0.69, "without search": 0.3, "without python": 0.31, "without any tool": 0.0}
    accuracies |= {"RL with search alone": 0.1, "RL with python alone": 0.1}
    found = {name: {**figures, "accuracy": each} for name, each in accuracies.items()}
    results = two_tools.summarise(found, [])
    assert {name for name, bar in results["bars"].items() if not bar["holds"]} == {"after", "without python"}
    assert two_tools.table(results).count("DOES NOT HOLD") == 2
