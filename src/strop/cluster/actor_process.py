"""What runs in a process that Ray starts: one object, whose methods another process calls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import StropError
from strop.user_code import blame

THREADS = "OMP_NUM_THREADS"
_KILL_S = 2.0  # until a process that Ray is to end is killed
_END_S = 10.0  # until a killed process is gone
_NOT_RUNNING = {"T": "was stopped", "t": "was stopped", "Z": "ended", "X": "ended", "": "ended"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What went wrong in a call, instead of its result."""

    error: Exception | None  # where it can be raised elsewhere as it is
    text: str


class Host:
    """One object in a process of its own, which makes one call after the other."""

    def __init__(self, path: Sequence[str], log: Path) -> None:
        """Look for modules in `path`, and print into the file `log`."""
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]  # nodes may have theirs elsewhere
        with log.open("ab") as output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
        self._held: Any = None

    def pid(self) -> int:
        return os.getpid()

    def make(self, message: bytes) -> bytes:
        """Make the object: `message` is what makes it, and its arguments."""
        return _answer(self._make, message)

    def _make(self, kind: Callable[..., Any], *arguments: Any) -> None:
        self._held = kind(*arguments)

    def call(self, message: bytes) -> bytes:
        return _answer(self._held, message)


class AsyncHost(Host):
    """One object in a process of its own, whose methods are coroutines.

    What Ray costs grows with the number of its calls, so that one message begins many calls, in the order in which they were
    made, and results are fetched together.
    """

    def __init__(self, path: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        super().__init__(path, log)
        os.environ.pop(THREADS, None)  # Ray sets it to 1
        os.environ.update(environment)
        self._turn = 0
        self._early: dict[int, asyncio.Event] = {}  # messages that arrived before an earlier one
        self._running: dict[int, asyncio.Future[bytes]] = {}
        self._ended: list[tuple[int, bytes | None]] = []
        self._has_ended = asyncio.Event()

    async def open(self, message: bytes) -> bytes:
        """Make the object: `message` is the coroutine function that makes it, and its arguments."""

        async def make(kind: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
            self._held = await kind(*arguments)

        return await _answer_later(make, message)

    async def begin(self, turn: int, calls: Sequence[tuple[int, bytes | None]]) -> None:
        """Begin calls: the number and message of each; those without a message are cancelled."""
        if turn != self._turn:  # Ray keeps no order
            early = self._early[turn] = asyncio.Event()
            await early.wait()
        for number, message in calls:
            if message is not None:
                running = self._running[number] = asyncio.ensure_future(_answer_later(self._call, message))
                running.add_done_callback(functools.partial(self._end_call, number))
            elif number in self._running:
                self._running[number].cancel()
        self._turn += 1
        if (later := self._early.pop(self._turn, None)) is not None:
            later.set()

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await getattr(self._held, name)(*arguments)

    def _end_call(self, number: int, done: asyncio.Future[bytes]) -> None:
        del self._running[number]
        self._ended.append((number, None if done.cancelled() else done.result()))
        self._has_ended.set()

    async def results(self) -> list[tuple[int, bytes | None]]:
        """Return the results of the calls that have ended since the last time, when there are any; None: cancelled."""
        await self._has_ended.wait()
        self._has_ended.clear()
        ended, self._ended = self._ended, []
        return ended


def _answer(call: Callable[..., Any], message: bytes) -> bytes:
    """Return the result of the call that a message asks for, or its fault, as the other process reads it."""
    try:
        first, arguments = pickle.loads(message)
        return pickle.dumps(call(first, *arguments))
    except Exception as raised:  # noqa: BLE001 - the caller raises it
        return _fault_of(raised)


async def _answer_later(call: Callable[..., Awaitable[Any]], message: bytes) -> bytes:
    try:
        first, arguments = pickle.loads(message)
        return pickle.dumps(await call(first, *arguments))
    except Exception as raised:  # noqa: BLE001 - the caller raises it
        return _fault_of(raised)


def _fault_of(raised: Exception) -> bytes:
    traceback.print_exception(raised)
    error = blame(raised) or raised
    is_plain = isinstance(error, StropError | ValueError) and _can_be_sent(error)
    return pickle.dumps(Fault(error=error if is_plain else None, text=f"{type(error).__name__}: {error}"))


def _can_be_sent(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an exception may do anything when it is copied
        return False
    return True


def state_of(pid: int) -> str:
    """Return the letter of a process's state, as in /proc; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def not_running(pids: Sequence[int]) -> dict[int, str]:
    """Return those of `pids` on this machine that have ended, or that a signal or a debugger has stopped."""
    return {pid: _NOT_RUNNING[state] for pid in pids if (state := state_of(pid)) in _NOT_RUNNING}


def end_processes(pids: Sequence[int]) -> None:
    """Wait until processes of this machine that Ray ends have ended, and kill the others."""
    if not _have_ended(pids, within_s=_KILL_S):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # what is stopped does not hear Ray
        _have_ended(pids, within_s=_END_S)


def _have_ended(pids: Sequence[int], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while left := any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return not left
