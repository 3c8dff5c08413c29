"""The recipes of CS336's leaderboard and of its layout with a server, held without a GPU and without vLLM."""

import tomllib
from pathlib import Path

import pytest

from strop.config import validate
from strop.pipeline.sweep_file import load_sweep
from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe, resolve

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture(scope="module")
def of_the_handout():
    """What stands in comments behind the marker in the leaderboard's recipe, as somebody who uncomments it gets it."""
    _, marker, text = (RECIPES / "cs336-leaderboard.toml").read_text(encoding="utf-8").partition("# ---- The hand-out's sizes")
    assert marker
    lines = [line.removeprefix("# ") if line != "#" else "" for line in text.splitlines()[1:]]
    return validate(Recipe, resolve(tomllib.loads("\n".join(lines))), place="the comment")


def test_the_leaderboard_trains_against_the_clock_and_is_judged_on_its_last_policy():
    recipe = load_recipe(RECIPES / "cs336-leaderboard.toml")
    stage, after = recipe.stages["rl"].config, recipe.stages["after"].config
    assert stage.budget_s == 90
    assert stage.validation.product == "last"
    assert (after.init, after.split, after.sampling.temperature) == ("rl", "test", 1.0)
    assert stage.sampling.temperature == 1.0
    assert stage.validation.temperature is None  # as the stage samples
    assert (stage.staleness, recipe.engine.own_process) == (1, True)  # sampling and training overlap


HANDOUT = ("cs336-ladder", "cs336-leaderboard", "cs336-grpo-tiny", "cs336-prompt-tiny", "cs336-sft-tiny", "expert-iteration")


@pytest.mark.parametrize("name", HANDOUT)
def test_a_tiny_recipe_has_the_prompt_and_the_grader_of_the_handout_and_no_tools(name):
    recipe = load_recipe(RECIPES / f"{name}.toml")
    assert recipe.tools == {}
    for stage in (each.config for each in recipe.stages.values() if hasattr(each.config, "reward")):
        assert stage.prompt == "r1_zero"
        assert stage.limits.max_turns == 1
        assert {part: each.kind for part, each in stage.reward.parts.items()} == GRADERS["r1_zero"]


GRADERS = {name: {"accuracy": name, "format": f"{name}_format"} for name in ("r1_zero", "question_only")}


def test_each_arm_of_the_prompt_ablation_trains_and_is_measured_with_its_own_grader():
    sweep = load_sweep(RECIPES / "sweeps" / "cs336-prompt.toml")
    assert [arm.name for arm in sweep.arms] == list(GRADERS)
    for arm in sweep.arms:
        for stage in ("before", "rl", "after"):
            config = arm.recipes[0].stages[stage].config
            assert config.prompt == arm.name
            assert {part: each.kind for part, each in config.reward.parts.items()} == GRADERS[arm.name]
    demonstrations = [
        each.config for each in sweep.arms[0].recipes[0].stages.values() if hasattr(each.config, "num_demonstrations")
    ]
    seen = {each.prompt: (each.num_demonstrations, each.demonstrator) for each in demonstrations if each.num_demonstrations}
    assert seen["r1_zero"] == seen["question_only"]  # the cold start has seen both alike


def test_the_leaderboard_keeps_the_handouts_rules_where_it_has_its_sizes(of_the_handout):
    stage, after = of_the_handout.stages["rl"].config, of_the_handout.stages["after"].config
    assert stage.budget_s == 4 * 3600
    assert set(of_the_handout.stages) == {"base", "rl", "after"}  # no demonstrations of anybody
    for judged in (stage, after):
        assert judged.prompt == "r1_zero"
        assert judged.reward.config.parts["accuracy"].kind == "r1_zero"
        assert (judged.sampling.max_tokens, judged.sampling.temperature) == (1024, 1.0)
    assert (after.num_tasks, after.split) == (5000, "test")
    assert stage.trainer.device == "cuda:0"
    assert of_the_handout.engine.devices == (1,)
