"""Compares answers in plain processes of this machine, for use without a code service: the same judge, not confined.

Answers are data that nothing here executes, so they need no sandbox, only processes that can be killed. Workers of `pebble` and
`concurrent.futures` import the user's main module again, and the latter cannot lose one worker without losing all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from strop.errors import DeadlineExceeded, MachineError
from strop.sandbox.inside import verify
from strop.sandbox.inside.verify import STARTED
from strop.sandbox.protocol import AnswerPair, PairVerdict, VerifyRequest
from strop.sandbox.supervisor.verification import CRASHES, VERDICTS, compare_exactly

_BOOT = str(Path(verify.__file__).with_name("boot.py"))
_START_S = 120.0  # importing sympy on a busy machine


class ProcessVerifier:
    """The `verify` of a `CodeService`, and its equivalents for plain code. Safe to use from any thread.

    Each of up to `max_processes` threads has one process, started by its first pair and again after a kill. A process compares
    one pair at a time. `close` ends the processes; so does the end of this one.
    """

    def __init__(self, *, max_processes: int = 2) -> None:
        self._threads = ThreadPoolExecutor(max_processes, thread_name_prefix="strop-verify")
        self._of_thread = threading.local()
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
            process = self._process()
            try:
                verdict = process.ask(question, wall_s)
            except TimeoutError:
                self._end(process)
                return PairVerdict.TIMEOUT
            if verdict in VERDICTS:
                return VERDICTS[verdict]
            if -self._end(process) in CRASHES:
                return PairVerdict.UNREADABLE
        return PairVerdict.INTERNAL

    def _process(self) -> _Process:
        """The process of this thread."""
        process: _Process | None = getattr(self._of_thread, "process", None)
        if process is not None:
            return process
        with self._lock:
            if self._is_closed:
                raise MachineError("the verifier was closed while it compared answers")
            process = _Process()
            self._processes.add(process)
        try:
            if process.read_line(_START_S) != STARTED:
                raise MachineError(
                    f"the process that compares answers did not start. Try it: {sys.executable} -P {_BOOT} verify"
                )
        except BaseException as error:
            self._end(process)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the process that compares answers did not start within {_START_S:.0f} s.") from error
            raise
        self._of_thread.process = process
        return process

    def _end(self, process: _Process) -> int:
        self._of_thread.process = None
        with self._lock:
            self._processes.discard(process)
        return process.end()


class _Process:
    """A process that runs `inside.verify`, and the pipes to it."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-P", _BOOT, "verify"],  # -P: do not import from the folder of the script
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C does not reach it
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        self.pid = self._popen.pid

    def ask(self, question: bytes, limit_s: float) -> bytes:
        """The answer; empty if the process is gone. Raises `TimeoutError`, and kills it then."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(question)
            self._popen.stdin.flush()
        except OSError:
            return b""
        return self.read_line(limit_s)

    def read_line(self, limit_s: float) -> bytes:
        """The next line; as `ask`."""
        assert self._popen.stdout is not None
        deadline, timer = time.monotonic() + limit_s, threading.Timer(limit_s, self.kill)
        timer.start()
        line: bytes = self._popen.stdout.readline()
        timer.cancel()
        if not line and time.monotonic() >= deadline:
            raise TimeoutError
        return line.rstrip(b"\n")

    def kill(self) -> None:
        self._popen.kill()

    def end(self) -> int:
        """Kill it if it is still running; its exit status, a signal as its negative. Safe to call twice."""
        self._popen.kill()  # the status of a process that ended by itself stays what it was
        status = self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        return status
