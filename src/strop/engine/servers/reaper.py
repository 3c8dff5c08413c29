"""Starts one program, ends as it ended, and kills it and its children when the starter ends.

It runs as a file and imports only the standard library, because importing the package would take seconds. Its arguments are
the command. It writes one line, the program's process id or why it could not be run, and ends with the program's exit code, or
with 128 + n for signal n. SIGTERM goes on to the program's process group. When its standard input closes, it kills all that is
left.

It sees the starter's end by its standard input. A death signal from the kernel belongs to the starting thread and does not
reach the program's children. If the reaper itself is killed, the program gets such a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LOOK_S = 1.0  # how often it looks whether its starter is still its parent: another process may hold the input's other end
_KILL_S = 20.0  # a process that writes to a dead disk cannot be killed; the reaper gives up


def main() -> int:
    command, starter, reaper = sys.argv[1:], os.getppid(), os.getpid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what the program's children leave behind comes here, to be killed and reaped
    woken, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        # This process has one thread, so that code between fork and exec is safe.
        program = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0, preexec_fn=lambda: _die_with(reaper)
        )
    except OSError as error:
        _say(f"{error.strerror}: {error.filename}")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: _terminate(program.pid))
    _say(str(program.pid))
    status = _wait(woken, program.pid, starter)
    killed = _kill_everything(program.pid)
    status = killed if status is None else status
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the starter has gone
        os.write(1, f"{line}\n".encode())


def _wait(woken: int, program: int, starter: int) -> int | None:
    """Return how the program ended, or None when the starter ends or wants it killed."""
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while os.getppid() == starter:
        for descriptor, _ in poll.poll(1000 * _LOOK_S):
            if descriptor != woken:
                return None
            os.read(woken, 4096)
        if (status := _reap(program)) is not None:
            return status
    return None


def _terminate(program: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program, signal.SIGTERM)


def _reap(program: int) -> int | None:
    """Take all that ended off the process table; how `program` ended, if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                found = os.waitstatus_to_exitcode(ended[1])
    return found


def _kill_everything(program: int) -> int | None:
    """Every process below this one, also those that hide in sessions of their own. How `program` ended, if it had not yet."""
    deadline, status = time.monotonic() + _KILL_S, None
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        if (ended := _reap(program)) is not None:
            status = ended
    return status


def descendants(ancestor: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found = [ancestor]
    for pid in found:  # grows as children are found
        found += children.get(pid, [])
    return found[1:]


def _die_with(reaper: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # what is ignored stays so across exec
    if os.getppid() != reaper:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


if __name__ == "__main__":
    sys.exit(main())
