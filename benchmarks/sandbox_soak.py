"""Runs very many calls of all kinds through one service and compares what it holds early on with what it holds at the end.

Whatever a call leaves behind, be it a descriptor, a mount or a few kilobytes, shows after 100 000 of them. The service is
measured at rest after each tenth of the calls: the first makes every cache and fork server, so from there on all must be flat.
`make bench-sandbox-soak` prints a table and writes results/sandbox_soak.json; exits with 1 when a bar does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from sandbox import service
from strop.run_directory import write_json, write_text
from strop.sandbox import RunOutcome, RunRequest
from strop.sandbox.client import SandboxClient
from strop.sandbox.protocol import AnswerPair, PairVerdict, SessionLimits, VerifyRequest
from strop.sandbox.sandbox import Session

RESULTS = Path(__file__).parent / "results"
COMMAND = "make bench-sandbox-soak"
NUM_PARTS = 10  # at whose ends the service is measured
IN_FLIGHT = 64
REST_S, SAMPLES = 1.5, 5  # namespaces are freed late; a sample may meet a process that is just made
SEED = 0
# Growth from the first tenth on. Its allocator keeps some of what a crowd of calls needed, and that differs from time to time.
MAX_MIB = 24  # a leak of 0.3 KiB a call is more
KEPT_FACTOR = 1.5  # Python's objects take more than the bytes that are in them
MAX_DESCRIPTORS, MAX_PROCESSES, MAX_NAMESPACES, MAX_MOUNTS, MAX_FILES = 8, 2, 8, 64, 0  # a child that is just made has its own
_CELLS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a service holds at rest: itself, and all processes below it. Memory is without pages of files, each page once."""

    num_calls: int  # until then
    front_mib: float
    kept_mib: float  # of it, answers for clients that may ask again; it bounds them by age, number and size (64 MiB)
    others_mib: float
    num_descriptors: int
    num_processes: int
    num_namespaces: int
    num_mounts: int
    num_files: int  # in its TMPDIR
    num_shared: int  # in /dev/shm


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One kind of call; `{n}` in its texts is the number of the call."""

    share: float
    code: str
    outcome: RunOutcome
    text: str
    stdin: str = ""
    wall_s: float = 4.0


PROGRAMS = (
    Program(share=60, code="print({n})", outcome=RunOutcome.STDOUT, text="{n}\n"),
    Program(share=10, code="print(input() * 2)", stdin="{n}\n", outcome=RunOutcome.STDOUT, text="{n}{n}\n"),
    Program(share=8, code="[{n}]", outcome=RunOutcome.ECHO, text="[{n}]"),
    Program(share=6, code="raise SystemExit('{n}')", outcome=RunOutcome.ERROR, text="{n}\nThe program exited with code 1.\n"),
    Program(share=6, code="import numpy as np\nprint(np.arange(10).sum() + {n} - 45)", outcome=RunOutcome.STDOUT, text="{n}\n"),
    Program(share=3, code="open('f', 'w').write('x' * 2**20)\nprint({n})", outcome=RunOutcome.STDOUT, text="{n}\n"),
    Program(
        share=3,
        code="import os\nif os.fork(): print({n})\nelse:\n    while True: pass",
        outcome=RunOutcome.STDOUT,
        text="{n}\n",
    ),
    Program(
        share=2,
        code="import mmap\nm = mmap.mmap(-1, 2**24)\nm[:] = b'x' * 2**24\nprint({n})",
        outcome=RunOutcome.STDOUT,
        text="{n}\n",
    ),
    Program(share=1, code="print('x' * 100_000)", outcome=RunOutcome.STDOUT, text=""),
    Program(share=0.5, code="print({n}, flush=True)\nwhile True: pass", wall_s=0.5, outcome=RunOutcome.TIMEOUT, text=""),
    Program(share=0.5, code="import os\nos._exit({n} % 7 + 1)", outcome=RunOutcome.ERROR, text=""),
)


class Load:
    """Calls of all kinds; what came back wrong is kept."""

    def __init__(self, client: SandboxClient) -> None:
        self._client = client
        self._rng = random.Random(SEED)
        self.num_calls = self.num_cells = self.num_pairs = 0
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def play(self, num_calls: int) -> None:
        """So many programs and, beside them, sessions and comparisons."""
        numbers = iter(range(self.num_calls, self.num_calls + num_calls))
        is_over = asyncio.Event()
        beside = [asyncio.create_task(work(is_over)) for work in (self._keep_sessions, self._keep_verifying)]
        await asyncio.gather(*(self._ask(numbers) for _ in range(IN_FLIGHT)))
        is_over.set()
        await asyncio.gather(*beside)

    async def _ask(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            [program] = self._rng.choices(PROGRAMS, [program.share for program in PROGRAMS])
            code, stdin, text = (part.replace("{n}", str(number)) for part in (program.code, program.stdin, program.text))
            result = await self._client.run(RunRequest(code=code, stdin=stdin, wall_s=program.wall_s))
            self.num_calls += 1
            self.outcomes[result.outcome] += 1
            if result.outcome is not program.outcome or (text and result.text != text):
                self.wrong.append(f"{code!r}: {result}")

    async def _keep_sessions(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            async with await Session.open(self._client, SessionLimits(profile="bare")) as session:
                for number in range(_CELLS):
                    await self._check_cell(session, "n = globals().get('n', -1) + 1\nn", str(number))
                async with await session.fork() as branch:
                    await self._check_cell(branch, "n", str(_CELLS - 1))
            await asyncio.sleep(0.2)

    async def _check_cell(self, session: Session, code: str, text: str) -> None:
        result = await session.run(RunRequest(code=code))
        self.num_cells += 1
        if result.text != text:
            self.wrong.append(f"cell {code!r}: {result}")

    async def _keep_verifying(self, is_over: asyncio.Event) -> None:
        pairs = (
            AnswerPair(gold="\\frac{1}{2}", answer="0.5"),
            AnswerPair(gold="2", answer="3"),
            AnswerPair(gold="1", answer="9^{9^{9^9}}"),
        )
        expected = (PairVerdict.EQUAL, PairVerdict.UNEQUAL, PairVerdict.TIMEOUT)
        while not is_over.is_set():
            async for index, verdict in self._client.verify(VerifyRequest(pairs=pairs, pair_wall_s=0.5)):
                self.num_pairs += 1
                if verdict is not expected[index]:
                    self.wrong.append(f"{pairs[index]}: {verdict}")
            await asyncio.sleep(1.0)


async def hold(process: psutil.Process, url: str, token: str, temporary: Path, *, num_calls: int) -> Holding:
    """The median of a few looks, once it is at rest."""
    looks = []
    for _ in range(SAMPLES):
        await asyncio.sleep(REST_S / SAMPLES * (1 if looks else SAMPLES))
        looks.append(_look(process, url, token, temporary, num_calls))
    return Holding(**{name: statistics.median_low(getattr(look, name) for look in looks) for name in Holding.__slots__})


def _look(front: psutil.Process, url: str, token: str, temporary: Path, num_calls: int) -> Holding:
    memory_mib = {front.pid: _memory_mib(front.pid)}
    num_descriptors, namespaces, mounts = 0, set[str](), dict[str, int]()
    for process in [front, *front.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            memory_mib[process.pid] = _memory_mib(process.pid)
            num_descriptors += process.num_fds()
            own = {kind: os.readlink(f"/proc/{process.pid}/ns/{kind}") for kind in ("mnt", "pid", "net", "ipc", "uts", "user")}
            namespaces |= set(own.values())
            mounts[own["mnt"]] = Path(f"/proc/{process.pid}/mountinfo").read_bytes().count(b"\n")
    return Holding(
        num_calls=num_calls,
        front_mib=memory_mib[front.pid],
        kept_mib=_metric(url, token, "strop_sandbox_kept_bytes") / 2**20,
        others_mib=sum(memory_mib.values()) - memory_mib[front.pid],
        num_descriptors=num_descriptors,
        num_processes=len(memory_mib),
        num_namespaces=len(namespaces),
        num_mounts=sum(mounts.values()),
        num_files=sum(1 for _ in temporary.rglob("*")),
        num_shared=len(os.listdir("/dev/shm")),
    )


def _memory_mib(pid: int) -> float:
    """Without pages of files: how much of them counts depends on who else on the machine has mapped them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 2**10


