"""Every example trains, from its recipe or as a script, and is found again when its run is resumed from elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = {
    "guess_the_number.py": 40,
    "rank_method.py": 30,
    "average_stage.py": 40,
    "short_reward.py": 15,
    "dice_tool.py": 15,
    "square_tasks.py": 15,
    "train_script.py": 40,
}


def run(*words: str | Path, cwd: Path) -> str:
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_examples_are_as_short_as_they_look():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES[name]}
    assert lengths.keys() == MAX_LINES.keys()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name.removesuffix(".py") for name in MAX_LINES if name != "train_script.py"])
def test_an_example_trains_from_its_recipe(name, tmp_path):
    out = run("-m", "strop.cli", "train", EXAMPLES / f"{name}.toml", "--runs", tmp_path, cwd=tmp_path)
    assert "rl" in out
    [directory] = tmp_path.iterdir()
    rollouts = [json.loads(line) for path in directory.rglob("rollouts/*.jsonl") for line in path.read_text().splitlines()]
    assert rollouts or list(directory.rglob("*.safetensors"))


@pytest.mark.timeout(400)  # three processes that import torch
def test_a_script_trains_and_its_run_is_resumed_from_another_directory(tmp_path):
    run("-m", "strop.cli", "train", EXAMPLES / "short_reward.toml", "--until", "base", "--runs", tmp_path, cwd=tmp_path)
    model = next(tmp_path.rglob("model.safetensors")).parent
    run(EXAMPLES / "train_script.py", model, cwd=tmp_path)
    directory = tmp_path / "runs" / "train-script"
    recorded = json.loads((directory / "manifest.json").read_text())["recipe"]["stages"]["rl"]["reward"]
    assert recorded == {"kind": f"{EXAMPLES / 'train_script.py'}:Digits"}
    code = "import sys; from pathlib import Path; from strop.recipe.load import recipe_of; from strop.run_directory import"
    code += " RunDirectory; print(recipe_of(RunDirectory(Path(sys.argv[1]))).stages['rl'].config.reward)"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run("-c", code, directory, cwd=elsewhere).startswith("Digits(")


def test_the_public_names_exist_and_importing_strop_imports_no_torch(tmp_path):
    code = "import strop, sys; assert 'torch' not in sys.modules; print(all(getattr(strop, name) for name in strop.__all__))"
    assert run("-c", code, cwd=tmp_path) == "True\n"
