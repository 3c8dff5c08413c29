"""At which commit a data set of the hub is read, by the real `datasets` package on copies that a machine has kept."""

import shutil

import pytest

from hub_copies import keep_copy, offline
from strop.errors import TaskError
from strop.tasks import load_rows
from strop.tasks.files import keeping_commits
from strop.tasks.rows import HubRows

datasets = pytest.importorskip("datasets", reason="needs the extra strop[data]")

OLD, NEW = "a" * 40, "b" * 40
SUMS = HubRows(name="org/sums")


@pytest.fixture
def copies(tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    keep_copy(tmp_path, "sums", OLD, [{"question": "1+1", "answer": "2"}])
    return tmp_path


@pytest.fixture
def asked_for(monkeypatch):
    """The revisions that the package was asked for."""
    revisions = []
    load = datasets.load_dataset

    def recording(*where, revision, **words):
        revisions.append(revision)
        return load(*where, revision=revision, **words)

    monkeypatch.setattr(datasets, "load_dataset", recording)
    return revisions


def test_the_commit_that_was_read_is_kept_once_and_told_also_to_whoever_is_around(copies):
    within, around, told = {}, {}, []
    with keeping_commits(around, tell=lambda: told.append(dict(around))), keeping_commits(within):
        load_rows(SUMS, split="train")
        load_rows(SUMS, split="train")
        load_rows(HubRows(name="org/sums", revision="v1"), split="train")
    assert within == around == {"org/sums": OLD, "org/sums@v1": OLD}
    assert told == [{"org/sums": OLD}, {"org/sums": OLD, "org/sums@v1": OLD}]


def test_what_goes_on_asks_for_the_commit_with_which_it_began(copies, asked_for):
    load_rows(SUMS, split="train")
    with keeping_commits({"org/sums": OLD}):
        load_rows(SUMS, split="train")
    assert asked_for == [None, OLD]


def test_a_newer_copy_is_not_taken_for_the_commit_with_which_the_work_began(copies):
    keep_copy(copies, "sums", NEW, [{"question": "2+2", "answer": "4"}])
    with keeping_commits({"org/sums": OLD}), pytest.raises(TaskError, match=f"commit {OLD} is meant, but .* is of {NEW}"):
        load_rows(SUMS, split="train")


def test_of_a_commit_that_is_nowhere_any_more_the_remedy_is_to_begin_anew(copies):
    shutil.rmtree(copies / "org___sums")
    with keeping_commits({"org/sums": OLD}), pytest.raises(TaskError, match=f"at commit {OLD}, .* start a new run"):
        load_rows(SUMS, split="train")


def test_a_copy_of_another_commit_than_the_revision_is_refused(copies):
    (task,) = load_rows(HubRows(name="org/sums", revision=OLD), split="train")
    assert task.question == "1+1"
    with pytest.raises(TaskError, match=f"org/sums: commit {NEW} is meant, but a machine .* is of {OLD}"):
        load_rows(HubRows(name="org/sums", revision=NEW), split="train")


def test_a_local_directory_has_no_commit(tmp_path, copies):
    commits = {}
    with keeping_commits(commits):
        load_rows(HubRows(name=str(tmp_path / OLD / "sums")), split="train")
    assert commits == {}
