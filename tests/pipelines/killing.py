"""Runs as processes of their own that are killed in the middle, and what their directories say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from strop.run_directory import read_lines

HERE = Path(__file__).parent
TINY = HERE / "tiny.toml"
LIMIT_S = 300  # a run takes seconds; a machine with other work may take minutes


def finish(run, recipe=TINY, *words, limit_s=LIMIT_S):
    with started(run, recipe, *words) as process:
        assert process.wait(timeout=limit_s) == 0, complaint(run)


@contextmanager
def started(run, recipe, *words):
    """The driver as a process group of its own; nothing of it is left afterwards."""
    with complaint_path(run).open("ab") as complaints:
        process = subprocess.Popen(
            [sys.executable, HERE / "late_driver.py", recipe, run.path, *words],
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def complaint_path(run):
    return run.path.with_name("stderr.txt")


def complaint(run):
    return complaint_path(run).read_text()[-3000:]


def kill_when(run, is_time, *words, recipe=TINY, limit_s=LIMIT_S):
    """Start the run, stop it dead when `is_time()`, and see that nothing of it is left.

    The processes are halted before the last look, so that what is seen is what the kill finds.
    """
    with started(run, recipe, *words) as process:
        deadline = time.monotonic() + limit_s
        while True:
            assert process.poll() is None, f"the run ended before it was time to kill it\n{complaint(run)}"
            assert time.monotonic() < deadline, "it never was time to kill the run"
            if is_time():
                os.killpg(process.pid, signal.SIGSTOP)
                if is_time():
                    break
                os.killpg(process.pid, signal.SIGCONT)
            time.sleep(0.005)
        family = descendants(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while left := [pid for pid in family if is_running(pid, family[pid])]:
        assert time.monotonic() < deadline, f"still running after the kill: {left}"
        time.sleep(0.02)
    return family


def descendants(pid):
    """Every process below `pid`, wherever its session: pid -> start time."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = stat(int(entry.name))
        if fields is not None:
            parents[int(entry.name)] = (int(fields[1]), fields[19])
    found = {}
    frontier = {pid}
    while frontier:
        frontier = {child for child, (parent, _) in parents.items() if parent in frontier}
        found |= {child: parents[child][1] for child in frontier}
    return found


def stat(pid):
    """The fields of /proc/<pid>/stat behind the name; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_running(pid, start_time):
    fields = stat(pid)
    return fields is not None and fields[19] == start_time and fields[0] != "Z"


def events(run, event, stage):
    return [line for line in read_lines(run.events) if line["event"] == event and line["stage"] == stage]


def num_steps(run, stage):
    return sum(line["stage"] == stage for line in read_lines(run.metrics))


def open_tool_calls(path: Path) -> int:
    """How many tool calls the ledger at `path` shows as open: made since it was last opened, and not answered."""
    is_open: set[tuple[int, int, int]] = set()
    for line in read_lines(path):
        if line["event"] == "opened":
            is_open.clear()
        elif line["event"] == "tool_opened":
            is_open.add((line["seed"], line["turn"], line["index"]))
        elif line["event"] == "tool_closed":
            is_open.discard((line["seed"], line["turn"], line["index"]))
    return len(is_open)
