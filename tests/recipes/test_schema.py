"""The JSON schema accepts every shipped file and refuses a misspelt key, in jsonschema and in taplo."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft7Validator
from typer.testing import CliRunner

from strop.cli import app
from strop.errors import ConfigError
from strop.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("recipes", "experiments", "examples") for path in (ROOT / folder).rglob("*.toml"))
TAPLO = shutil.which("taplo", path=str(Path(sys.executable).parent)) or shutil.which("taplo")


def kind_of(tree):
    return "recipe" if "stages" in tree else "sweep" if "recipe" in tree else "curation"


@pytest.fixture(scope="module")
def schemas():
    printed = {kind: CliRunner().invoke(app, ["recipe", "schema", kind]) for kind in ("recipe", "sweep", "curation")}
    return {kind: json.loads(result.stdout) for kind, result in printed.items()}


@pytest.fixture(scope="module")
def validators(schemas):
    for schema in schemas.values():
        Draft7Validator.check_schema(schema)
    return {kind: Draft7Validator(schema) for kind, schema in schemas.items()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_shipped_file_is_accepted(path, validators):
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    assert [error.message for error in validators[kind_of(tree)].iter_errors(tree)] == []


WRONG = [
    "sead = 1",
    "tools.python.nam = 'python'",
    "engine = { kind = 'torch', slotz = 2 }",
    "tasks = { kind = 'arithmetic', num_term = 3 }",
    "tasks = { kind = 'arithmetik' }",
    "reward = { kind = 'math', weight = { accuracy = 1.0 } }",
    "trainer.optimizer.learning_rate = 1e-4",
    "stages.rl = { kind = 'rl', methud = 'grpo' }",
    "stages.rl = { kind = 'rll' }",
    "stages.rl = { kind = 'rl', steps = 'many' }",
    "stages.rl = { kind = 'rl', method = { kind = 'grpo', clip = 0.2 } }",
    "stages.rl = { kind = 'eval', method = 'grpo' }",
    "stages.rl = { steps = 5, steps_per_task = 4 }",
    "stages.rl = { kind = 'sft', trainer.optimizer.lrr = 1e-4 }",
    "engine = { kind = 'my_engine' }",
]


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_key_kind_or_type_is_refused(text, validators):
    assert list(validators["recipe"].iter_errors(tomllib.loads(text)))


@pytest.mark.parametrize(
    "text",
    [
        "stages.rl = { kind = 'rl', method = { kind = 'my_module:MyMethod', anything = 1 } }",
        "stages.mine = { kind = 'my_module:MyStage', anything = [1] }",
        "stages.rl = { kind = 'rl', method = 'my_module:MyMethod' }",
        "engine = { kind = 'my_module:MyEngine', anything = 1 }",
        "stages.rl = { kind = 'rl', sampling.temperature = 0.5, tasks.num_terms = 2 }",  # the rest is in a shared table
    ],
)
def test_own_classes_and_parts_of_shared_tables_are_accepted(text, validators):
    assert [error.message for error in validators["recipe"].iter_errors(tomllib.loads(text))] == []


@pytest.mark.skipif(TAPLO is None, reason="taplo is not installed")
def test_taplo_accepts_the_recipes_and_refuses_a_misspelt_key(schemas, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(schemas["recipe"]))
    recipes = [path for path in FILES if kind_of(tomllib.loads(path.read_text(encoding="utf-8"))) == "recipe"]
    command = [TAPLO, "check", "--schema", schema.as_uri()]
    assert subprocess.run([*command, *recipes], cwd=ROOT, capture_output=True).returncode == 0
    wrong = tmp_path / "wrong.toml"
    wrong.write_text((ROOT / "recipes" / "demo.toml").read_text().replace("group_size", "groupsize"))
    refused = subprocess.run([*command, wrong], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "groupsize" in refused.stderr


def test_a_sweep_given_to_train_is_told_where_it_belongs():
    path = ROOT / "recipes" / "sweeps" / "cs336-clip.toml"
    with pytest.raises(ConfigError, match=rf"this is a sweep, and no recipe\. Run it with `strop sweep {path}`"):
        load_recipe(str(path))
