"""The files that one RL step of the demo enters are no more than they were when this was measured."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_path.py"


@pytest.mark.slow
def test_a_step_of_the_demo_enters_no_further_files() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600, check=True)
    lines, _, files, word = done.stdout.splitlines()[-1].split()
    assert word == "files"
    assert int(files) <= 61  # measured: 60, of which some depend on timing; goal: 60
    # Measured: 12 043, 150 of them for publications that engines of other processes read, 130 for completions of several
    # versions and batches that steps share, 50 for a cluster and the queue of the sandbox, 140 for drafts and for ranks
    # that divide rows, 130 for turns in pieces and for memory that is free between rollouts, 140 for modules that joined their
    # only user, 190 for draws and products in C, 80 for the choice of an engine, which one engine goes through as well;
    # goal: 7 000. The functions that a step calls have 5 600; the rest of their files is their set-up and configs.
    assert int(lines) <= 12_100
