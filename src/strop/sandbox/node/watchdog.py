"""Looks at running programs from outside: who sleeps, and who holds more memory than all its processes together may."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Protocol

from strop.sandbox.node.slots import Slots
from strop.sandbox.protocol import RunRequest

_log = logging.getLogger(__name__)

_FIRST_LOOK_S = 0.02  # most programs are over by then
_LOOK_S, _LOOK_ASLEEP_S = 0.05, 0.2
_PAUSE_FACTOR = 20  # a glance at many processes is dear: at most so small a part of the time is spent on one call
_MAX_GLANCES_S = 0.003  # at a time; deadlines and answers wait meanwhile
_TREE_FACTOR = 2  # all processes of a call together may hold so many times what one may
_BUSY_SHARE = 0.1  # of one core; below it a program is asleep
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What all processes of one call do and hold together."""

    taken_at: float
    cpu_s: float
    is_running: bool  # at least one thread is on a processor, or wants to be
    anonymous_bytes: int  # pages that its processes share are counted in each: never too little
    pids: tuple[int, ...]


class Process(Protocol):
    @property
    def adopter(self) -> int:
        """The process that its orphans become children of; 0 where that is itself."""

    def host_pid(self) -> int | None:
        """As this process numbers it; None when it has ended."""


class Watched(Protocol):
    """What holds a slot: a program, or a cell of a session."""

    @property
    def child(self) -> Process: ...

    @property
    def request(self) -> RunRequest: ...

    def look(self, now: float) -> None: ...

    def stop(self, reason: str) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Watch:
    next_at: float
    last: Glance | None = None
    is_asleep: bool = False


class Watchdog:
    """Watches the calls that hold a slot: lends the slots of those that sleep, and stops those that hold too much memory."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._calls: dict[Watched, _Watch] = {}

    @property
    def num_asleep(self) -> int:
        return sum(watched.is_asleep for watched in self._calls.values())

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Watched) -> None:
        self._calls[call] = _Watch(next_at=time.monotonic() + _FIRST_LOOK_S)

    def remove(self, call: Watched) -> None:
        """Its slot is busy again, whatever it did last: whoever holds it gives it back."""
        if self._calls.pop(call).is_asleep:
            self._slots.take_back()

    def look(self, now: float) -> None:
        """Every call's clock, and as many glances as there is time for; those that wait come first the next time."""
        started_at = time.monotonic()
        for call, watched in list(self._calls.items()):
            try:
                call.look(now)
            except OSError as error:  # one call's trouble, such as no descriptor left, must not stop the clocks of the others
                _log.warning("a program cannot be looked after (%s); stopping it", error)
                call.stop("setup")
            begun_at = time.monotonic()
            if now >= watched.next_at and begun_at - started_at < _MAX_GLANCES_S:
                self._glance(call, watched)
                cost_s = time.monotonic() - begun_at
                pause_s = _LOOK_ASLEEP_S if watched.is_asleep else _LOOK_S
                watched.next_at = now + max(pause_s, _PAUSE_FACTOR * cost_s)

    def _glance(self, call: Watched, watched: _Watch) -> None:
        if (pid := call.child.host_pid()) is None:
            return
        seen, before = glance(pid, adopter=call.child.adopter), watched.last
        watched.last = seen
        allowed = _TREE_FACTOR * call.request.memory_mib << 20
        if seen.anonymous_bytes > allowed and own_bytes(seen.pids) > allowed:
            call.stop("memory")
        has_computed = before is not None and seen.cpu_s - before.cpu_s > _BUSY_SHARE * (seen.taken_at - before.taken_at)
        is_asleep = not seen.is_running and not has_computed
        if is_asleep and not watched.is_asleep:
            self._slots.lend()
        elif watched.is_asleep and not is_asleep:
            self._slots.take_back()
        watched.is_asleep = is_asleep


def glance(pid: int, *, adopter: int = 0) -> Glance:
    """At the process `pid` and everything below it. What ends meanwhile counts as nothing.

    Args:
        adopter: the process that its orphans become children of, unless that is `pid`; they stay in its process group.
    """
    ticks, is_running, anonymous_bytes, pids = 0, False, 0, [pid]
    pids += [one for one in _children(adopter) if one != pid and _group(one) == pid] if adopter else []
    for one in pids:  # grows as its children are found
        for thread in _threads(one):
            fields = _read(f"/proc/{one}/task/{thread}/stat").rpartition(")")[2].split()
            if fields:
                ticks += int(fields[11]) + int(fields[12])
                is_running |= fields[0] in "RD"
        pids += _children(one)
        anonymous_bytes += _resident_bytes(one)
    return Glance(
        taken_at=time.monotonic(),
        cpu_s=ticks / _TICKS_PER_S,
        is_running=is_running,
        anonymous_bytes=anonymous_bytes,
        pids=tuple(pids),
    )


def own_bytes(pids: tuple[int, ...]) -> int:
    """Memory of these processes together, a page that several share counted once in all. Slow: walks their page tables."""
    total = 0
    for pid in pids:
        shares = _sum_kib(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
        total += shares or _resident_bytes(pid)  # nobody but root may see the maps of a process that forbade it
    return total


def _resident_bytes(pid: int) -> int:
    """Anonymous memory and that which it maps shared, as `mmap.mmap(-1, ...)` does."""
    return _sum_kib(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:"))


def _sum_kib(path: str, names: tuple[str, ...]) -> int:
    return sum(int(line.split()[1]) << 10 for line in _read(path).splitlines() if line.startswith(names))


def _children(pid: int) -> list[int]:
    return [int(child) for thread in _threads(pid) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def _group(pid: int) -> int:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[2]) if fields else 0


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
