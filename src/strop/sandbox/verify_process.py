"""Compares answers, each pair within its deadline: in confined children of a code service, or in plain processes without one.

The parent's half of `inside/verify.py`. Equal texts and plain numbers are compared here, exactly; the other pairs go to a
process. A pair at its deadline is TIMEOUT, a pair that crashes the interpreter is UNREADABLE, and the rest goes to another
process. A pair whose process is lost for another reason is judged again, and is INTERNAL after the second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from strop.answer_text import exact_match
from strop.errors import DeadlineExceeded, MachineError
from strop.sandbox.inside import verify as inside_verify
from strop.sandbox.inside import wire
from strop.sandbox.inside.verify import EQUAL, STARTED, UNEQUAL, UNREADABLE
from strop.sandbox.protocol import AnswerPair, PairVerdict, VerifyRequest

if TYPE_CHECKING:
    from strop.sandbox.supervisor.processes import Child


MAX_CHARS = 10_000  # of one answer; a longer one is not read
VERDICTS = {EQUAL: PairVerdict.EQUAL, UNEQUAL: PairVerdict.UNEQUAL, UNREADABLE: PairVerdict.UNREADABLE}
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals that a process raises by its own instructions."""

_START_S = 10.0  # of a child: from the payload to the first line
_START_PLAIN_S = 120.0  # of a plain process: importing sympy on a busy machine
_DEATH_LIMIT_S = 2.0  # of a killed child; its fork server, which has not reported it by then, is given up
_GRACE_S = 0.05  # a supervisor that was suspended itself finds the verdict when it resumes
_MEMORY_BYTES = 1 << 30
_CPU_S = 3_600  # each pair has its own deadline
_BOOT = str(Path(inside_verify.__file__).with_name("boot.py"))


async def verify(
    start_child: Callable[[], Awaitable[VerifyChild]], request: VerifyRequest
) -> AsyncGenerator[tuple[int, PairVerdict]]:
    """Yield (index of the pair, its verdict) as each is known, every index once. No child outlives the iterator.

    Args:
        start_child: waits until there is room for one more child.

    Raises:
        MachineError: no child could be started.
    """
    left = []
    for index, pair in enumerate(request.pairs):
        verdict = compare_exactly(pair)
        if verdict is None:
            left.append((index, pair))
        else:
            yield index, verdict
    lost_at = -1
    while left:
        child = await start_child()
        try:
            async with contextlib.aclosing(child.judge([pair for _, pair in left], request.pair_wall_s)) as verdicts:
                async for verdict in verdicts:
                    yield left.pop(0)[0], verdict
        finally:
            stopped_by = await child.end()
        if not left:
            return
        if stopped_by is None and lost_at != left[0][0]:
            lost_at = left[0][0]
            continue
        # If a second child does not even start, neither would a third: that says nothing about the first pair.
        blamed = left[:1] if child.has_started else left
        left = left[len(blamed) :]
        for index, _ in blamed:
            yield index, stopped_by or PairVerdict.INTERNAL


def compare_exactly(pair: AnswerPair) -> PairVerdict | None:
    """The verdict on equal texts, plain numbers and too long answers; None for all others."""
    if len(pair.gold) > MAX_CHARS or len(pair.answer) > MAX_CHARS:
        return PairVerdict.UNREADABLE
    is_equal = exact_match(pair.gold, pair.answer)
    return None if is_equal is None else PairVerdict.EQUAL if is_equal else PairVerdict.UNEQUAL


class VerifyChild:
    """A child with the confinement of a program, from a fork server of the profile `verify`, where no program runs.

    Args:
        on_end: called once when it has ended; releases its slot.
    """

    def __init__(self, child: Child, on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._child, self._on_end = child, on_end
        self._rest = b""
        self._is_ready = self._is_late = self.has_started = False
        self._ended = asyncio.Event()
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()  # what it emits, line by line; None at its end

    async def judge(self, pairs: Sequence[AnswerPair], pair_wall_s: float) -> AsyncGenerator[PairVerdict]:
        """Yield the verdicts in order, until it is done, gone, or late with one."""
        payload = json.dumps([[pair.gold, pair.answer, *pair.differences] for pair in pairs]).encode()
        work = wire.WORK.pack(wire.JOB_VERIFY, 0, _MEMORY_BYTES, _CPU_S, 32, 1, len(payload), 0)
        self._loop.add_reader(self._child.output, self._read)
        self._child.give(work + payload, self._end)
        try:
            self.has_started = await self._next_line(_START_S) == STARTED
            for number in range(len(pairs) if self.has_started else 0):
                index, _, word = (await self._next_line(pair_wall_s) or b"").partition(b" ")
                if index != b"%d" % number or word not in VERDICTS:
                    return
                yield VERDICTS[word]
        except TimeoutError:
            self._is_late = self.has_started

    async def end(self) -> PairVerdict | None:
        """Kill it. Returns the verdict on the pair that it did not judge; None if it was lost for another reason."""
        self._child.kill()
        try:
            await asyncio.wait_for(self._ended.wait(), _DEATH_LIMIT_S)
        except TimeoutError:
            self._child.abandon()
            await self._ended.wait()
        if self._is_late:
            return PairVerdict.TIMEOUT
        has_crashed = self._child.ended is not None and self._child.ended.signal in CRASHES
        return PairVerdict.UNREADABLE if has_crashed and self.has_started else None

    async def _next_line(self, limit_s: float) -> bytes | None:
        """Raises `TimeoutError`."""
        try:
            return await asyncio.wait_for(self._lines.get(), limit_s)
        except TimeoutError:
            await asyncio.sleep(_GRACE_S)
            if self._lines.empty():
                raise
            return self._lines.get_nowait()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self._child.output, 65_536)
            if not part:
                self._loop.remove_reader(self._child.output)
            if not self._is_ready and part:
                self._is_ready, part = True, part.removeprefix(wire.READY)
            *lines, self._rest = (self._rest + part).split(b"\n")
            for line in lines:
                self._lines.put_nowait(line)

    def _end(self) -> None:
        self._read()  # the pipe may still hold its last lines
        self._loop.remove_reader(self._child.output)
        self._lines.put_nowait(None)
        self._ended.set()
        self._child.close()
        self._on_end()


