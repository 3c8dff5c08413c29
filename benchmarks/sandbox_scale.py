"""How far one service reaches, and how many a large job needs: live with a supervisor that runs nothing, then in virtual time.

The live half measures what a call costs the service: only its own process, client and supervisor are in others. The other half
takes that cost into a simulation of 16 machines with 1024 workers each, which no machine here could start.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from strop.sandbox import RunRequest
from strop.sandbox.client import SandboxClient

NUM_MACHINES, NUM_WORKERS, CALL_S = 16, 1024, 0.3
TIMEOUT_SHARE, TIMEOUT_S = 0.01, 4.0
STEP_CALLS = 45_000


async def measure(console: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """The cost of a call in the service, and what follows from it."""
    live = await _live(console)
    cost_s = min(run["service_cpu_s_per_call"] for run in live)
    needed = NUM_MACHINES * NUM_WORKERS / CALL_S * cost_s
    table = Table(
        "services",
        "mean s",
        "p99 s",
        "last s",
        title=f"{STEP_CALLS} calls at once, in virtual time, {cost_s * 1e6:.0f} us each",
    )
    simulated = []
    for num_services in (1, 2, 4, 8, 16):
        latencies = simulate(num_services=num_services, cost_s=cost_s, seed=0)
        figures = {
            "num_services": num_services,
            "mean_s": statistics.fmean(latencies),
            "p99_s": statistics.quantiles(latencies, n=100)[98],
            "last_s": max(latencies),
        }
        simulated.append(figures)
        table.add_row(str(num_services), *(f"{figures[name]:.2f}" for name in ("mean_s", "p99_s", "last_s")))
    console.print(table)
    console.print(
        f"{NUM_MACHINES} machines x {NUM_WORKERS} workers at {CALL_S} s take {NUM_MACHINES * NUM_WORKERS / CALL_S:.0f} calls/s;"
        f" at {cost_s * 1e6:.0f} us of CPU a call that is the work of {needed:.1f} services of one core each."
    )
    return {"live": live, "services_needed": needed, "simulated": simulated}, {}


async def _live(console: Console) -> list[dict[str, Any]]:
    """Calls per second and CPU per call of a service whose supervisor answers at once, by the number of calls in flight."""
    table = Table(
        "in flight", "calls/s", "service CPU us/call", "service busy", title="One service before a supervisor that runs nothing"
    )
    runs = []
    service = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).parent / "noop_service.py"), stdout=subprocess.PIPE
    )
    assert service.stdout is not None
    url = (await asyncio.wait_for(service.stdout.readline(), 60)).decode().strip()
    process = psutil.Process(service.pid)
    try:
        async with SandboxClient(url) as client:
            for in_flight in (1, 16, 64, 256, 1024):
                await _load(client, in_flight, 0.5)
                cpu_before, started_at = _cpu_s(process), time.monotonic()
                count = await _load(client, in_flight, 4.0)
                taken = time.monotonic() - started_at
                cpu_s = _cpu_s(process) - cpu_before
                run = {
                    "in_flight": in_flight,
                    "calls_per_s": count / taken,
                    "service_cpu_s_per_call": cpu_s / count,
                    "service_busy": cpu_s / taken,
                }
                runs.append(run)
                table.add_row(
                    str(in_flight),
                    f"{run['calls_per_s']:.0f}",
                    f"{run['service_cpu_s_per_call'] * 1e6:.0f}",
                    f"{run['service_busy']:.0%}",
                )
    finally:
        service.terminate()
        await service.wait()
    console.print(table)
    return runs


async def _load(client: SandboxClient, in_flight: int, seconds: float) -> int:
    end_at, count = time.monotonic() + seconds, 0

    async def ask() -> None:
        nonlocal count
        while time.monotonic() < end_at:
            await client.run(RunRequest(code="print(1)"))
            count += 1

    await asyncio.gather(*(ask() for _ in range(in_flight)))
    return count


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass(slots=True)
class _Service:
    """A queue with one server: what arrives waits for what came before it."""

    free_at: float = 0.0

    def serve(self, now: float, cost_s: float) -> float:
        self.free_at = max(now, self.free_at) + cost_s
        return self.free_at


def simulate(*, num_services: int, cost_s: float, seed: int) -> list[float]:
    """Seconds from offer to answer of `STEP_CALLS` calls that all come at once.

    Each call costs its service half of `cost_s` on the way in and half on the way out, and a worker an exponential time of mean
    `CALL_S`, or one in a hundred its whole limit. A service has its own share of the workers.
    """
    draw = random.Random(seed)
    services = [_Service() for _ in range(num_services)]
    free = [NUM_MACHINES * NUM_WORKERS // num_services] * num_services
    waiting: list[list[int]] = [[] for _ in range(num_services)]  # calls in reverse order
    for call in reversed(range(STEP_CALLS)):
        waiting[call % num_services].append(call)
    ends: list[tuple[float, int]] = []  # when a worker is done, and of which service
    latencies = []

    def start(service: int, now: float) -> None:
        while waiting[service] and free[service]:
            waiting[service].pop()
            free[service] -= 1
            sent_at = services[service].serve(now, cost_s / 2)
            taken = TIMEOUT_S if draw.random() < TIMEOUT_SHARE else min(TIMEOUT_S, draw.expovariate(1 / CALL_S))
            heapq.heappush(ends, (sent_at + taken, service))

    for service in range(num_services):
        start(service, 0.0)
    while ends:
        now, service = heapq.heappop(ends)
        free[service] += 1
        latencies.append(services[service].serve(now, cost_s / 2))
        start(service, now)
    return latencies


if __name__ == "__main__":
    asyncio.run(measure(Console(width=132)))
    sys.exit(os.EX_OK)
