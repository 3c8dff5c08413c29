"""A recipe is a graph of stages: its order is derived, and what cannot be is refused with one clear message."""

import json
from pathlib import Path

import pytest

from scripted_runs import RECIPE
from strop.errors import ConfigError
from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe, resolve

TINY = Path(__file__).with_name("tiny.toml")
EVAL = {"kind": "eval", "num_tasks": 2, "k": 1}
FILTER = {"kind": "filter", "init": "sft", "num_tasks": 4, "k": 4}


def recipe_of(**stages):
    tree = resolve(RECIPE | {"stages": {name: RECIPE["stages"][name] for name in ("base", "sft")} | stages})
    return Recipe.model_validate_json(json.dumps(tree))


def refused(**stages):
    with pytest.raises(ValueError, match="stages") as caught:
        recipe_of(**stages)
    return str(caught.value)


def rl(**keys):
    return RECIPE["stages"]["rl"] | keys


def test_stages_run_behind_those_that_they_stand_on_in_whatever_order_they_are_written():
    tree = RECIPE | {
        "stages": {"after": EVAL | {"init": "rl"}, "rl": rl(data=["hard"]), "hard": FILTER}
        | dict(reversed([(name, RECIPE["stages"][name]) for name in ("base", "sft")]))
    }
    recipe = Recipe.model_validate_json(json.dumps(resolve(tree)))
    assert list(recipe.stages) == ["base", "sft", "hard", "rl", "after"]


def test_a_circle_is_spelled_out():
    said = refused(one=rl(init="two"), two=rl(init="one"))
    assert "in a circle: one -> two -> one" in said


def test_a_stage_that_is_not_there_is_named_with_the_nearest():
    said = refused(rl=rl(init="stf"))
    assert "stages.rl.init names 'stf', which is no stage of the recipe. Did you mean 'sft'?" in said


def test_a_stage_that_only_the_command_line_names_is_told_as_one_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError) as told:
        load_recipe(TINY, ["stages.befor.num_tasks=3"])
    assert str(told.value) == "--set stages.befor.num_tasks: the recipe has no stage 'befor'. Did you mean 'before'?"
    words = ["stages.out.kind=export", "stages.out.init=rl"]
    assert list(load_recipe(TINY, words).stages)[-1] == "out"


def test_a_mistake_in_a_shared_table_is_told_once_and_where_it_stands(tmp_path):
    path = tmp_path / "recipe.toml"
    text = TINY.read_text().replace("max_tokens = 128", 'temprature = 1\nmax_tokens = "many"')
    path.write_text(text + "[stages.after.sampling]\ntop_k = -3\n")
    with pytest.raises(ConfigError) as told:
        load_recipe(path)
    lines = [line.strip().partition(":")[0] for line in str(told.value).splitlines()[1:]]
    assert sorted(lines) == ["sampling.max_tokens", "sampling.temprature", "stages.after.sampling.top_k"]


def test_an_input_of_the_wrong_kind_is_told_with_those_that_would_fit():
    said = refused(rl=rl(init="sft", data=["sft"]), hard=FILTER)
    assert "stages.rl.data names 'sft', which makes a model, but needs tasks. Stages that make this: hard." in said
    said = refused(before=EVAL | {"init": "sft"}, rl=rl(init="before"))
    assert "stages.rl.init names 'before', which makes an evaluation, but needs a model" in said


def test_a_mix_makes_what_it_is_given_and_takes_one_kind_alone():
    conversations = {"kind": "rejection_sampling", "init": "sft", "num_tasks": 4}
    mixed = {"kind": "mix", "data": ["hard", "said"]}
    assert "Name only one kind." in refused(hard=FILTER, said=conversations, mixed=mixed)
    tasks = {"kind": "mix", "data": ["hard"]}
    said = refused(hard=FILTER, mixed=tasks, again={"kind": "sft", "init": "base", "data": ["mixed"], "steps": 1})
    assert "stages.again.data names 'mixed', which makes tasks, but needs conversations" in said


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (FILTER | {"num_tasks": None}, "makes tasks without end"),
        (FILTER | {"min_right": 4}, "Choose min_right <= max_right <= k"),
        (FILTER | {"max_right": 5}, "Choose min_right <= max_right <= k"),
        ({"kind": "sft", "init": "base", "steps": 1}, "give either data"),
        ({"kind": "mix", "data": ["sft"], "counts": {"sft": 0}}, "greater than 0"),
        ({"kind": "mix", "data": ["sft"], "counts": {"base": 1}}, "counts names base, but data names sft"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_before_anything_starts(stage, message):
    with pytest.raises(ValueError, match=message):
        recipe_of(last=stage)
