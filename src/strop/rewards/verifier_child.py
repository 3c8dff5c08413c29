"""Runs math_verify in a process of its own, one pair a line; started by `verifier.py`, and never imported by it.

Reads `{"gold": ..., "prediction": ..., "deadline_s": ...}` from stdin, answers `{"verdict": ...}` on stdout, ends with
stdin. A pair may make sympy compute for ever, or eat all memory: an alarm and a memory limit stop it from inside, and the
parent kills the process where these do not.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
from types import FrameType

MEMORY_BYTES = 4 << 30

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Expired(BaseException):
    """Not an `Exception`, for math_verify catches those and would call the pair unequal."""


def _expire(number: int, frame: FrameType | None) -> None:
    raise _Expired


def verdict(gold: str, prediction: str) -> str:
    """`correct`, `wrong` or `unreadable`, for the prediction's or the gold's own fault. The order of the two matters."""
    from math_verify import parse, verify

    # The limits of math_verify are off: they swallow what they stop, and a timeout must not look like a wrong answer.
    parsed_gold = parse(_as_latex(gold), parsing_timeout=None)
    parsed_prediction = parse(_as_latex(prediction), parsing_timeout=None)
    if not parsed_gold or not parsed_prediction:
        return "unreadable"
    return "correct" if verify(parsed_gold, parsed_prediction, timeout_seconds=None) else "wrong"


def _as_latex(text: str) -> str:
    return rf"\boxed{{{text}}}"


def judge(gold: str, prediction: str, *, deadline_s: float) -> str:
    """`verdict`, or `timeout` when it takes longer than `deadline_s` or more memory than there is."""
    try:
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        try:
            return verdict(gold, prediction)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (_Expired, MemoryError):
        return "timeout"
    except RecursionError:
        return "unreadable"


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies: a loop inside a C function hears neither alarm nor stdin."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _end_with_parent()
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _expire)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair, which closes stdin
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    verdict("1", "1")  # imports everything, before the first deadline runs
    print(json.dumps({"verdict": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = judge(request["gold"], request["prediction"], deadline_s=request["deadline_s"])
        print(json.dumps({"verdict": answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
