"""Compares answers from plain code, under a deadline: one process for all calls of this one, killed when a pair hangs it.

`MathVerifier` is the same for code that runs in an event loop; it compares many pairs at once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from enum import StrEnum

from strop.errors import DeadlineExceeded, MachineError
from strop.rewards.grading_child import READY
from strop.sandbox.inside.verify import EQUAL

_START_S = 120.0  # importing sympy on a busy machine
_MODULE = "strop.rewards.grading_child"
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


class How(StrEnum):
    """By what a pair is compared."""

    ALGEBRA = "algebra"  # `grading.equal_by_algebra`
    MATH_VERIFY = "math_verify"


class GradingProcess:
    """Any thread may ask it; one pair at a time is compared. Started by the first question, and again after a kill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def is_equal(self, gold: str, answer: str, how: How, *, limit_s: float) -> bool:
        """Whether the two are equal. A pair that is no mathematics, reaches the limit or takes all memory is not.

        Raises:
            MachineError: the process does not start, or was lost twice through no fault of the pair.
        """
        question = json.dumps([limit_s, how, gold, answer]).encode() + b"\n"
        with self._lock:
            for _ in range(2):
                try:
                    verdict = self._ask(question, limit_s)
                except TimeoutError:
                    self._end()
                    return False
                except BaseException:  # Ctrl-C among them: a verdict that comes later must not answer the next question
                    self._end()
                    raise
                if verdict is not None:
                    return verdict == EQUAL
                if -self._end(wait_s=1.0) in _CRASHES:
                    return False
        raise MachineError("the process that compares answers was lost twice on one pair.")

    def close(self) -> None:
        """End the process. Safe to call twice; a question after it starts another one."""
        with self._lock:
            self._end()

    def _ask(self, question: bytes, limit_s: float) -> bytes | None:
        """The verdict; None when the process is gone. Raises `TimeoutError`."""
        if self._child is None or self._child.poll() is not None:
            self._start()
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(question)
        except OSError:
            return None
        return self._read_line(limit_s)

    def _start(self) -> None:
        self._end()
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],  # -P: the working directory is no place to import from
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        try:
            line = self._read_line(_START_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the process that compares answers did not start within {_START_S:.0f} s.") from error
        if line != READY:
            raise MachineError(f"the process that compares answers did not start. Try it: {sys.executable} -P -m {_MODULE}")

    def _read_line(self, limit_s: float) -> bytes | None:
        assert self._child is not None
        assert self._child.stdout is not None
        poll = select.poll()  # not select(), which takes no descriptor above 1023
        poll.register(self._child.stdout, select.POLLIN)
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(self._child.stdout.fileno(), 65_536)
            if not part:
                return None
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end(self, *, wait_s: float = 0.0) -> int:
        """Kill it, unless it ends by itself in time, and give its exit status, a signal as its negative."""
        child, self._child, self._unread = self._child, None, b""
        if child is None:
            return 0
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            return child.wait(wait_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


_of_process: dict[int, GradingProcess] = {}


def grading_process() -> GradingProcess:
    """The one of this process; a fork of it has its own, so that two never read from one pipe."""
    return _of_process.setdefault(os.getpid(), GradingProcess())


@atexit.register
def _close() -> None:
    if (process := _of_process.get(os.getpid())) is not None:
        process.close()
