"""A stage called `distil` is SFT on a teacher's rollouts: the recipe is held to that, and graph, plan and report say so."""

import re

import pytest
import torch
from typer.testing import CliRunner

from scripted_runs import RECIPE, run_recipe
from strop.cli import app
from strop.config import validate
from strop.errors import ConfigError
from strop.pipelines import plan as plan_module
from strop.pipelines.load import load_recipe
from strop.pipelines.recipe import Recipe, resolve
from strop.pipelines.stage import weights_digest
from strop.reports.log import read_run
from strop.runs import read_json

BASE = RECIPE["stages"]["base"]
STUDENT = {"kind": "distil", "init": "small", "data": ["good"], "steps": 1, "batch_size": 4}
STAGES = {name: RECIPE["stages"][name] for name in ("base", "sft")} | {
    "good": {"kind": "rejection_sampling", "init": "sft", "num_tasks": 8, "k": 4},
    "general": {"kind": "demonstrations", "init": "base", "demonstrator": {"kind": "arithmetic"}, "num_demonstrations": 6},
    "mixed": {"kind": "mix", "data": ["good", "general"]},
    "said": {"kind": "mix", "data": ["general"]},
    "trained": {"kind": "sft", "init": "sft", "data": ["general"], "steps": 1, "batch_size": 4},
    "given-away": {"kind": "export", "init": "sft"},
    "small": BASE | {"tiny": BASE["tiny"] | {"vocab_size": 310}},
}


def recipe_of(student, **stages):
    tree = resolve(RECIPE | {"stages": STAGES | stages | {"student": STUDENT | student}})
    return validate(Recipe, tree, place="recipe.toml")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"data": []}, "stages.student: kind is 'distil', which imitates a teacher, but data names no stage. Name stages"),
        (
            {"data": [], "demonstrator": {"kind": "arithmetic"}, "num_demonstrations": 4},
            "stages.student: kind is 'distil', which imitates a teacher, but data names no stage. Name stages",
        ),
        (
            {"demonstrator": {"kind": "arithmetic"}, "num_demonstrations": 4},
            "stages.student: kind is 'distil', which imitates a teacher, but a demonstrator is no model. Name stages",
        ),
        (
            {"num_demonstrations": 4},
            "stages.student: kind is 'distil', which imitates a teacher, but a demonstrator is no model.",
        ),
        (
            {"data": ["general"]},
            "stages.student.data names 'general', which has no rollouts of a teacher, and kind = 'distil' imitates one. Name a"
            " stage of kind 'rejection_sampling', or a mix that has one; or set kind = 'sft'.",
        ),
        ({"data": ["good", "said"]}, "stages.student.data names 'said', which has no rollouts of a teacher"),
        (
            {"init": "sft"},
            "stages.student.init is 'sft', and what 'good' has was written by 'sft', which is that model. Nobody is its own"
            " teacher: start from another model; or set kind = 'sft'.",
        ),
        (
            {"init": "trained", "data": ["mixed"]},
            "stages.student.init is 'trained', and what 'mixed' has was written by 'sft', which that model stands on. Nobody"
            " is its own teacher: start from another model; or set kind = 'sft'.",
        ),
        ({"init": "given-away"}, "stages.student.init is 'given-away', and what 'good' has was written by 'sft'"),
    ],
)
def test_what_is_no_distillation_is_refused_with_the_stage_and_a_remedy(keys, said):
    with pytest.raises(ConfigError) as told:
        recipe_of(keys)
    assert said in str(told.value)
    assert str(told.value).count("student") <= 2  # told once


def test_one_model_by_two_names_is_its_own_teacher(tmp_path):
    models = {name: {"kind": "model", "path": str(tmp_path)} for name in ("first", "second")}
    right = {"good": STAGES["good"] | {"init": "first"}}
    with pytest.raises(ConfigError, match=r"stages\.student\.init is 'second', and what 'good' has was written by 'first'"):
        recipe_of({"init": "second"}, **models, **right)
    other = models | {"second": models["second"] | {"path": str(tmp_path / "other")}}
    assert recipe_of({"init": "second"}, **other, **right)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"data": ["mixed"]},  # DeepSeek-R1's students imitate what others wrote as well
        {"data": ["good", "mixed"]},
        {"init": "base"},  # the teacher was trained from it, and is another model
        {"kind": "sft", "init": "sft"},
        {"kind": "sft", "data": ["general"]},
    ],
)
def test_a_student_of_another_model_and_any_plain_sft_are_recipes(keys):
    assert recipe_of(keys).stages["student"].kind == keys.get("kind", "distil")


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    evaluations = {f"after-{name}": {"kind": "eval", "init": name, "num_tasks": 2, "k": 2} for name in ("sft", "student")}
    recipe = recipe_of({"steps": 2}, **evaluations)
    return run_recipe(tmp_path_factory.mktemp("distilled") / "run", recipe).run


def test_it_trains_to_the_weights_that_sft_on_the_same_rows_has(distilled, tmp_path):
    torch.set_num_threads(1)
    plain = run_recipe(tmp_path / "run", recipe_of({"kind": "sft", "steps": 2})).run
    digests = [weights_digest(run.stage("student").model) for run in (distilled, plain)]
    assert digests[0] == digests[1] != weights_digest(plain.stage("small").model)


def test_manifest_lineage_and_report_call_it_what_it_is(distilled):
    assert read_json(distilled.manifest)["stages"]["student"] == {
        "kind": "distil",
        "init": "small",
        "inputs": {"init": ["small"], "data": ["good"]},
    }
    lineage = read_json(distilled.stage("student").lineage)
    assert lineage["recipe"]["stages"]["student"]["kind"] == "distil"
    assert set(lineage["parents"]) == {"init.small", "data.good"}
    assert re.search(r">✓ student</text><text[^>]*>distil, 2 steps</text>", distilled.report.read_text())  # of the graph


def test_the_report_draws_its_loss_and_compares_no_student_with_its_teacher(distilled):
    log = read_run(distilled)
    assert {each.stage for each in log.evaluations} == {"after-sft", "after-student"}
    assert log.before_and_after is None
    [student] = [stage for stage in log.stages if stage.name == "student"]
    assert "sft/loss" in student.metrics


def test_the_plan_shows_the_kind_and_whose_rollouts_they_are(monkeypatch, request):
    monkeypatch.setattr(plan_module, "_matmul_flops", lambda: 1e11)
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["train", str(request.config.rootpath / "recipes" / "r1-pipeline.toml"), "--dry-run"])
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.output.splitlines() if line.startswith("student ")]
    assert "distil" in line
    assert "small, teacher" in line


@pytest.mark.parametrize("place", ["recipes/r1-pipeline.toml", "recipes/presets/r1-pipeline.toml"])
def test_the_students_of_r1_are_distilled(place, request):
    stages = load_recipe(request.config.rootpath / place).stages
    assert [name for name, stage in stages.items() if stage.kind == "distil"] == ["student"]