def _metric(url: str, token: str, name: str) -> float:
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as reply:
        found = re.search(rf"^{name} (\S+)$", reply.read().decode(), re.MULTILINE)
    assert found, f"there is no metric {name}"
    return float(found[1])


def judge(held: list[Holding], load: Load) -> dict[str, Any]:
    """The bars: everything right, and at the end no more than after the first part."""
    first, last = held[0], held[-1]
    more_mib = last.front_mib + last.others_mib - first.front_mib - first.others_mib
    kept_mib = max(one.kept_mib for one in held) - first.kept_mib  # an allocator gives nothing back that was full once
    growth = {
        "memory_mib": (more_mib - KEPT_FACTOR * kept_mib, MAX_MIB),
        "descriptors": (last.num_descriptors - first.num_descriptors, MAX_DESCRIPTORS),
        "processes": (last.num_processes - first.num_processes, MAX_PROCESSES),
        "namespaces": (last.num_namespaces - first.num_namespaces, MAX_NAMESPACES),
        "mounts": (last.num_mounts - first.num_mounts, MAX_MOUNTS),
        "files": (last.num_files - first.num_files, MAX_FILES),
        "shared_memory_files": (last.num_shared - first.num_shared, MAX_FILES),
    }
    bars = {
        f"growth_{name}": {"value": more, "bar": f"<= {most}", "holds": more <= most} for name, (more, most) in growth.items()
    }
    return {"wrong_answers": {"value": len(load.wrong), "bar": "== 0", "holds": not load.wrong}} | bars


