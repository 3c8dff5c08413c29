"""Measures verification: real MATH answers against what policies write for them, in requests of 32 pairs, some of which hang.

Needs MATH-500 as JSON lines with an `answer`; STROP_DATA names the directory that holds math500/test.jsonl.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strop.rewards.base import AnswerService
from strop.sandbox import LocalSandbox, SandboxConfig
from strop.sandbox.protocol import AnswerPair, PairVerdict, VerifyRequest

DATA = Path(os.environ.get("STROP_DATA", Path(__file__).parents[2] / "shared" / "data"))
NUM_PAIRS, PAIRS_A_REQUEST = 2016, 32
HANGS = ("9^{9^{9^9}}", "(x+1)^{5000}")  # uninterruptible C code; algebra without an end in sight
PAIR_WALL_S = 1.0
IN_FLIGHT = 4  # requests
BAR = 600


def real_pairs() -> list[AnswerPair]:
    """`NUM_PAIRS` pairs in a fixed random order: equal texts, rewritten, reordered, as decimals, with a name, and wrong."""
    lines = (DATA / "math500" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    golds = [json.loads(line)["answer"] for line in lines]
    pairs = [
        AnswerPair(gold=gold, answer=answer)
        for number, gold in enumerate(golds)
        for answer in (*_written_otherwise(gold), golds[(7 * number + 3) % len(golds)])
    ]
    return random.Random(0).sample(pairs, NUM_PAIRS)


def _written_otherwise(gold: str) -> Iterator[str]:
    yield gold
    yield gold.replace(r"\frac", r"\dfrac").replace(r"\left", "").replace(r"\right", "").replace(" ", "")
    yield f"x = {gold}"
    if fraction := re.fullmatch(r"\\frac\{(-?\d+)\}\{(\d+)\}", gold):
        yield f"{fraction[1]}/{fraction[2]}"
        yield f"{int(fraction[1]) / int(fraction[2]):.6f}"
    elif "," in gold and re.fullmatch(r"[\d, -]+", gold):
        yield ", ".join(reversed(gold.split(",")))
    elif len(terms := re.split(r" ([+-]) ", gold)) == 3 and terms[1] == "+":
        yield f"{terms[2]} + {terms[0]}"


def with_hangs(pairs: Sequence[AnswerPair], num_hangs: int) -> list[AnswerPair]:
    """Some of `pairs`, evenly spread, replaced by pairs that hang."""
    mixed = list(pairs)
    for number in range(num_hangs):
        mixed[(2 * number + 1) * len(pairs) // (2 * num_hangs)] = AnswerPair(gold="3", answer=HANGS[number % len(HANGS)])
    return mixed


async def pairs_per_second(service: AnswerService, pairs: Sequence[AnswerPair]) -> tuple[float, Counter[PairVerdict]]:
    """The rate with `IN_FLIGHT` requests of `PAIRS_A_REQUEST` pairs at any time; how often each verdict was given."""
    starts = iter(range(0, len(pairs), PAIRS_A_REQUEST))
    verdicts: Counter[PairVerdict] = Counter()

    async def ask() -> None:
        for start in starts:
            request = VerifyRequest(pairs=tuple(pairs[start : start + PAIRS_A_REQUEST]), pair_wall_s=PAIR_WALL_S)
            async for _, verdict in service.verify(request):
                verdicts[verdict] += 1

    started_at = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
    return len(pairs) / (time.perf_counter() - started_at), verdicts


async def seconds_of_hang(service: AnswerService, hang: str) -> float:
    """How long a request takes of one pair that hangs, between two that do not."""
    fine = AnswerPair(gold="p - q", answer="-q + p")
    request = VerifyRequest(pairs=(fine, AnswerPair(gold="3", answer=hang), fine), pair_wall_s=PAIR_WALL_S)
    started_at = time.perf_counter()
    verdicts = {index: verdict async for index, verdict in service.verify(request)}
    assert [verdicts[index] for index in range(3)] == [PairVerdict.EQUAL, PairVerdict.TIMEOUT, PairVerdict.EQUAL]
    return time.perf_counter() - started_at


async def measure(console: Console, service: AnswerService | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rates by the number of hangs, and what one hang costs; of `service`, or of a node in this process."""
    async with contextlib.AsyncExitStack() as opened:
        if service is None:
            service = await opened.enter_async_context(LocalSandbox(SandboxConfig(warm=("verify",))))
        pairs = real_pairs()
        await pairs_per_second(service, pairs[: 4 * PAIRS_A_REQUEST])  # every fork server is up
        table = Table(
            "pairs that hang", "pairs/s", "bar", "verdicts", title=f"{NUM_PAIRS} pairs, {PAIR_WALL_S:g} s each at most"
        )
        rates = {}
        for num_hangs in (0, len(HANGS)):
            rates[num_hangs], verdicts = await pairs_per_second(service, with_hangs(pairs, num_hangs))
            assert verdicts.total() == NUM_PAIRS
            assert verdicts[PairVerdict.INTERNAL] == 0
            assert verdicts[PairVerdict.TIMEOUT] >= num_hangs
            said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
            table.add_row(str(num_hangs), f"{rates[num_hangs]:.0f}", str(BAR), said)
        console.print(table)
        over_s = {hang: await seconds_of_hang(service, hang) - PAIR_WALL_S for hang in HANGS}
    console.print(f"A hang costs its limit and {max(over_s.values()):.3f} s.")
    rate, worst = rates[len(HANGS)], max(over_s.values())
    bars = {
        "verify_pairs_per_s": {"value": rate, "bar": f">= {BAR}", "holds": rate >= BAR},
        "verify_hang_over_limit_s": {"value": worst, "bar": "<= 0.5", "holds": worst <= 0.5},
    }
    return {"pairs_per_s": {str(hangs): rate for hangs, rate in rates.items()}, "hang_over_limit_s": over_s}, bars


if __name__ == "__main__":
    asyncio.run(measure(Console()))