class ProcessVerifier:
    """Plain processes: the `verify` of a `CodeService`, and its equivalents for plain code. Safe to use from any thread.

    Answers are data that nothing here executes, so they need no sandbox, only processes that can be killed. Workers of `pebble`
    and `concurrent.futures` import the user's main module again, and the latter cannot lose one worker without losing all.

    At most `max_processes` run, each started when no other is idle. A process compares one pair at a time. `close` ends the
    processes; so does the end of this one.
    """

    def __init__(self, *, max_processes: int = 2) -> None:
        self._threads = ThreadPoolExecutor(max_processes, thread_name_prefix="strop-verify")
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._processes: set[_Process] = set()
        self._is_closed = False

    async def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        """As `CodeService.verify`. A pair that is being compared when the iterator is closed runs until its deadline."""

        async def judge(index: int, pair: AnswerPair) -> tuple[int, PairVerdict]:
            verdict = compare_exactly(pair)
            if verdict is None:
                question = [pair.gold, pair.answer, pair.differences]
                verdict = await asyncio.wrap_future(self._submit(question, request.pair_wall_s))
            return index, verdict

        judging = [asyncio.create_task(judge(index, pair)) for index, pair in enumerate(request.pairs)]
        try:
            for judged in asyncio.as_completed(judging):
                yield await judged
        finally:
            for each in judging:
                each.cancel()
            await asyncio.gather(*judging, return_exceptions=True)

    def compare(self, gold: str, answer: str, *, wall_s: float) -> PairVerdict:
        """What `math_verify` says. Blocks. Raises `MachineError` if no process can be started."""
        return self._submit([gold, answer, ()], wall_s).result()

    def are_zero(self, differences: Sequence[tuple[str, str]], *, wall_s: float) -> PairVerdict:
        """EQUAL if sympy finds every difference to be 0. Blocks. Raises as `compare`."""
        return self._submit([None, None, differences], wall_s).result()

    def compare_as_dr_grpo(self, gold: str, answer: str, *, is_fast: bool, wall_s: float) -> PairVerdict:
        """What the grader of Dr. GRPO says; needs pylatexenc. Blocks. Raises as `compare`."""
        return self._submit([gold, answer, (), is_fast], wall_s).result()

    async def close(self) -> None:
        """End all processes; pairs that are being compared raise `MachineError`. Safe to call twice."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """As `close`, for plain code."""
        with self._lock:
            self._is_closed = True
            for process in self._processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        while self._processes:
            self._processes.pop().end()

    def _submit(self, question: Sequence[object], wall_s: float) -> Future[PairVerdict]:
        if self._is_closed:
            raise MachineError("the verifier was closed; answers came after that")
        return self._threads.submit(self._judge, json.dumps(question).encode() + b"\n", wall_s)

    def _judge(self, question: bytes, wall_s: float) -> PairVerdict:
        for _ in range(2):
            process = self._take()
            try:
                verdict = process.ask(question, wall_s)
            except TimeoutError:
                self._end(process)
                return PairVerdict.TIMEOUT
            if verdict in VERDICTS:
                self._idle.append(process)
                return VERDICTS[verdict]
            if -self._end(process) in CRASHES:
                return PairVerdict.UNREADABLE
        return PairVerdict.INTERNAL

    def _take(self) -> _Process:
        """An idle process, or a new one."""
        with self._lock:
            if self._is_closed:
                raise MachineError("the verifier was closed while it compared answers")
            if self._idle:
                return self._idle.pop()
            process = _Process()
            self._processes.add(process)
        try:
            if process.read_line(_START_PLAIN_S) != STARTED:
                raise MachineError(
                    f"the process that compares answers did not start. Try it: {sys.executable} -P {_BOOT} verify"
                )
        except BaseException as error:
            self._end(process)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"the process that compares answers did not start within {_START_PLAIN_S:.0f} s."
                ) from error
            raise
        return process

    def _end(self, process: _Process) -> int:
        with self._lock:
            self._processes.discard(process)
        return process.end()


class _Process(subprocess.Popen[bytes]):
    """A process that runs `inside.verify`."""

    def __init__(self) -> None:
        super().__init__(
            [sys.executable, "-P", _BOOT, "verify"],  # -P: do not import from the folder of the script
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C does not reach it
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )

    def ask(self, question: bytes, limit_s: float) -> bytes:
        """The answer; empty if the process is gone. Raises `TimeoutError`, and kills it then."""
        assert self.stdin is not None
        try:
            self.stdin.write(question)
            self.stdin.flush()
        except OSError:
            return b""
        return self.read_line(limit_s)

    def read_line(self, limit_s: float) -> bytes:
        """The next line; as `ask`."""
        assert self.stdout is not None
        deadline, timer = time.monotonic() + limit_s, threading.Timer(limit_s, self.kill)
        timer.start()
        line = self.stdout.readline()
        timer.cancel()
        if not line and time.monotonic() >= deadline:
            raise TimeoutError
        return line.rstrip(b"\n")

    def end(self) -> int:
        """Kill it if it is still running; its exit status, a signal as its negative. Safe to call twice."""
        self.kill()  # the status of a process that ended by itself stays what it was
        self.communicate()  # closes the pipes
        return self.returncode
