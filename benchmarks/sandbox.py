"""Measures the whole code service, client -> HTTP -> queue -> child -> reply, against the limit of a bare isolated fork.

The load generator runs on the same cores as the service. Everything that is compared was measured in this run, interleaved;
prints tables and writes results/sandbox.json. `make bench-sandbox` runs all parts; `--parts throughput,latency` some of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bare_fork
import psutil
import sandbox_scale
import sandbox_verify
from rich.console import Console
from rich.table import Table

from strop.run_directory import write_json, write_text
from strop.sandbox import RunOutcome, RunRequest
from strop.sandbox.client.client import SandboxClient

RESULTS = Path(__file__).parent / "results"
COMMAND = "make bench-sandbox"
NUM_CORES = os.cpu_count() or 1
IN_FLIGHT = 64
ROUNDS = 5
LEVEL = "namespaces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A program, and the share of the bare loop's rate that the whole service must reach with it."""

    name: str
    code: str
    text: str
    profile: str
    bar: float
    seconds: float


LOADS = (
    Load(name="print", code="print(1)", text="1\n", profile="bare", bar=0.68, seconds=3.0),
    Load(
        name="numpy",
        code="import numpy as np\nprint(np.arange(10).sum())",
        text="45\n",
        profile="numpy",
        bar=0.48,
        seconds=3.0,
    ),
    Load(
        name="sympy",
        code="from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6, x))",
        text="[2, 3]\n",
        profile="full",
        bar=0.75,
        seconds=5.0,
    ),
)


