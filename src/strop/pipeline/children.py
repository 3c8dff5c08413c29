"""Runs commands in parallel processes, which end when this process ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from strop.run_directory import writing_to

_PR_SET_PDEATHSIG = 1
_GRACE_S = 120.0  # after an interrupt: the current update ends first
_POLL_S = 0.1


Start = Callable[[Sequence[str], Path], "subprocess.Popen[bytes]"]
"""Starts a command whose output is appended to a file."""


class Ended(NamedTuple):
    """A child that has ended."""

    key: str
    status: int  # as in `subprocess`: negative if a signal killed it
    time_s: float


def start_process(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that Ctrl-C reaches only this process, which passes it on."""
    with writing_to(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    with output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with(os.getpid()),
        )


class Children:
    """A context manager. On exit it interrupts children that still run, and kills those that do not end."""

    def __init__(self, start: Start = start_process) -> None:
        self._start = start
        self._children: dict[str, tuple[subprocess.Popen[bytes], float]] = {}

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._children)

    def start(self, key: str, command: Sequence[str], log: Path) -> None:
        self._children[key] = (self._start(command, log), time.monotonic())

    def wait(self, *, at_most_s: float) -> list[Ended]:
        """Wait for the first child that ends, and return all that have ended."""
        deadline = time.monotonic() + at_most_s
        while True:
            statuses = {key: child.poll() for key, (child, _) in self._children.items()}
            ended = [
                Ended(key, status, time.monotonic() - self._children.pop(key)[1])
                for key, status in statuses.items()
                if status is not None
            ]
            if ended or not self._children or time.monotonic() >= deadline:
                return ended
            time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._signal(signal.SIGINT)
            deadline = time.monotonic() + _GRACE_S
            while self._children and time.monotonic() < deadline:
                self.wait(at_most_s=1.0)
        finally:
            self._signal(signal.SIGKILL)
            while self._children:
                self.wait(at_most_s=1.0)

    def _signal(self, number: int) -> None:
        for child, _ in self._children.values():
            child.send_signal(number)


def _end_with(parent: int) -> Callable[[], None]:
    """Return what a new child runs first: it dies with its parent, and accepts SIGINT even if the parent ignores it."""
    libc = ctypes.CDLL(None)  # loaded before the fork

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent was killed before prctl
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell makes background jobs ignore it

    return prepare
