"""experiments/r1_data.py: the commands of the page are right, and make the files that the preset reads."""

import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import r1_data
from typer.testing import CliRunner

from rewards.scorers.chat_service import said, serving
from strop.cli import app
from strop.config import load_toml, validate
from strop.curation.config import load_curation
from strop.curation.rewrite import RewriteConfig
from strop.rewards.judge import JudgeConfig

BLOCKS = r1_data.FENCE.findall(r1_data.PAGE.read_text(encoding="utf-8"))
COMMANDS = [
    shlex.split(line) for kind, text in BLOCKS if kind == "sh" for line in text.replace("\\\n", " ").strip().splitlines()
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The directory of the page, with its TOML files."""
    monkeypatch.chdir(tmp_path)
    for kind, text in BLOCKS:
        if kind == "toml":
            r1_data._do(kind, text, tmp_path)
    return tmp_path


def test_every_command_has_a_config_that_is_valid(files):
    validate(JudgeConfig, load_toml(Path("data/r1/judge.toml")), place="judge")
    for name in ("problems", "general"):
        load_curation(Path(f"data/r1/{name}.toml"))
    rewrites = [words for words in COMMANDS if words[:3] == ["strop", "data", "rewrite"]]
    assert len(rewrites) == 9
    for words in rewrites:
        sets = [word for before, word in pairwise(words) if before == "--set"]
        config = validate(RewriteConfig, load_toml(Path(words[words.index("--with") + 1]), sets), place=words[4])
        assert config.column
        assert config.prompt


def test_the_files_of_the_preset_are_made(files):
    read = set(re.findall(r"data/r1-[\w-]+\.jsonl", r1_data.PRESET.read_text(encoding="utf-8")))
    made = {word for words in COMMANDS for word in words if re.fullmatch(r"data/r1-[\w-]+\.jsonl", word)}
    assert made == read
    assert len(made) == 6


def test_a_reply_to_a_command_of_the_page_becomes_a_row_of_the_cold_start(files):
    row = {"id": "a", "question": "2+2?", "answer": "4", "source": "s", "facts": {"solution": "Two and two."}}
    Path("data/r1-reasoning.jsonl").write_text(json.dumps(row) + "\n")
    words = next(words for words in COMMANDS if "data/r1-cold-start.jsonl" in words)
    reply = "<think>Two and two make four.</think> <answer> 4 </answer>"
    with serving(lambda *_: said(reply)) as service:
        ended = CliRunner().invoke(app, [*words[1:], "--set", f"service.url={service.url}"])
    assert ended.exit_code == 0, ended.output
    asked = service.asked[0].body
    assert re.fullmatch(asked["structured_outputs"]["regex"], reply)
    assert asked["messages"][0]["content"].startswith("Problem: 2+2?\n\nSolution: Two and two.\n\nTell how")
    made = json.loads(Path("data/r1-cold-start.jsonl").read_text())
    assert (made["question"], made["answer"], made["response"]) == ("2+2?", "4", reply)
