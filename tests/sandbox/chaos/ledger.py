"""Calls that each have an answer of their own, and what became of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from strop.errors import MachineError
from strop.sandbox.client import SandboxClient
from strop.sandbox.protocol import RunOutcome, RunRequest, RunResult

LIMIT_S = 4.0  # of an honest program, which needs some milliseconds
SHORT_LIMIT_S = 0.5  # of one that never ends
_OVERRUN_S = 0.5  # of a limit, as the contract has it
_CROWD_S = 0.5  # more of it, on a machine whose cores are all taken
_BIG = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A program that no other call shares, and what it must come to."""

    number: int
    request: RunRequest
    outcome: RunOutcome
    text: str
    is_prefix: bool = False  # more may follow on `text`: the words for a timeout

    def is_answered_by(self, result: RunResult) -> bool:
        is_text = result.text.startswith(self.text) if self.is_prefix else result.text == self.text
        return result.outcome is self.outcome and is_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    call: Call
    asked_at: float
    answered_at: float
    answer: RunResult | MachineError

    @property
    def taken_s(self) -> float:
        return self.answered_at - self.asked_at

    @property
    def is_fault(self) -> bool:
        """A typed fault of ours, not a word about the program."""
        return isinstance(self.answer, MachineError) or self.answer.outcome.is_ours

    @property
    def is_right(self) -> bool:
        return isinstance(self.answer, RunResult) and self.call.is_answered_by(self.answer)

    @property
    def overrun_s(self) -> float:
        """How much longer than its limit its program ran."""
        return self.answer.timings.run_s - self.call.request.wall_s if isinstance(self.answer, RunResult) else 0.0


@dataclass(slots=True)
class Ledger:
    """What was asked and what came back; `check` is the proof."""

    entries: list[Entry] = field(default_factory=list)

    async def play(
        self, client: SandboxClient, calls: Iterable[Call], *, in_flight: int, done: Callable[[int], None] = lambda num: None
    ) -> None:
        """Ask for all of them, so many at a time; `done` gets the number of answers."""
        waiting = iter(calls)

        async def ask_on() -> None:
            for call in waiting:
                await self._ask(client, call)
                done(len(self.entries))

        await asyncio.gather(*(ask_on() for _ in range(in_flight)))

    async def _ask(self, client: SandboxClient, call: Call) -> None:
        asked_at = time.monotonic()
        answer: RunResult | MachineError
        try:
            answer = await client.run(call.request)
        except MachineError as error:
            answer = error
        self.entries.append(Entry(call=call, asked_at=asked_at, answered_at=time.monotonic(), answer=answer))

    def check(
        self, calls: Sequence[Call], *, within_s: float, may_fault: Callable[[Entry], bool], stopped_s: float = 0.0
    ) -> None:
        """Every call is answered once, rightly and in time.

        Args:
            within_s: from the question to the answer, queues and second tries included.
            may_fault: whether what happened meanwhile is a reason for an answer that is a fault of ours.
            stopped_s: how long the process that ends programs at their limits may have been stopped.
        """
        answered = Counter(entry.call.number for entry in self.entries)
        assert answered == Counter(call.number for call in calls), "some calls were not answered once"
        wrong = [entry for entry in self.entries if not entry.is_right and not entry.is_fault]
        assert not wrong, f"{len(wrong)} calls were answered wrongly, first {wrong[0]}"
        late = [entry for entry in self.entries if entry.taken_s > within_s]
        assert not late, f"{len(late)} calls took more than {within_s:g} s, the longest {max(e.taken_s for e in late):.1f} s"
        unexcused = [entry for entry in self.faults if not may_fault(entry)]
        assert not unexcused, f"{len(unexcused)} calls failed without a reason: {self.reasons()}"
        allowed_s = _OVERRUN_S + _CROWD_S + stopped_s
        overrun = [entry for entry in self.entries if entry.overrun_s > allowed_s]
        assert not overrun, f"{len(overrun)} programs ran {allowed_s:g} s longer than they may, first {overrun[0]}"

    @property
    def faults(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.is_fault]

    def reasons(self) -> Counter[str]:
        """Of the faults."""
        return Counter(
            entry.answer.reason if isinstance(entry.answer, RunResult) else f"{type(entry.answer).__name__}: {entry.answer}"
            for entry in self.faults
        )

    def summary(self) -> str:
        taken = sorted(entry.taken_s for entry in self.entries)
        seconds = max(entry.answered_at for entry in self.entries) - min(entry.asked_at for entry in self.entries)
        return (
            f"{len(taken)} calls in {seconds:.1f} s, {len(taken) / seconds:.0f}/s; {len(self.faults)} faults; "
            f"median {taken[len(taken) // 2]:.2f} s, p99 {taken[len(taken) * 99 // 100]:.2f} s, longest {taken[-1]:.2f} s"
        )


def make_calls(num: int, *, seed: int) -> list[Call]:
    """A mixture of what policies write; one of a hundred never ends."""
    rng = random.Random(seed)
    makers = {_prints: 70, _reads: 10, _fails: 8, _echoes: 5, _sums: 5, _computes: 1, _loops: 0.5, _sleeps: 0.5}
    chosen = rng.choices(list(makers), list(makers.values()), k=num)
    return [make(number, rng) for number, make in enumerate(chosen, start=_BIG * (1 + seed % 100))]


def _prints(number: int, rng: random.Random) -> Call:
    return _call(number, f"print({number})", RunOutcome.STDOUT, f"{number}\n")


def _reads(number: int, rng: random.Random) -> Call:
    lines = [str(number), *(str(rng.randrange(_BIG)) for _ in range(rng.choice((1, 10, 10_000))))]
    code = "import sys\nfirst, *rest = map(int, sys.stdin)\nprint(first, sum(rest))"
    return _call(number, code, RunOutcome.STDOUT, f"{number} {sum(map(int, lines[1:]))}\n", stdin="\n".join(lines))


def _fails(number: int, rng: random.Random) -> Call:
    trace = f'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n    raise ValueError({number})\n'
    return _call(number, f"raise ValueError({number})", RunOutcome.ERROR, f"{trace}ValueError: {number}\n")


def _echoes(number: int, rng: random.Random) -> Call:
    return _call(number, f"[{number}, {number} + 1]", RunOutcome.ECHO, f"[{number}, {number + 1}]")


def _sums(number: int, rng: random.Random) -> Call:
    code = f"import numpy as np\nprint(np.arange(10).sum() + {number})"
    return _call(number, code, RunOutcome.STDOUT, f"{number + 45}\n")


def _computes(number: int, rng: random.Random) -> Call:
    return _call(number, f"print({number} + sum(range(1_000_000)) * 0)", RunOutcome.STDOUT, f"{number}\n")


def _loops(number: int, rng: random.Random) -> Call:
    return _endless(number, "while True: pass")


def _sleeps(number: int, rng: random.Random) -> Call:
    return _endless(number, "import time; time.sleep(3600)")


def _endless(number: int, end: str) -> Call:
    request = RunRequest(code=f"print({number}, flush=True)\n{end}", wall_s=SHORT_LIMIT_S)
    return Call(number=number, request=request, outcome=RunOutcome.TIMEOUT, text=f"{number}\n", is_prefix=True)


def _call(number: int, code: str, outcome: RunOutcome, text: str, *, stdin: str = "") -> Call:
    return Call(number=number, request=RunRequest(code=code, stdin=stdin, wall_s=LIMIT_S), outcome=outcome, text=text)
