"""What tests of verification share: real processes, and real answers where they can be found."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from strop.sandbox.node import verification
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


def judge(*pairs, pair_wall_s=20.0, handle=lambda child: child, batch_size=32):
    """The verdict on each (gold, answer, *differences), by real processes; `handle` may stand between child and supervisor."""

    async def run():
        verifier = ProcessVerifier()

        async def start_child():
            return handle(await verifier.start_child())

        try:
            request = request_of(*pairs, pair_wall_s=pair_wall_s)
            return await in_order(verification.verify(start_child, request, batch_size=batch_size))
        finally:
            await verifier.close()

    return asyncio.run(run())


class Watched:
    """A child that keeps what it said, and is sent a signal as soon as it has said so many lines."""

    said: list

    def __init__(self, child, *, signal_number=0, after_lines=-1, pids=None):
        self.child, self.signal_number, self.after_lines = child, signal_number, after_lines
        self.said, self.payloads = [], []
        self.pid = child.pid
        if pids is not None:
            pids.append(self.pid)

    def send(self, payload):
        self.payloads.append(payload)
        self._signal_if_due()
        self.child.send(payload)

    async def lines(self):
        async for line in self.child.lines():
            self.said.append(line)
            self._signal_if_due()
            yield line

    async def ended(self):
        return await self.child.ended()

    def kill(self):
        self.child.kill()

    def _signal_if_due(self):
        if self.signal_number and len(self.said) == self.after_lines:
            os.kill(self.pid, self.signal_number)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


SIGKILL, SIGSEGV = signal.SIGKILL, signal.SIGSEGV
