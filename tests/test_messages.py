"""What the command `strop` prints: its version, lists, and messages about whatever was typed."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import strop as strop_package
from strop.cli import app

LONG = "x" * 5_000


def test_the_version_is_that_of_the_package():
    shown = subprocess.run([sys.executable, "-m", "strop.cli", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["strop", strop_package.__version__]


def test_the_list_of_data_sets_fits_80_columns():
    shown = CliRunner().invoke(app, ["data", "list"]).stdout.splitlines()
    assert len(shown) > 40
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize(
    "words",
    [
        ["train", f"{LONG}.toml"],
        ["train", "recipes/demo.toml", "--dry-run", "--set", f"tasks.kind={LONG}"],
        ["train", "recipes/demo.toml", "--dry-run", "--set", f"{LONG}=1"],
        ["train", "recipes/demo.toml", "--dry-run", "--set", f"stages.{LONG}.kind=rl"],
        ["train", "recipes/demo.toml", "--dry-run", "--set", f"stages.rl.method.kind={LONG}"],
        ["train", "recipes/demo.toml", "--dry-run", "--set", f"engine.kind={LONG}:Engine"],
        ["train", "recipes/demo.toml", "--dry-run", "--set", f"engine.slots={LONG}"],
        ["train", "recipes/demo.toml", "--dry-run", "--runs", LONG],
        ["train", "recipes/demo.toml", "--from", LONG],
        ["report", LONG],
        ["eval", "compare", LONG, LONG],
    ],
)
def test_a_long_word_is_one_message_that_shows_its_beginning(strop, words):
    code, said = strop(*words)
    assert code == 2
    assert said.startswith("error: ")
    assert LONG[:201] not in said
    assert len(said) < 3_000
