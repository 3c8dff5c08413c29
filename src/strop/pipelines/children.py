"""Runs commands side by side in processes of their own, which do not outlive this one."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from strop.runs import writing_to

_PR_SET_PDEATHSIG = 1
_GRACE_S = 120.0  # for a child that was interrupted: an update ends before it does
_LOOK_EVERY_S = 0.1

KeyT = TypeVar("KeyT")


class Child(Protocol):
    """One running command."""

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""

    def send_signal(self, sig: int, /) -> None: ...


Start = Callable[[Sequence[str], Path], Child]
"""Starts a command whose output is appended to a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Generic[KeyT]):
    """A child that is no more."""

    key: KeyT
    status: int  # as of `subprocess`: below 0 it was killed by that signal
    time_s: float


def start_process(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A process in a session of its own: an interrupt typed at the terminal reaches this process alone, which passes it on."""
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


class Children(Generic[KeyT]):
    """A context manager: children that still run when it is left are interrupted, and killed if they do not end."""

    def __init__(self, start: Start = start_process) -> None:
        self._start = start
        self._children: dict[KeyT, tuple[Child, float]] = {}

    @property
    def running(self) -> tuple[KeyT, ...]:
        return tuple(self._children)

    def start(self, key: KeyT, command: Sequence[str], log: Path) -> None:
        self._children[key] = (self._start(command, log), time.monotonic())

    def wait(self, *, at_most_s: float) -> list[Ended[KeyT]]:
        """Those that ended; waits for the first of them."""
        deadline = time.monotonic() + at_most_s
        while True:
            ended = self._collect()
            if ended or not self._children or time.monotonic() >= deadline:
                return ended
            time.sleep(_LOOK_EVERY_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Interrupt what still runs and wait for it. A second interrupt, or patience that ends, kills it."""
        try:
            self._signal(signal.SIGINT)
            deadline = time.monotonic() + _GRACE_S
            while self._children and time.monotonic() < deadline:
                self.wait(at_most_s=1.0)
        finally:
            self._signal(signal.SIGKILL)
            while self._children:
                self.wait(at_most_s=1.0)

    def _collect(self) -> list[Ended[KeyT]]:
        ended = []
        for key, (child, started) in list(self._children.items()):
            status = child.poll()
            if status is not None:
                del self._children[key]
                ended.append(Ended(key=key, status=status, time_s=time.monotonic() - started))
        return ended

    def _signal(self, number: int) -> None:
        for child, _ in self._children.values():
            child.send_signal(number)


def _end_with(parent: int) -> Callable[[], None]:
    """What a new child does first: it dies when its parent is killed, and can be interrupted whoever started that one."""
    libc = ctypes.CDLL(None)  # loaded here: a forked child had better not load anything

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # killed before the line above
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where a shell put the parent into the background

    return prepare
