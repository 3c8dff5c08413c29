"""A run that copies stages from another ends as one that ran them: bit for bit."""

import json
import shutil

import pytest

from scripted_runs import assert_same_training, make_recipe, run_recipe, untimed
from strop.recipe.load import recipe_of
from strop.recipe.recipe import Recipe
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.runs.lineage import copy_stages, num_common, num_done
from strop.runs.manifest import write_manifest


@pytest.fixture
def source(scripted_run, tmp_path):
    """A finished run of the recipe, of one's own."""
    return RunDirectory(shutil.copytree(scripted_run.run.path, tmp_path / "source"))


def other_recipe():
    return make_recipe(steps=1, trainer={"optimizer": {"lr": 1e-1}})


def taken_over(directory, recipe, source):
    run = RunDirectory(directory)
    run.path.mkdir()
    write_manifest(run, recipe, "strop train")
    copy_stages(run, source, recipe, num=num_common(recipe, recipe_of(source)))
    return run


def test_a_run_that_takes_its_cold_start_over_ends_as_one_that_made_it(source, tmp_path):
    alone = run_recipe(tmp_path / "alone", other_recipe(), is_fresh=True).run
    run = taken_over(tmp_path / "run", other_recipe(), source)
    assert num_done(run, recipe_of(run)) == 3
    watched = run_recipe(run.path, other_recipe())
    assert [name for name, summary in watched.progress.stages if summary.endswith("(done before)")] == ["base", "sft", "before"]
    assert_same_training(run, alone)
    assert untimed(read_json(run.stage("after").evaluation)) == untimed(read_json(alone.stage("after").evaluation))


def test_a_stage_that_is_taken_over_brings_the_rows_of_its_updates_along(source, tmp_path):
    run = taken_over(tmp_path / "run", make_recipe(), source)
    assert read_lines(run.updates) == read_lines(source.updates) != []


def test_files_are_shared_and_the_source_stays_as_it_was(source, tmp_path):
    before = (source.metrics.read_bytes(), source.events.read_bytes())
    run = taken_over(tmp_path / "run", other_recipe(), source)
    weights = run.stage("sft").model / "model.safetensors"
    assert weights.samefile(source.stage("sft").model / "model.safetensors")
    shutil.rmtree(run.path)
    assert (source.metrics.read_bytes(), source.events.read_bytes()) == before
    assert (source.stage("sft").model / "model.safetensors").exists()


def test_taking_over_again_after_a_kill_between_lines_and_files_doubles_nothing(source, tmp_path):
    run = taken_over(tmp_path / "run", other_recipe(), source)
    once = read_lines(run.metrics)
    shutil.rmtree(run.stage("sft").path)
    copy_stages(run, source, other_recipe(), num=3)
    assert sorted(map(str, read_lines(run.metrics))) == sorted(map(str, once))
    assert run.stage("sft").done.exists()


@pytest.mark.parametrize(
    ("change", "num"),
    [
        (lambda recipe: recipe["stages"]["rl"].update(steps=9), 3),
        (lambda recipe: recipe["stages"]["sft"].update(steps=9), 1),
        (lambda recipe: recipe["stages"]["sft"].update(checkpoint_every=9), 5),  # changes no result
        (lambda recipe: recipe.update(name="another", description="another"), 5),
        (lambda recipe: recipe.update(seed=1), 0),
        (lambda recipe: recipe["engine"].update(slots=1), 5),  # rows do not depend on their company
        (lambda recipe: recipe["engine"].update(dtype="bfloat16"), 1),  # the first model reads no engine
        (lambda recipe: recipe["stages"].pop("before"), 2),
    ],
)
def test_recipes_have_in_common_what_comes_before_the_first_difference(change, num):
    tree = make_recipe().model_dump(mode="json")
    change(tree)
    assert num_common(make_recipe(), Recipe.model_validate_json(json.dumps(tree))) == num
