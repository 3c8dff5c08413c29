"""What a terminal is told of a sweep."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from strop.reports.sweep import State, SweepConsole, last_step
from strop.run_directory import LineWriter, RunDirectory


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120)


def said(console):
    return console.file.getvalue()


def test_every_run_has_a_line_when_it_starts_and_when_it_ends(console):
    with SweepConsole(console) as progress:
        progress.started(num_runs=3, num_done=1)
        progress.run_started("a-seed-0", state=State.UNFINISHED, shared="")
        progress.run_finished("a-seed-0", "accuracy 50.0%", 61.0)
        progress.run_started("b-seed-0", state=State.WAITING, shared="a-seed-0")
        progress.run_failed("b-seed-0", "[red] alert (exit code 2)", Path("logs/b-seed-0.log"))
    assert said(console).splitlines() == [
        "3 runs, 1 done before",
        "  · a-seed-0 resumes",
        "  ✓ a-seed-0: accuracy 50.0% (1 min 01 s; 2 of 3)",
        "  · b-seed-0 starts, from the first stages of a-seed-0",
        "  ✗ b-seed-0: [red] alert (exit code 2). Log: logs/b-seed-0.log",
    ]


def test_what_is_under_way_is_the_last_line_of_its_metrics(tmp_path):
    run = RunDirectory(tmp_path)
    assert last_step(run) == "starts"
    metrics = LineWriter(run.metrics)
    for step in (1, 2):
        metrics.append({"stage": "rl", "step": step})
    metrics.close()
    assert last_step(run) == "rl 2"
    with run.metrics.open("a") as file:
        file.write('{"stage": "rl", "st')  # cut short by a kill
    assert last_step(run) == "rl 2"
