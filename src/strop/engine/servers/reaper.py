"""Starts one program, reports how it ended, and kills it and its children when the starter ends.

It runs as a file and imports only the standard library, because importing the package would take seconds. Its arguments are an
inherited socket and the command. It writes one JSON object a line: {"pid": n} or {"failed": "why"}, then {"status": code}, with
a negative code for a signal. It reads one letter, t: send SIGTERM to the program's process group. When the socket closes, it
kills all that is left.

It sees the starter's end by the socket. A death signal from the kernel belongs to the starting thread and does not reach the
program's children. If the reaper itself is killed, the program gets such a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_TERMINATE = b"t"
_LOOK_S = 1.0  # how often it looks whether its starter is still its parent: another process may hold the socket's other end
_KILL_S = 20.0  # a process that writes to a dead disk cannot be killed; the reaper gives up


def main() -> int:
    link, command, starter = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:], os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what the program's children leave behind comes here, to be killed and reaped
    woken, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reaper, inherited = os.getpid(), _inherited(but={link.fileno()})
    try:
        # This process has one thread, so that code between fork and exec is safe.
        program = subprocess.Popen(command, process_group=0, preexec_fn=lambda: _die_with(reaper), pass_fds=inherited)
    except OSError as error:
        _tell(link, {"failed": f"{error.strerror}: {error.filename}"})
        return 1
    for descriptor in inherited:
        os.close(descriptor)  # the other end must see the program's end, not this process's
    _tell(link, {"pid": program.pid})
    if _serve(link, woken, program.pid, starter):
        _kill_everything()
    elif (status := _kill_everything(program.pid)) is not None:
        _tell(link, {"status": status})
    return 0


def _serve(link: socket.socket, woken: int, program: int, starter: int) -> bool:
    """Wait until the program or its starter ends. Report the program's status. Return whether it ended by itself."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while os.getppid() == starter:
        for descriptor, _ in poll.poll(1000 * _LOOK_S):
            if descriptor == woken:
                os.read(woken, 4096)
                continue
            said = _hear(link)
            if not said:
                return False
            if _TERMINATE in said:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program, signal.SIGTERM)
        if (status := _reap(program)) is not None:
            _tell(link, {"status": status})
            return True
    return False


def _reap(program: int = 0) -> int | None:
    """Take all that ended off the process table; how `program` ended, if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                found = os.waitstatus_to_exitcode(ended[1])
    return found


def _kill_everything(program: int = 0) -> int | None:
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


def _inherited(*, but: set[int]) -> list[int]:
    """The descriptors that the starter passed on for the program."""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and number not in but and _is_open(number)]


def _is_open(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # the one that listed the directory
        return False


def _die_with(reaper: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # what is ignored stays so across exec
    if os.getppid() != reaper:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _tell(link: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the starter has gone: seen by the next look
        link.sendall(json.dumps(message).encode() + b"\n")


def _hear(link: socket.socket) -> bytes:
    try:
        return link.recv(64)
    except OSError:
        return b""


if __name__ == "__main__":
    sys.exit(main())
