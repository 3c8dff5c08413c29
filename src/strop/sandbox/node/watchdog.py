"""Looks at running programs from outside: who sleeps, and who holds more memory than all its processes together may."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

from strop.sandbox.node.processes import Glance, glance
from strop.sandbox.node.slots import Slots
from strop.sandbox.protocol import RunRequest

_log = logging.getLogger(__name__)

_FIRST_LOOK_S = 0.02  # most programs are over by then
_LOOK_S, _LOOK_ASLEEP_S = 0.05, 0.2
_PAUSE_FACTOR = 20  # a glance at many processes is dear: at most so small a part of the time is spent on one call
_MAX_GLANCES_S = 0.003  # at a time; deadlines and answers wait meanwhile
_BUSY_SHARE = 0.1  # of one core; below it a program is asleep


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
    was_unseen: bool = False  # said once


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
                try:
                    self._glance(call, watched)
                except OSError as error:  # no descriptor left: the next glance may have one
                    if not watched.was_unseen:
                        _log.warning("a program could not be looked at: %s", error)
                    watched.was_unseen = True
                cost_s = time.monotonic() - begun_at
                pause_s = _LOOK_ASLEEP_S if watched.is_asleep else _LOOK_S
                watched.next_at = now + max(pause_s, _PAUSE_FACTOR * cost_s)

    def _glance(self, call: Watched, watched: _Watch) -> None:
        if (pid := call.child.host_pid()) is None:
            return
        seen, before = glance(pid, adopter=call.child.adopter), watched.last
        watched.last = seen
        if seen.holds_too_much(call.request.memory_mib):
            call.stop("memory")
        has_computed = before is not None and seen.cpu_s - before.cpu_s > _BUSY_SHARE * (seen.taken_at - before.taken_at)
        is_asleep = not seen.is_running and not has_computed
        if is_asleep and not watched.is_asleep:
            self._slots.lend()
        elif watched.is_asleep and not is_asleep:
            self._slots.take_back()
        watched.is_asleep = is_asleep
