"""Every example trains, from its recipe or as a script, and is found again when its run is resumed from elsewhere."""

import gzip
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import strop as strop_package
from strop.recipe.load import recipe_of
from strop.run_directory import RunDirectory

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = {
    "guess_the_number.py": 40,
    "rank_method.py": 30,
    "average_stage.py": 40,
    "short_reward.py": 15,
    "dice_tool.py": 15,
    "square_tasks.py": 15,
    "sums_harness.py": 25,
    "plain_engine.py": 90,
    "train_script.py": 40,
}


def test_examples_are_as_short_as_they_look():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES[name]}
    assert lengths.keys() == MAX_LINES.keys()


@pytest.mark.parametrize("name", [name.removesuffix(".py") for name in MAX_LINES if name != "train_script.py"])
def test_an_example_trains_from_its_recipe(strop, name, tmp_path):
    code, said = strop("train", EXAMPLES / f"{name}.toml", "--runs", tmp_path)
    assert code == 0, said
    [directory] = tmp_path.iterdir()
    assert any(gzip.decompress(path.read_bytes()) for path in directory.rglob("rollouts/*.jsonl.gz")) or list(
        directory.rglob("*.safetensors")
    )


def test_a_script_trains_and_its_run_is_resumed_from_another_directory(scripted_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_script.py", str(scripted_run.run.stage("base").model)])
    runpy.run_path(str(EXAMPLES / "train_script.py"), run_name="__main__")
    directory = tmp_path / "runs" / "train-script"
    recorded = json.loads((directory / "manifest.json").read_text())["recipe"]["stages"]["rl"]["reward"]
    assert recorded == {"kind": f"{EXAMPLES / 'train_script.py'}:Digits"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert repr(recipe_of(RunDirectory(directory)).stages["rl"].config.reward).startswith("Digits(")


def test_the_public_names_exist_and_importing_strop_imports_no_torch():
    assert all(getattr(strop_package, name) for name in strop_package.__all__)
    subprocess.run([sys.executable, "-c", "import strop, sys; assert 'torch' not in sys.modules"], check=True)
