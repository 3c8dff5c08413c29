"""Sends signals to parts of a service, at random moments of a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from .processes import Part, Process
from .service import Service


class Deed(StrEnum):
    KILL = "killed"
    PAUSE = "stopped for a while"
    FREEZE = "stopped for good"  # until somebody finds out, or the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What was done to one process."""

    deed: Deed
    part: Part
    process: Process
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens: each pair of a deed and a part once, in random order, and again.

    Args:
        deeds: what is done to whom.
        pause_s: the shortest and the longest time between two acts, or between a start of the front and an act.
        stop_s: the same for how long a process is stopped that goes on later.
        liveness_s: a front that is stopped for good is killed after so long, as its service manager would; and a supervisor,
            which is found out earlier except while it starts.
    """

    deeds: tuple[tuple[Deed, Part], ...]
    pause_s: tuple[float, float]
    stop_s: tuple[float, float] = (0.05, 3.0)
    liveness_s: float = 12.0


@dataclass(slots=True)
class Agent:
    """Acts until it is asked to stop; then stopped processes continue."""

    service: Service
    plan: Plan
    seed: int
    acts: list[Act] = field(default_factory=list)
    _later: set[asyncio.Task[None]] = field(default_factory=set)

    async def act(self, *, stop: asyncio.Event) -> None:
        rng = random.Random(self.seed)
        due: list[tuple[Deed, Part]] = []
        while not stop.is_set():
            await self.service.wait_up()  # what is not there cannot be harmed, and never would be there
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), rng.uniform(*self.plan.pause_s))
                break
            due = due or rng.sample(self.plan.deeds, len(self.plan.deeds))
            deed, part = due.pop()
            # By turns of age, not of number: a seed means the same whatever numbers the kernel gave.
            candidates = sorted((await self.service.parts())[part], key=lambda process: process.born_at)
            if candidates:
                self._do(deed, part, rng.choice(candidates), rng)
        if self._later:
            await asyncio.wait(self._later)
        for act in self.acts:
            if act.process.is_stopped:  # not found out, or not needed
                act.process.send(signal.SIGCONT)

    @property
    def has_done_all(self) -> bool:
        """Whether everything that is planned has happened."""
        return {(act.deed, act.part) for act in self.acts} == set(self.plan.deeds)

    def deaths_during(self, begin: float, end: float, *, slack_s: float) -> int:
        """How many acts may have cost something that began and ended then an attempt.

        Args:
            slack_s: how long it takes to miss what died. A process that is stopped for good may wait for its victim.
        """
        return sum(act.at <= end and (act.deed is Deed.FREEZE or act.at >= begin - slack_s) for act in self.acts)

    def summary(self) -> str:
        counted = Counter(f"{act.part} {act.deed}" for act in self.acts)
        return f"{len(self.acts)} acts: " + ", ".join(f"{num} x {what}" for what, num in sorted(counted.items()))

    def _do(self, deed: Deed, part: Part, process: Process, rng: random.Random) -> None:
        number = signal.SIGKILL if deed is Deed.KILL else signal.SIGSTOP
        after_s = rng.uniform(*self.plan.stop_s)
        if not process.send(number):
            return
        self.acts.append(Act(deed=deed, part=part, process=process, at=time.monotonic()))
        if deed is Deed.PAUSE:
            self._spawn(process, signal.SIGCONT, after_s)
        elif deed is Deed.FREEZE and part in (Part.FRONT, Part.SUPERVISOR):
            self._spawn(process, signal.SIGKILL, self.plan.liveness_s)

    def _spawn(self, process: Process, number: signal.Signals, after_s: float) -> None:
        async def send() -> None:
            await asyncio.sleep(after_s)
            process.send(number)

        task = asyncio.create_task(send())
        self._later.add(task)
        task.add_done_callback(self._later.discard)
