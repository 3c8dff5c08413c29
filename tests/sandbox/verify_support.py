"""What tests of verification share: real processes, and real answers where they can be found."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from strop.sandbox.protocol import AnswerPair, VerifyRequest
from strop.sandbox.verify_process import ProcessVerifier

DATA = Path(os.environ.get("STROP_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
MATH = DATA / "math500" / "test.jsonl"
needs_math = pytest.mark.skipif(
    not MATH.is_file(), reason=f"no MATH-500 in {DATA}; set STROP_DATA to a directory that holds math500/test.jsonl"
)


def math_answers():
    return [json.loads(line)["answer"] for line in MATH.open(encoding="utf-8")]


def request_of(*pairs, pair_wall_s=20.0):
    """Of (gold, answer, *differences)."""
    made = tuple(AnswerPair(gold=gold, answer=answer, differences=tuple(more)) for gold, answer, *more in pairs)
    return VerifyRequest(pairs=made, pair_wall_s=pair_wall_s)


async def in_order(verdicts):
    """The verdicts by index; every index must have come once."""
    found = [each async for each in verdicts]
    assert sorted(index for index, _ in found) == list(range(len(found)))
    return [verdict for _, verdict in sorted(found)]


def judge(*pairs, pair_wall_s=20.0):
    """The verdict on each (gold, answer, *differences), by real processes."""

    async def run():
        verifier = ProcessVerifier()
        try:
            return await in_order(verifier.verify(request_of(*pairs, pair_wall_s=pair_wall_s)))
        finally:
            await verifier.close()

    return asyncio.run(run())


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
