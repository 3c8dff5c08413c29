"""A scripted sandbox with delays, faults and a death."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from strop.errors import MachineError
from strop.sandbox.protocol import RunRequest, RunResult
from strop.sandbox.scripted import ScriptedSandbox
from strop.types import derive_seed


@dataclass(slots=True, kw_only=True)
class FaultySandbox(ScriptedSandbox):
    """Delay and fault of an answer depend only on the request.

    Args:
        max_latency_s: the delay of an answer is drawn from [0, this] by `seed` and the request.
        fault_rate: share of requests that raise `MachineError`, drawn the same way.
        dies_after: every request after so many raises `MachineError`; None for never.
    """

    max_latency_s: float = 0.0
    fault_rate: float = 0.0
    dies_after: int | None = None
    seed: int = 0

    async def run(self, request: RunRequest) -> RunResult:
        if self.dies_after is not None and len(self.requests) >= self.dies_after:
            raise MachineError(f"the scripted sandbox died after {self.dies_after} requests, as its script says")
        draw = random.Random(derive_seed(self.seed, request.code, request.stdin, request.seed))
        latency_s, is_fault = draw.uniform(0.0, self.max_latency_s), draw.random() < self.fault_rate
        self.requests.append(request)
        await asyncio.sleep(latency_s)
        if is_fault:
            raise MachineError("a scripted fault")
        return self.answer_to(request)
