"""Curations of data sets of the hub that are stopped and gone on with: all of it is of the commits with which it began."""

import json

import pytest

from hub_copies import keep_copy, offline, reach_hub
from strop.config import validate
from strop.curation import run
from strop.curation.config import CurationConfig
from strop.curation.run import run_curation
from strop.errors import TaskError

pytest.importorskip("datasets", reason="needs the extra strop[data]")

OLD, NEW = "a" * 40, "b" * 40
CURATION = {
    "name": "sums",
    "sources": [{"kind": "hub", "name": "org/sums"}],
    "rules": [{"kind": "decontamination", "against": [{"kind": "hub", "name": "org/tests", "test_split": "train"}]}],
}
CONFIG = validate(CurationConfig, CURATION, place="test")


def rows(age, num):
    return [{"question": f"{age} {number} apples and {number * 7} pears", "answer": str(number)} for number in range(num)]


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Of three rows, each a chunk, and of a benchmark that has none of them."""
    monkeypatch.setattr(run, "CHUNK_TASKS", 1)
    offline(monkeypatch, tmp_path / "copies")
    keep_copy(tmp_path / "copies", "sums", OLD, rows("old", 3))
    keep_copy(tmp_path / "copies", "tests", OLD, [{"question": "How many plums are left over?", "answer": "0"}])
    return tmp_path / "copies"


def stop_after_a_part(out):
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_curation(CONFIG, out, jobs=1, progress=stop)
    assert len(list((out / "parts").glob("part-*"))) == 1


def kept(out):
    return [json.loads(line)["question"].split()[0] for line in (out / "kept.jsonl").read_text().splitlines()]


def test_what_goes_on_reads_the_commits_with_which_it_began(tmp_path, copies, monkeypatch):
    stop_after_a_part(tmp_path / "out")
    keep_copy(copies, "sums", NEW, rows("new", 4))
    keep_copy(copies, "tests", NEW, rows("old", 3))  # by which nothing would be kept
    reach_hub(monkeypatch, copies)
    summary = run_curation(CONFIG, tmp_path / "out", jobs=1)
    assert kept(tmp_path / "out") == ["old"] * 3
    assert summary["inputs"]["hub"] == {"org/sums": OLD, "org/tests": OLD}
    assert run_curation(CONFIG, tmp_path / "anew", jobs=1)["inputs"]["hub"] == {"org/sums": NEW, "org/tests": NEW}


@pytest.mark.parametrize("name", ["sums", "tests"])
def test_a_machine_that_has_the_newer_copy_alone_stops_and_loses_nothing(tmp_path, copies, name, monkeypatch):
    stop_after_a_part(tmp_path / "out")
    keep_copy(copies, name, NEW, rows("new", 3))
    with pytest.raises(TaskError, match=f"org/{name}: commit {OLD} is meant, but .* is of {NEW}"):
        run_curation(CONFIG, tmp_path / "out", jobs=1)
    reach_hub(monkeypatch, copies)
    run_curation(CONFIG, tmp_path / "out", jobs=1)
    assert kept(tmp_path / "out") == ["old"] * 3


def test_a_benchmark_that_is_not_there_leaves_nothing_that_would_be_gone_on_with(tmp_path, copies):
    missing = CURATION["rules"][0] | {"against": [*CURATION["rules"][0]["against"], {"kind": "hub", "name": "org/none"}]}
    config = validate(CurationConfig, CURATION | {"rules": [missing]}, place="test")
    with pytest.raises(TaskError, match="org/none"):
        run_curation(config, tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists()
