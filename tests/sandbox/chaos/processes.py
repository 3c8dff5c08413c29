"""The processes of a service by their part in it, read from /proc, and signals that reach no other process."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Part(StrEnum):
    FRONT = "front"
    SUPERVISOR = "supervisor"
    FORK_SERVER_OUTER = "fork server, outside its namespaces"
    FORK_SERVER_INNER = "fork server"


@dataclass(frozen=True, slots=True)
class Process:
    """One process for good: a number that the kernel gives again belongs to another."""

    pid: int
    born_at: int  # in clock ticks

    @property
    def is_alive(self) -> bool:
        """Whether it holds anything still: a zombie does not."""
        return self._state not in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        return self._state == "T"

    @property
    def _state(self) -> str:
        """Empty when it is gone; read once, for it may go between two looks."""
        fields = _stat(self.pid)
        return fields[0] if fields and Process(self.pid, int(fields[19])) == self else ""

    def send(self, number: signal.Signals) -> bool:
        """Whether it was there to be sent something."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if process_of(self.pid) != self:
                return False
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True


def process_of(pid: int) -> Process | None:
    fields = _stat(pid)
    return Process(pid, int(fields[19])) if fields else None


def parts_below(root: int) -> dict[Part, list[Process]]:
    """Of the service whose front is `root`. Programs are no part of it."""
    found: dict[Part, list[Process]] = {part: [] for part in Part}
    _note(found[Part.FRONT], root)
    for supervisor in (child for child in children_of(root) if "strop.sandbox.supervisor.node" in _command(child)):
        _note(found[Part.SUPERVISOR], supervisor)
        for outer in children_of(supervisor):
            if "main" in _command(outer):  # not the helper for copies of sessions
                _note(found[Part.FORK_SERVER_OUTER], outer)
                for inner in children_of(outer):
                    _note(found[Part.FORK_SERVER_INNER], inner)
    return found


def everyone_below(root: int) -> set[Process]:
    """`root` and all that it started, programs included."""
    pids, everyone = [root], set()
    for pid in pids:  # grows
        if (process := process_of(pid)) is not None:
            everyone.add(process)
            pids += children_of(pid)
    return everyone


def children_of(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return children


def _note(processes: list[Process], pid: int) -> None:
    if (process := process_of(pid)) is not None:
        processes.append(process)


def _stat(pid: int) -> list[str]:
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _command(pid: int) -> list[str]:
    return _read(f"/proc/{pid}/cmdline").split("\0")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
