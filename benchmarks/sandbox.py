"""Measures the whole code service, client -> HTTP -> queue -> child -> reply, against the limit of a bare isolated fork.

The load generator runs on the same cores as the service. Everything that is compared was measured in this run, interleaved;
prints tables and writes results/sandbox.json. `make bench-sandbox` runs all parts but `flood-nodes`, which needs root and
iproute2 and is one of `make bench-cluster`; `--parts throughput,latency` runs some of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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

from strop.cluster.start import LocalNode
from strop.run_directory import write_json, write_text
from strop.sandbox import RunOutcome, RunRequest
from strop.sandbox.client import SandboxClient

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from networks import Machines

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
async def service(*arguments: str, node: LocalNode | None = None) -> AsyncIterator[tuple[str, str, psutil.Process]]:
    """The address, the token and the process of a service that was started as a user would, on `node` if there is one."""
    token = "benchmark-only-token"
    with tempfile.TemporaryDirectory() as directory:
        token_file = Path(directory) / "token"
        token_file.write_text(token)
        command = [sys.executable, "-m", "strop.cli", "sandbox", "serve", "--port", "0", "--token-file", str(token_file)]
        where = () if node is None else node.prefix
        command += () if node is None else ("--host", node.address)
        process = await asyncio.create_subprocess_exec(*where, *command, *arguments, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            url = ""
            while not url:
                line = (await asyncio.wait_for(process.stdout.readline(), 300)).decode()
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


async def flood(
    console: Console, *, num_calls: int = 45_000, num_services: int = 1, machines: Machines | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All calls offered at once by one client, 1% of them endless loops; a client in another process asks now and then.

    Args:
        machines: where the services run, one on each; None: this one.
    """
    wall_s, num_loops = 1.0, num_calls // 100
    num_slots = 2 * NUM_CORES * num_services
    async with contextlib.AsyncExitStack() as opened:
        nodes = [None] * num_services if machines is None else machines.nodes
        services = [await opened.enter_async_context(service(node=node)) for node in nodes]
        urls, [token, *_], processes = zip(*services, strict=True)
        client = await opened.enter_async_context(SandboxClient(urls, token=token, client="flood"))
        await client.health()
        honest_rate = await rate(client, LOADS[0], 5.0)
        before_bytes = sum(map(memory, processes))
        answered: Counter[int] = Counter()
        latencies: list[float] = []
        wrong: list[str] = []
        peaks, lags = [before_bytes], [0.0]

        async def ask(number: int) -> None:
            is_loop = number % 100 == 50
            code = "while True: pass" if is_loop else f"print({number})"
            result = await client.run(RunRequest(code=code, wall_s=wall_s))
            answered[number] += 1
            if not is_loop:
                latencies.append(time.monotonic() - started_at)
            expected = (RunOutcome.TIMEOUT, "") if is_loop else (RunOutcome.STDOUT, f"{number}\n")
            if (result.outcome, result.text) != expected:
                wrong.append(f"{number}: {result}")

        async def look() -> None:
            while True:
                peaks.append(await asyncio.to_thread(lambda: sum(map(memory, processes))))
                due_at = time.monotonic() + 0.5
                await asyncio.sleep(0.5)
                lags.append(time.monotonic() - due_at)

        other = await opened.enter_async_context(other_client(urls, token))
        started_at = time.monotonic()
        looker = asyncio.create_task(look())
        await asyncio.gather(*(ask(number) for number in range(num_calls)))
        taken = time.monotonic() - started_at
        looker.cancel()
        waits = await other()
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
        "latency_s": {"first": min(latencies), "median": statistics.median(latencies), "last": max(latencies)},
        "other_client_s": {"median": statistics.median(waits), "max": max(waits), "num_calls": len(waits)},
        "flooding_process_lag_max_s": max(lags),
        "load_average": os.getloadavg()[0],
    }
    name = "flood" if num_services == 1 else f"flood_{num_services}_{'services' if machines is None else 'nodes'}"
    most_mib = 1024 * num_services
    bars = {
        f"{name}_answered_once_and_right": {"value": exact, "bar": "== True", "holds": exact},
        f"{name}_seconds_over_allowed": {"value": taken / allowed, "bar": "<= 1", "holds": taken <= allowed},
        f"{name}_other_client_max_s": {"value": max(waits), "bar": "<= 2", "holds": max(waits) <= 2},
        f"{name}_memory_mib": {"value": max(peaks) / 2**20, "bar": f"<= {most_mib}", "holds": max(peaks) <= most_mib << 20},
    }
    title = f"{num_calls} calls at once to {num_services} services, 1% endless loops of {wall_s:.0f} s"
    table = Table("figure", "value", title=title)
    for key, value in figures.items():
        table.add_row(key, str(value))
    console.print(table)
    return figures, bars


async def flood_nodes(console: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flood over two services on two machines in network namespaces of their own."""
    with Machines(2) as machines:
        machines.join("198.18.0.254")
        return await flood(console, num_services=2, machines=machines)


@contextlib.asynccontextmanager
async def other_client(urls: Sequence[str], token: str) -> AsyncIterator[Callable[[], Awaitable[list[float]]]]:
    """A client in another process that asks now and then. What this yields ends it, and returns the seconds of its calls."""
    context = multiprocessing.get_context("spawn")
    is_ready, is_over, answers = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=be_other_client, args=(urls, token, is_ready, is_over, answers), daemon=True)
    process.start()
    await asyncio.to_thread(is_ready.wait)

    async def end() -> list[float]:
        is_over.set()
        waits: list[float] = await asyncio.to_thread(answers.get)
        return waits

    try:
        yield end
    finally:
        process.terminate()


def be_other_client(urls: Sequence[str], token: str, is_ready: Any, is_over: Any, answers: Any) -> None:
    """Ask one after another, half a second apart, and answer with the seconds of each call."""

    async def ask() -> None:
        waits: list[float] = []
        async with SandboxClient(urls, token=token, client="other") as other:
            await other.run(RunRequest(code="print('other')"))
            is_ready.set()
            while not is_over.is_set():
                started_at = time.monotonic()
                result = await other.run(RunRequest(code="print('other')"))
                waits.append(time.monotonic() - started_at)
                assert result.text == "other\n", result
                await asyncio.sleep(0.5)
        answers.put(waits)

    asyncio.run(ask())


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
    "flood-nodes": flood_nodes,
    "verify": verify,
    "scale": sandbox_scale.measure,
}


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    of_this_machine = [name for name in PARTS if name != "flood-nodes"]
    parser.add_argument("--parts", default=",".join(of_this_machine), help=f"some of {', '.join(PARTS)}")
    chosen = parser.parse_args().parts.split(",")
    console = Console(record=True, width=132)
    path = RESULTS / "sandbox.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
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
