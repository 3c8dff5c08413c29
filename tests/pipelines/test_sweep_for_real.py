"""`strop sweep` with real runs: real processes, engine and sandbox. Killed or interrupted, it ends as an undisturbed one."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from scripted_runs import untimed
from strop.run_directory import RunDirectory, read_json, read_lines

HERE = Path(__file__).parent
LIMIT_S = 600
SWEEP = f"""
recipe = "{HERE / "tiny.toml"}"
seeds = [0]
[set]
"stages.sft.steps" = 30
"stages.before.num_tasks" = 4
"stages.after.num_tasks" = 4
[arms.one]
[arms.broken]
"stages.rl.trainer.optimizer.lr" = 1e30
[arms.two]
"stages.rl.trainer.optimizer.lr" = 2e-3
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    with started(directory) as process:
        assert process.wait(LIMIT_S) == 1, said(directory)
    return directory


@contextmanager
def started(directory):
    """The command as a user would give it; nothing of it is left afterwards."""
    (directory / "sweep.toml").write_text(SWEEP)
    with (directory / "said.txt").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "strop.cli", "sweep", directory / "sweep.toml", "--run-dir", directory / "out"],
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # it may be ignored here
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def said(directory):
    return (directory / "said.txt").read_text()


def run_of(directory, arm):
    return RunDirectory(directory / "out" / f"{arm}-seed-0")


def wait_until(is_true, process, directory):
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert process.poll() is None, said(directory)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_begun(directory, stage):
    """Whether the first arm has a step of `stage`."""
    return lambda: any(line["stage"] == stage for line in read_lines(run_of(directory, "one").metrics))


def trainers(directory):
    """Processes that train below `directory`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train" in words and os.fsencode(directory / "out") in words:
            found.append(int(entry.name))
    return found


def finish(directory):
    with started(directory) as process:
        assert process.wait(LIMIT_S) == 1, said(directory)  # for the broken arm


def assert_as_undisturbed(directory, undisturbed):
    for arm in ("one", "two"):
        run, other = run_of(directory, arm), run_of(undisturbed, arm)
        assert [untimed(line) for line in read_lines(run.metrics)] == [untimed(line) for line in read_lines(other.metrics)]
        for stage in ("base", "sft", "rl"):
            mine, theirs = (each.stage(stage).model / "model.safetensors" for each in (run, other))
            assert mine.read_bytes() == theirs.read_bytes(), (arm, stage)
    mine, theirs = (read_json(each / "out" / "sweep.json") for each in (directory, undisturbed))
    assert mine["arms"] == theirs["arms"]


def test_killed_and_interrupted_it_goes_on_with_the_same_command_and_ends_the_same(undisturbed, tmp_path):
    with started(tmp_path) as process:
        wait_until(has_begun(tmp_path, "sft"), process, tmp_path)
        assert trainers(tmp_path)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while trainers(tmp_path):
        assert time.monotonic() < deadline, "a run outlived its sweep"
        time.sleep(0.05)
    assert not run_of(tmp_path, "one").stage("rl").done.exists()

    with started(tmp_path) as process:
        wait_until(has_begun(tmp_path, "rl"), process, tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    assert "stopped. The same command continues from the last checkpoint." in said(tmp_path)
    assert "stopped in rl" in (tmp_path / "out" / "logs" / "one-seed-0.log").read_text()  # it ended itself
    assert not trainers(tmp_path)
    assert (tmp_path / "out" / "sweep.html").exists()

    finish(tmp_path)
    assert_as_undisturbed(tmp_path, undisturbed)
