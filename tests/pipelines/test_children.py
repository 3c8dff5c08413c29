"""Commands in processes of their own: real ones, with nothing heavy in them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strop.pipeline.sweep import Children

SAVES = """
import pathlib, signal, sys, time
try:
    pathlib.Path(sys.argv[1]).write_text("ready")
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(130)
"""
PARENT = """
import pathlib, sys, time
from strop.pipeline.sweep import Children
children = Children()
children.start("one", [sys.executable, "-S", "-c", "import time; time.sleep(60)"], pathlib.Path(sys.argv[1]))
print(children._children["one"][0].pid, flush=True)
time.sleep(60)
"""


def wait_until(is_true, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start_and_leave(state, log):
    with Children() as children:
        children.start("one", python(SAVES, state), log)
        wait_until(lambda: state.exists() and state.read_text() == "ready")
        raise KeyboardInterrupt


def python(program, *words):
    return [sys.executable, "-S", "-c", program, *map(str, words)]


def test_what_a_child_says_and_how_it_ends_is_kept(tmp_path):
    log = tmp_path / "logs" / "one.log"
    log.parent.mkdir()
    log.write_text("said before\n")
    with Children() as children:
        children.start(
            "one", python("import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); sys.exit(3)"), log
        )
        (ended,) = children.wait(at_most_s=30)
        assert children.running == ()
    assert (ended.key, ended.status) == ("one", 3)
    assert log.read_text() == "said before\nout\nerr\n"


def test_waiting_ends_when_it_was_long_enough(tmp_path):
    with Children() as children:
        children.start("one", python("import time; time.sleep(60)"), tmp_path / "log")
        assert children.wait(at_most_s=0.01) == []
        assert children.running == ("one",)


def test_who_leaves_interrupts_its_children_and_lets_them_save(tmp_path):
    state = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        start_and_leave(state, tmp_path / "log")
    assert state.read_text() == "saved"


def test_an_interrupt_reaches_children_of_a_parent_that_ignores_it(tmp_path):
    """As a shell's background jobs do."""
    state = tmp_path / "state"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Children() as children:
            children.start("one", python(SAVES, state), tmp_path / "log")
            wait_until(lambda: state.exists() and state.read_text() == "ready")
    finally:
        signal.signal(signal.SIGINT, before)
    assert state.read_text() == "saved"


def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path / "log"], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: is_gone(child))


def is_gone(pid):
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