def report(console: Console, held: list[Holding], bars: dict[str, Any]) -> None:
    columns = (
        "calls",
        "front MiB",
        "kept MiB",
        "others MiB",
        "descriptors",
        "processes",
        "namespaces",
        "mounts",
        "files",
        "/dev/shm",
    )
    table = Table(*columns, title="What the service holds at rest")
    for one in held:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in asdict(one).values()))
    console.print(table)
    table = Table("bar", "value", "must be", "holds", title="Bars")
    for name, bar in bars.items():
        table.add_row(name, f"{bar['value']:.3g}", bar["bar"], str(bar["holds"]))
    console.print(table)


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the directory to write to")
    arguments = parser.parse_args()
    console = Console(record=True, width=132)
    held: list[Holding] = []
    seconds = 0.0
    with tempfile.TemporaryDirectory() as place:
        os.environ["TMPDIR"] = place  # the service's own, so that what it leaves there is seen
        async with service("--warm", "bare,numpy,verify") as (url, token, process), SandboxClient(url, token=token) as client:
            load = Load(client)
            for _ in range(NUM_PARTS):
                started_at = time.monotonic()
                await load.play(arguments.calls // NUM_PARTS)
                seconds += time.monotonic() - started_at
                held.append(await hold(process, url, token, Path(place), num_calls=load.num_calls))
    bars = judge(held, load)
    report(console, held, bars)
    results = {
        "command": COMMAND,
        "num_calls": load.num_calls,
        "num_cells": load.num_cells,
        "num_pairs": load.num_pairs,
        "seconds": seconds,
        "outcomes": dict(load.outcomes),
        "wrong": load.wrong[:10],
        "held": [asdict(one) for one in held],
        "bars": bars,
    }
    arguments.results.mkdir(exist_ok=True)
    write_json(arguments.results / "sandbox_soak.json", results)
    write_text(arguments.results / "sandbox_soak.txt", console.export_text())
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
