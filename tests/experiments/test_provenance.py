"""Results of experiments say what they were made of."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.run_directory import RunDirectory, read_json, write_json, write_text

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import faithful
from provenance import code_of, provenance, seconds_of, versions_of


def run_of(path, *stages, torch="2.8.0"):
    """A finished run; `stages`: name, begin and end in seconds."""
    run = RunDirectory(path)
    write_json(run.manifest, {"versions": {"strop": "0.1.0", "torch": torch, "python": "3.12.1"}})
    events = [{"event": "stage_started", "stage": name, "time": begin} for name, begin, _ in stages]
    events += [{"event": "stage_finished", "stage": name, "time": end} for name, _, end in stages]
    write_text(run.events, "".join(json.dumps(line) + "\n" for line in events))
    for name, begin, end in stages:
        write_json(run.stage(name).done, {"summary": "", "time_s": end - begin})
    return run


def test_seconds_are_added_up_over_runs_and_pauses_are_no_wall_time(tmp_path):
    runs = [
        run_of(tmp_path / "a", ("sft", 100.0, 110.0), ("rl", 110.0, 140.0)),
        run_of(tmp_path / "b", ("sft", 100.0, 110.0), ("rl", 115.0, 135.0)),  # its sft is a's, taken over
        run_of(tmp_path / "c", ("sft", 200.0, 205.0)),
    ]
    assert seconds_of(runs) == {"of_runs": 10 + 30 + 20 + 5, "wall": 40 + 5}


def test_a_stage_that_was_made_anew_counts_as_it_was_made_last(tmp_path):
    run = run_of(tmp_path, ("rl", 0.0, 5.0), ("rl", 20.0, 27.0))
    assert seconds_of([run]) == {"of_runs": 7, "wall": 7}


def test_versions_are_those_that_the_runs_were_begun_with(tmp_path):
    runs = [run_of(tmp_path / torch, torch=torch) for torch in ("2.9.0", "2.8.0")]
    assert versions_of(runs[:1]) == {"strop": "0.1.0", "torch": "2.9.0"}
    assert versions_of(runs) == {"strop": "0.1.0", "torch": "2.8.0, 2.9.0"}


def git(directory, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    answer = subprocess.run(["git", "-C", str(directory), *identity, *words], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_named_and_code_that_differs_from_it_is_told(tmp_path):
    write_text(tmp_path / "src" / "module.py", "one = 1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert len(commit) == 40
    write_text(tmp_path / "experiments" / "results" / "a.json", "{}\n")
    write_text(tmp_path / "docs" / "page.md", "a page\n")
    assert code_of(tmp_path) == {"commit": commit, "is_dirty": False}
    write_text(tmp_path / "src" / "module.py", "one = 2\n")
    assert code_of(tmp_path) == {"commit": commit, "is_dirty": True}


def test_without_history_the_commit_is_unknown(tmp_path):
    assert code_of(tmp_path) == {"commit": "unknown"}


def test_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_of(tmp_path) == {"commit": "unknown"}


def test_the_results_of_a_claim_say_what_they_were_made_of(tmp_path, monkeypatch):
    made = {}
    for arm, begin in (("grpo", 0.0), ("dr_grpo", 5.0)):
        made[arm] = run_of(tmp_path / "drgrpo" / f"{arm}-seed-0", ("rl", begin, begin + 10.0))
        write_json(made[arm].stage("after").evaluation, {"accuracy": 0.5})
    arms = [SimpleNamespace(name=arm, runs=[SimpleNamespace(seed=0, name=run.path.name)]) for arm, run in made.items()]
    monkeypatch.setattr(faithful, "run_sweep", lambda *words, **options: SimpleNamespace(failures=(), arms=arms))
    monkeypatch.setattr(faithful, "RESULTS", tmp_path / "results")
    assert faithful.run_claim("drgrpo", Namespace(pilot=False, runs=tmp_path, set=[], jobs=1))
    results = read_json(tmp_path / "results" / "faithful-drgrpo.json")
    assert results["provenance"] == provenance(made.values(), faithful.ROOT)
    assert results["provenance"]["seconds"] == {"of_runs": 20.0, "wall": 15.0}
    assert results["provenance"]["versions"] == {"strop": "0.1.0", "torch": "2.8.0"}
    assert results["provenance"]["processor"]
