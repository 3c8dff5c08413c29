"""Which lengths of completions a recipe may ask for."""

from dataclasses import replace

import pytest
from test_collect import World, make_player, play_all

from faulty_engine import FaultyEngine
from scripted_runs import RECIPE
from strop.config import validate
from strop.errors import ConfigError
from strop.recipe.recipe import Recipe, resolve
from strop.rollout.player import SamplingConfig


def recipe_with(**rl):
    stages = RECIPE["stages"] | {"rl": RECIPE["stages"]["rl"] | rl}
    return validate(Recipe, resolve(RECIPE | {"stages": stages}), place="here")


@pytest.mark.parametrize(("least", "most"), [(0, 1), (4, 5), (4, 512)])
def test_a_completion_that_may_stop_before_the_limit_is_taken(least, most):
    assert validate(SamplingConfig, {"min_tokens": least, "max_tokens": most}, place="a").min_tokens == least


@pytest.mark.parametrize(("least", "most"), [(600, 512), (512, 512), (1, 1)])
def test_a_completion_that_could_never_stop_is_refused_with_both_numbers_and_the_remedy(least, most):
    said = (
        rf"sampling.min_tokens is {least} and sampling.max_tokens is {most}: no completion could stop .* all would be cut off"
        rf".* Lower min_tokens below {most}, or raise max_tokens above {least}\."
    )
    with pytest.raises(ConfigError, match=said):
        validate(SamplingConfig, {"min_tokens": least, "max_tokens": most}, place="a")


def test_a_recipe_is_refused_before_anything_is_played():
    with pytest.raises(ConfigError, match=r"stages.rl.sampling: sampling.min_tokens is 64 and sampling.max_tokens is 32"):
        recipe_with(sampling={"min_tokens": 64, "max_tokens": 32})


def test_so_is_a_schedule_that_lowers_the_limit_to_what_a_completion_has_at_least():
    entry = {"at_step": 2, "sampling": {"max_tokens": 8}}
    said = r"schedule entry 1 \(at_step = 2, sampling.max_tokens = 8\): sampling.min_tokens is 8 and sampling.max_tokens is 8"
    with pytest.raises(ConfigError, match=said):
        recipe_with(sampling={"min_tokens": 8, "max_tokens": 32}, schedule=[entry])


@pytest.mark.parametrize(("limit", "asked"), [(None, 8), (3, 3), (20, 8)])
def test_a_completion_has_at_most_the_tokens_of_a_turn_and_those_that_are_left(limit, asked):
    engine = FaultyEngine(lambda request: (4,) * request.max_tokens)
    player = replace(make_player(World(), engine), sampling=SamplingConfig(max_tokens=8, max_turn_tokens=limit))
    for group in play_all(player):
        for scored in group.trajectories:
            assert [len(turn.completion.ids) for turn in scored.trajectory.turns] == [asked]
