"""The recipes of CS336's leaderboard and of its layout with a server, held without a GPU and without vLLM."""

import tomllib
from pathlib import Path

import pytest

from strop.config import validate
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