@contextlib.asynccontextmanager
async def service(*arguments: str) -> AsyncIterator[tuple[str, str, psutil.Process]]:
    """The address, the token and the process of a service that was started as a user would."""
    token = "benchmark-only-token"
    with tempfile.TemporaryDirectory() as directory:
        token_file = Path(directory) / "token"
        token_file.write_text(token)
        command = [sys.executable, "-m", "strop.cli", "sandbox", "serve", "--port", "0", "--token-file", str(token_file)]
        process = await asyncio.create_subprocess_exec(*command, *arguments, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            url = ""
            while not url:
                line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
                assert line, "the service ended before it listened"
                url = next((word for word in line.split() if word.startswith("http://")), "")
            yield url, token, psutil.Process(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def rate(client: SandboxClient, load: Load, seconds: float) -> float:
    """Calls per second with `IN_FLIGHT` of them at any time, each one public `run`."""
    end_at, count = time.monotonic() + seconds, 0

    async def ask() -> None:
        nonlocal count
        while time.monotonic() < end_at:
            result = await client.run(RunRequest(code=load.code))
            assert result.text == load.text, result
            count += 1

    started_at = time.monotonic()
    await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
    return count / (time.monotonic() - started_at)


async def throughput(console: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rates through the service and through the bare loop, in turn."""
    table = Table("program", "bare loop, calls/s", "service, calls/s", "share, median", "range", "bar", title="Throughput")
    figures: dict[str, Any] = {}
    bars: dict[str, Any] = {}
    async with service("--warm", "bare,numpy,full") as (url, token, _), SandboxClient(url, token=token) as client:
        for load in LOADS:
            await rate(client, load, 1.0)
            bare, served = [], []
            for _ in range(ROUNDS):
                bare.append(
                    await asyncio.to_thread(
                        bare_fork.calls_per_s,
                        load.code,
                        level=LEVEL,
                        profile=load.profile,
                        seconds=load.seconds,
                        num_loops=NUM_CORES,
                    )
                )
                served.append(await rate(client, load, load.seconds))
            shares = [ours / limit for ours, limit in zip(served, bare, strict=True)]
            share = statistics.median(shares)
            figures[load.name] = {"bare_calls_per_s": bare, "service_calls_per_s": served, "shares": shares}
            bars[f"share_{load.name}"] = {"value": share, "bar": f">= {load.bar}", "holds": share >= load.bar}
            table.add_row(
                load.name,
                f"{statistics.median(bare):.0f}",
                f"{statistics.median(served):.0f}",
                f"{share:.2f}",
                f"{min(shares):.2f}-{max(shares):.2f}",
                f">= {load.bar}",
            )
    console.print(table)
    return figures, bars


async def latency(console: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a lone call: nothing else is in flight."""
    table = Table("program", "median ms", "p95 ms", "bar", title="Latency of a lone call")
    figures: dict[str, Any] = {}
    bars: dict[str, Any] = {}
    programs = (("bare", "print(1)", 3.0), ("full", "import sympy\nprint(1)", 6.0))
    async with service("--warm", "bare,full") as (url, token, _), SandboxClient(url, token=token) as client:
        for name, code, bar in programs:
            taken = []
            for _ in range(300):
                started_at = time.perf_counter()
                result = await client.run(RunRequest(code=code))
                taken.append(1e3 * (time.perf_counter() - started_at))
                assert result.text == "1\n"
                await asyncio.sleep(0.01)
            median, p95 = statistics.median(taken), statistics.quantiles(taken, n=20)[-1]
            figures[name] = {"median_ms": median, "p95_ms": p95}
            bars[f"lone_{name}_ms"] = {"value": median, "bar": f"<= {bar}", "holds": median <= bar}
            table.add_row(name, f"{median:.2f}", f"{p95:.2f}", f"<= {bar}")
    console.print(table)
    return figures, bars


async def flood(console: Console, *, num_calls: int = 45_000, num_services: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """All calls offered at once by one client, 1% of them endless loops; a second client asks for something now and then."""
    wall_s, num_loops = 1.0, num_calls // 100
    num_slots = 2 * NUM_CORES * num_services
    async with contextlib.AsyncExitStack() as opened:
        services = [await opened.enter_async_context(service()) for _ in range(num_services)]
        urls, [token, *_], processes = zip(*services, strict=True)
        client = await opened.enter_async_context(SandboxClient(urls, token=token, client="flood"))
        other = await opened.enter_async_context(SandboxClient(urls, token=token, client="other"))
        await client.health()
        honest_rate = await rate(client, LOADS[0], 5.0)
        before_bytes = sum(map(memory, processes))
        answered: Counter[int] = Counter()
        wrong: list[str] = []
        peaks, waits = [before_bytes], []
        is_over = asyncio.Event()

        async def ask(number: int) -> None:
            is_loop = number % 100 == 50
            code = "while True: pass" if is_loop else f"print({number})"
            result = await client.run(RunRequest(code=code, wall_s=wall_s))
            answered[number] += 1
            expected = (RunOutcome.TIMEOUT, "") if is_loop else (RunOutcome.STDOUT, f"{number}\n")
            if (result.outcome, result.text) != expected:
                wrong.append(f"{number}: {result}")

        async def look() -> None:
            while not is_over.is_set():
                started_at = time.monotonic()
                result = await other.run(RunRequest(code="print('other')"))
                waits.append(time.monotonic() - started_at)
                assert result.text == "other\n", result
                peaks.append(sum(map(memory, processes)))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(is_over.wait(), 0.5)

        started_at = time.monotonic()
        looker = asyncio.create_task(look())
        await asyncio.gather(*(ask(number) for number in range(num_calls)))
        taken = time.monotonic() - started_at
        is_over.set()
        await looker
    allowed = 1.5 * (num_loops * wall_s / num_slots + (num_calls - num_loops) / honest_rate)
    exact = len(answered) == num_calls and set(answered.values()) == {1} and not wrong
    figures = {
        "num_calls": num_calls,
        "num_loops": num_loops,
        "num_slots": num_slots,
        "honest_calls_per_s": honest_rate,
        "seconds": taken,
        "allowed_seconds": allowed,
        "wrong": wrong[:10],
        "service_mib_before": before_bytes / 2**20,
        "service_mib_peak": max(peaks) / 2**20,
        "other_client_s": {"median": statistics.median(waits), "max": max(waits), "num_calls": len(waits)},
    }
    name = "flood" if num_services == 1 else f"flood_{num_services}_services"
    most_mib = 1024 * num_services
    bars = {
        f"{name}_answered_once_and_right": {"value": exact, "bar": "== True", "holds": exact},
        f"{name}_seconds_over_allowed": {"value": taken / allowed, "bar": "<= 1", "holds": taken <= allowed},
        f"{name}_other_client_max_s": {"value": max(waits), "bar": "<= 2", "holds": max(waits) <= 2},
        f"{name}_memory_mib": {"value": max(peaks) / 2**20, "bar": f"<= {most_mib}", "holds": max(peaks) <= most_mib << 20},
    }
    title = f"{num_calls} calls at once to {num_services} services, 1% endless loops of {wall_s:.0f} s"
    table = Table("figure", "value", title=title)
    for name, value in figures.items():
        table.add_row(name, str(value))
    console.print(table)
    return figures, bars


def memory(process: psutil.Process) -> int:
    """Memory of the service with all it started, in bytes; pages that processes share are counted once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += one.memory_full_info().pss
    return total


async def verify(console: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """Answers through the whole service."""
    async with service("--warm", "verify") as (url, token, _), SandboxClient(url, token=token) as client:
        return await sandbox_verify.measure(console, client)


PARTS = {
    "throughput": throughput,
    "latency": latency,
    "flood": flood,
    "flood-2": partial(flood, num_services=2),
    "verify": verify,
    "scale": sandbox_scale.measure,
}


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    chosen = parser.parse_args().parts.split(",")
    console = Console(record=True, width=132)
    path = RESULTS / "sandbox.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() and set(chosen) != set(PARTS) else {}
    results = {"command": COMMAND, "bars": results.get("bars", {}), "figures": results.get("figures", {})}
    for name in chosen:
        results["figures"][name], bars = await PARTS[name](console)
        results["bars"] |= bars
    table = Table("bar", "value", "must be", "holds", title="Bars")
    for name, bar in results["bars"].items():
        table.add_row(
            name, f"{bar['value']:.3g}" if isinstance(bar["value"], float) else str(bar["value"]), bar["bar"], str(bar["holds"])
        )
    console.print(table)
    RESULTS.mkdir(exist_ok=True)
    write_json(path, results)
    write_text(RESULTS / "sandbox.txt", console.export_text())
    return 0 if all(bar["holds"] for bar in results["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
