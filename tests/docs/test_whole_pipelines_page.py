"""The commands of the guide to whole pipelines are accepted; that they are run is held by the pipelines' own test."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strop.cli import app
from strop.pipelines import plan as plan_module

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guides" / "whole-pipelines.md").read_text(encoding="utf-8")
COMMANDS = {
    name: shlex.split(sizes)
    for sizes, name in re.findall(r"^sizes=\(\n([^()]*)^\)\nstrop train recipes/([\w-]+)\.toml ", PAGE, re.MULTILINE)
}


@pytest.mark.parametrize("name", ["r1-pipeline", "rstar2-pipeline"])
def test_the_program_in_minutes_is_accepted(name, monkeypatch):
    monkeypatch.setattr(plan_module, "_matmul_flops", lambda: 1e11)
    monkeypatch.chdir(ROOT)
    words = [f"--set={size}" for size in COMMANDS[name]]
    result = CliRunner().invoke(app, ["train", f"recipes/{name}.toml", "--name", "short", *words, "--dry-run"])
    assert result.exit_code == 0, result.exception
    assert "short: " in result.output
    assert "NOT FOUND" not in result.output
