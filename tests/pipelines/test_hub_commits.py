"""Data sets of the hub in a run: the lineage has the commit that was read, and a stage goes on with it."""

import pytest

from hub_copies import keep_copy, offline
from scripted_runs import RECIPE, recipe_of, run_recipe
from strop.errors import TaskError
from strop.run_directory import read_json

pytest.importorskip("datasets", reason="needs the extra strop[data]")

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def copies(tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path / "copies")
    keep_copy(tmp_path / "copies", "sums", OLD, [{"question": "1+1", "answer": "2"}])
    return tmp_path / "copies"


def evaluation(**tasks):
    of_hub = {"kind": "hub", "name": "org/sums", "test_split": "train", **tasks}
    before = RECIPE["stages"]["before"] | {"init": "base", "num_tasks": 1, "tasks": of_hub}
    return recipe_of({"base": RECIPE["stages"]["base"], "before": before})


def curation(directory):
    (directory / "rules.toml").write_text(
        'name = "sums"\nsources = [{ kind = "hub", name = "org/sums" }]\n'
        '[[rules]]\nkind = "decontamination"\nagainst = [{ kind = "hub", name = "org/tests", test_split = "train" }]\n'
    )
    stage = {"kind": "curation", "recipe": str(directory / "rules.toml"), "jobs": 1}
    return recipe_of({"problems": stage})


def hub_of(run):
    return read_json(run.stage("before").lineage).get("hub")


def test_the_lineage_has_the_commit_as_soon_as_it_is_read_and_a_finished_stage_keeps_it(tmp_path, copies):
    seen = []

    def say(conversation, draw):
        seen.append(read_json(tmp_path / "run" / "stages" / "before" / "lineage.json")["hub"])
        return "no"

    run = run_recipe(tmp_path / "run", evaluation(), say=say).run
    assert seen[0] == seen[-1] == {"org/sums": OLD}
    assert hub_of(run) == {"org/sums": OLD}
    keep_copy(copies, "sums", NEW, [{"question": "2+2", "answer": "4"}])
    run_recipe(run.path, evaluation())  # what is done is not read again, and is not stale
    assert hub_of(run) == {"org/sums": OLD}


def test_a_stage_goes_on_at_its_commit_or_not_at_all_and_made_anew_it_reads_the_newest(tmp_path, copies):
    run = run_recipe(tmp_path / "run", evaluation()).run
    run.stage("before").done.unlink()
    keep_copy(copies, "sums", NEW, [{"question": "2+2", "answer": "4"}])
    with pytest.raises(TaskError, match=f"commit {OLD} is meant"):
        run_recipe(run.path, evaluation())
    assert hub_of(run) == {"org/sums": OLD}
    run_recipe(run.path, evaluation(), start="before")
    assert hub_of(run) == {"org/sums": NEW}


def test_a_curation_tells_the_commits_of_its_sources_and_benchmarks(tmp_path, copies):
    keep_copy(copies, "tests", NEW, [{"question": "2+2", "answer": "4"}])
    run = run_recipe(tmp_path / "run", curation(tmp_path)).run
    directory = run.stage("problems")
    assert read_json(directory.lineage)["hub"] == {"org/sums": OLD, "org/tests": NEW}
    assert read_json(directory.path / "data" / "curation.json")["inputs"]["hub"] == {"org/sums": OLD, "org/tests": NEW}
