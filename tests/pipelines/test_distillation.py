"""A stage of kind `distil` is SFT on the rollouts of a teacher that is another model."""

import re

import pytest
import torch

from scripted_runs import RECIPE, run_recipe
from strop.config import validate
from strop.errors import ConfigError
from strop.pipeline.plan import check_stages
from strop.recipe.recipe import Recipe, resolve
from strop.run_directory import read_json
from strop.runs.lineage import weights_digest

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
    ("keys", "message"),
    [
        ({"data": []}, "kind is 'distil', which imitates a teacher"),
        ({"demonstrator": {"kind": "arithmetic"}, "num_demonstrations": 4}, "kind is 'distil', which imitates a teacher"),
        ({"data": ["good", "said"]}, "stages.student.data names 'said', which has no rollouts of a teacher"),
        ({"init": "sft"}, "the rollouts of 'good' are by 'sft', from which the student is trained"),
        ({"init": "trained", "data": ["mixed"]}, "the rollouts of 'mixed' are by 'sft', from which the student is trained"),
        ({"init": "given-away"}, "the rollouts of 'good' are by 'sft', from which the student is trained"),
    ],
)
def test_what_is_no_distillation_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_stages(recipe_of(keys), ["student"])


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
    return run_recipe(tmp_path_factory.mktemp("distilled") / "run", recipe_of({"steps": 2})).run


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
    assert lineage["keys"]["stages"]["student"]["kind"] == "distil"
    assert set(lineage["parents"]) == {"small", "good"}
    row = r"<th>student</th><td>distil</td><td>small \(init\), good \(data\)</td><td>✓ done</td><td>2 steps\b"
    assert re.search(row, distilled.report.read_text())
