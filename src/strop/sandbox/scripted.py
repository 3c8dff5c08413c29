"""A code runner for tests: it runs nothing, and a script gives answers, delays, faults and deaths."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from strop.errors import MachineError
from strop.sandbox.protocol import (
    CodeRunner,
    IsolationLevel,
    PairVerdict,
    RunOutcome,
    RunRequest,
    RunResult,
    RunTimings,
    VerifyRequest,
)
from strop.sandbox.verify_process import ProcessVerifier
from strop.types import derive_seed


def scripted_result(text: str, outcome: RunOutcome = RunOutcome.STDOUT, *, reason: str = "") -> RunResult:
    """Return a result with an outcome and a text."""
    return RunResult(
        outcome=outcome, reason=reason, text=text, exit_code=0, timings=RunTimings(), level=IsolationLevel.NAMESPACES
    )


@dataclass(slots=True, kw_only=True)
class ScriptedSandbox(CodeRunner):
    """Answers each request from a script; answer, delay and fault depend only on the request.

    `verify` really compares answers, in processes that `close` ends. It then belongs to one event loop.

    Args:
        answer: a mapping from code to text or result, or a function of the request.
        max_latency_s: the delay of an answer is drawn from [0, this] by `seed` and the request.
        fault_rate: share of requests that raise `MachineError`, drawn the same way.
        dies_after: every request after so many raises `MachineError`; None for never.
    """

    answer: Callable[[RunRequest], str | RunResult] | Mapping[str, str | RunResult]
    max_latency_s: float = 0.0
    fault_rate: float = 0.0
    dies_after: int | None = None
    seed: int = 0
    requests: list[RunRequest] = field(default_factory=list, init=False)  # in order of arrival
    _verifier: ProcessVerifier = field(default_factory=ProcessVerifier, init=False)

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

    def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        return self._verifier.verify(request)

    async def close(self) -> None:
        await self._verifier.close()
