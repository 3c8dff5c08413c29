"""A code runner that runs nothing: answers, delays and faults are scripted. For tests, ours and yours."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from strop.errors import MachineError
from strop.sandbox.protocol import CodeRunner, IsolationLevel, RunOutcome, RunRequest, RunResult, RunTimings
from strop.seeds import derive_seed


def scripted_result(text: str, outcome: RunOutcome = RunOutcome.STDOUT, *, reason: str = "") -> RunResult:
    """A result with nothing but an outcome and a text."""
    return RunResult(
        outcome=outcome, reason=reason, text=text, exit_code=0, timings=RunTimings(), level=IsolationLevel.NAMESPACES
    )


@dataclass(slots=True, kw_only=True)
class ScriptedSandbox(CodeRunner):
    """Answers each request from a script; which answer, how late and whether it fails depend on the request alone.

    Args:
        answer: from the code to its text or its result, or a function of the request.
        max_latency_s: answers take a time drawn from [0, this], by `seed` and the request.
        fault_rate: share of requests that raise `MachineError`, drawn in the same way.
        dies_after: after so many requests every further one raises `MachineError`; None for never.
    """

    answer: Callable[[RunRequest], str | RunResult] | Mapping[str, str | RunResult]
    max_latency_s: float = 0.0
    fault_rate: float = 0.0
    dies_after: int | None = None
    seed: int = 0
    requests: list[RunRequest] = field(default_factory=list, init=False)  # in order of arrival

    async def run(self, request: RunRequest) -> RunResult:
        self.requests.append(request)
        if self.dies_after is not None and len(self.requests) > self.dies_after:
            raise MachineError(f"the scripted sandbox died after {self.dies_after} requests, as its script says")
        draw = random.Random(derive_seed(self.seed, request.code, request.stdin, request.seed))
        latency_s, is_fault = draw.uniform(0.0, self.max_latency_s), draw.random() < self.fault_rate
        await asyncio.sleep(latency_s)
        if is_fault:
            raise MachineError("a scripted fault")
        answer = self.answer(request) if callable(self.answer) else self.answer[request.code]
        return scripted_result(answer) if isinstance(answer, str) else answer

    async def close(self) -> None:
        """Nothing to end."""
