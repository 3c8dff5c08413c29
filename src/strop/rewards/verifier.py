"""Judges whether a prediction equals the gold answer; what needs algebra is judged outside this process, under a deadline.

A pair that reaches its deadline is the policy's doing: it counts as not equal, with an outcome of its own, or a policy would
learn to hang the judge. A child that is lost is ours: the pair is tried again on a fresh one, then `MachineError` (law 3).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from dataclasses import dataclass
from enum import StrEnum

from strop.errors import DeadlineExceeded, MachineError
from strop.rewards.numbers import exact_match

_LOG = logging.getLogger(__name__)
_START_S = 120.0  # importing sympy on a busy machine
_GRACE_S = 1.0  # between the child's own alarm and its kill
_MAX_CHARS = 10_000
_NUM_TRIES = 2


class Verdict(StrEnum):
    """What became of one comparison."""

    EXACT = "exact"  # plain numbers or equal texts, compared here
    CORRECT = "correct"
    WRONG = "wrong"
    UNREADABLE = "unreadable"  # one of the two is no mathematics
    TIMEOUT = "timeout"

    @property
    def is_correct(self) -> bool:
        return self in (Verdict.EXACT, Verdict.CORRECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    gold: str
    prediction: str


class MathVerifier:
    """One persistent child, started when the first pair needs it. Pairs wait for each other, never for plain numbers.

    Belongs to the event loop in which it was first used. `close` ends the child; so does the end of this process.
    """

    def __init__(self, *, deadline_s: float = 2.0) -> None:
        self.deadline_s = deadline_s
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def verify(self, gold: str, prediction: str) -> Verdict:
        """Whether `prediction` equals `gold`, which come in this order: math_verify is not symmetric.

        Raises:
            MachineError: the child was lost twice on this pair, or could not be started.
        """
        is_equal = exact_match(gold, prediction)
        if is_equal is not None:
            return Verdict.EXACT if is_equal else Verdict.WRONG
        if len(prediction) > _MAX_CHARS:
            return Verdict.UNREADABLE
        async with self._turn:
            return await self._ask(_Pair(gold=gold, prediction=prediction))

    async def close(self) -> None:
        """End the child. Safe to call twice."""
        async with self._turn:
            await self._end_child()

    async def _ask(self, pair: _Pair) -> Verdict:
        request = {"gold": pair.gold, "prediction": pair.prediction, "deadline_s": self.deadline_s}
        for _ in range(_NUM_TRIES):
            child = await self._running_child()
            try:
                async with asyncio.timeout(self.deadline_s + _GRACE_S):
                    answer = await _exchange(child, json.dumps(request))
            except TimeoutError:
                await self._end_child()
                return Verdict.TIMEOUT
            except BaseException:  # a cancelled question leaves an answer that the next one would take for its own
                await self._end_child()
                raise
            if answer is not None:
                return Verdict(answer)
            _LOG.warning("the answer verifier's child was lost (exit code %s); starting another", child.returncode)
            await self._end_child()
        raise MachineError(
            f"the answer verifier was lost {_NUM_TRIES} times on one pair: {pair.gold!r}, {pair.prediction!r:.200}."
        )

    async def _running_child(self) -> asyncio.subprocess.Process:
        if self._child is None:
            # Not in this process's group: a terminal's Ctrl-C reaches the parent alone.
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "strop.rewards.verifier_child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
            try:
                async with asyncio.timeout(_START_S):
                    answer = await _read(self._child)
            except TimeoutError as error:
                await self._end_child()
                raise DeadlineExceeded(f"the answer verifier did not start within {_START_S} s.") from error
            except BaseException:
                await self._end_child()
                raise
            if answer is None:
                await self._end_child()
                raise MachineError(
                    f"the answer verifier ended before its first pair. Try it: {sys.executable} -m strop.rewards.verifier_child"
                )
        return self._child

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        await child.wait()
        if child.stdin is not None:  # else its pipe would be closed by the collector, after the event loop
            child.stdin.close()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await child.stdin.wait_closed()


async def _exchange(child: asyncio.subprocess.Process, line: str) -> str | None:
    """The child's answer to `line`; None when it is gone."""
    assert child.stdin is not None
    try:
        child.stdin.write(line.encode() + b"\n")
        await child.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        return None
    return await _read(child)


async def _read(child: asyncio.subprocess.Process) -> str | None:
    assert child.stdout is not None
    line = await child.stdout.readline()
    if not line.endswith(b"\n"):
        return None
    answer: str = json.loads(line)["verdict"]
    return answer
