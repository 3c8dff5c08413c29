r"""Compares pairs of answers with `math_verify`, and with sympy where requested, in a process where no program runs.

A comparison may hang inside C code that handles no signal, so this process keeps no time: its parent kills it at the pair's
deadline.

    payload   a JSON list of [gold, answer, *differences]; each difference is a pair of expressions for sympy
    lines     `start`, then `<index> <verdict>` for each pair in order

No answer is ever written anywhere.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import dr_grpo, kernel, latex

# Read now: the sandbox hides this folder. The first line is a comment.
_COMMON_ANSWERS = Path(__file__).with_name("answers.txt").read_text().splitlines()[1:]
STARTED = b"start"
_PLAIN_MEMORY_BYTES = 4 << 30  # of a plain process
EQUAL, UNEQUAL, UNREADABLE = b"equal", b"unequal", b"unreadable"


def prime() -> None:
    """`load`, and parse one answer of each common form: a form costs 10 to 144 ms the first time, 0.1 to 3 ms afterwards."""
    load()
    for line in _COMMON_ANSWERS:
        gold, _, answer = line.partition(" || ")
        if answer:
            compare(gold, answer)
            compare(gold, f"{answer}+1")
        else:
            _parse(gold)
    _parse.cache_clear()


def load() -> None:
    """Import everything and compare a first pair, which takes half a second."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    latex.read_faster()
    compare("x + 1", "x + 2")


def judge(payload: bytes, emit: Callable[[bytes], object]) -> None:
    """Emit a line as each verdict is known.

    Args:
        emit: given one line without its end, which must leave the process immediately.
    """
    pairs = json.loads(payload)
    with contextlib.redirect_stdout(None):  # output of a library must not look like a verdict
        emit(STARTED)
        for index, (gold, answer, *differences) in enumerate(pairs):
            emit(b"%d %s" % (index, judge_pair(gold, answer, differences)))


def judge_pair(
    gold: str | None, answer: str | None, differences: Sequence[Sequence[str]], is_fast: bool | None = None
) -> bytes:
    """EQUAL if sympy finds all `differences` (at least one) to be 0, else what `compare` says; without `gold`, UNEQUAL.

    With `is_fast`, only what the grader of Dr. GRPO says. A pair that raises an exception is UNREADABLE.
    """
    try:
        if is_fast is not None and gold is not None and answer is not None:
            return EQUAL if dr_grpo.is_equal(gold, answer, is_fast=is_fast) else UNEQUAL
        if _are_zero(differences):
            return EQUAL
        return UNEQUAL if gold is None or answer is None else compare(gold, answer)
    except Exception:  # including MemoryError and RecursionError
        return UNREADABLE


def _are_zero(differences: Sequence[Sequence[str]]) -> bool:
    """Whether there are some, and sympy can read them and finds all of them to be 0."""
    with contextlib.suppress(Exception):  # math_verify may read what sympy's grammar does not
        return bool(differences) and all(is_zero_difference(gold, answer) for gold, answer in differences)
    return False


def is_zero_difference(gold: str, answer: str) -> bool:
    """Whether sympy finds the difference of the two to be 0. May hang or exhaust memory; raises if it cannot read one."""
    import sympy
    from latex2sympy2_extended import latex2sympy

    return bool(sympy.simplify(latex2sympy(gold) - latex2sympy(answer)) == 0)


def compare(gold: str, answer: str) -> bytes:
    """What `math_verify` says of the two, in this order: it is not symmetric."""
    from math_verify import verify

    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if not parsed_gold or not parsed_answer:
        return UNREADABLE
    # math_verify's own time limits are off: they would make a timeout look like a wrong answer.
    return EQUAL if verify(parsed_gold, parsed_answer, timeout_seconds=None) else UNEQUAL


@lru_cache(maxsize=256)  # the attempts at one task share its gold answer, and often their own
def _parse(text: str) -> Any:
    from math_verify import parse

    return parse(rf"\boxed{{{text}}}", parsing_timeout=None)


def main() -> None:
    """Judge every line of stdin, in a plain process: [gold, answer, differences, is_fast (optional)] -> verdict."""
    if sys.platform == "linux":  # a loop inside C code does not notice the end of stdin
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes stdin
    resource.setrlimit(resource.RLIMIT_AS, (_PLAIN_MEMORY_BYTES, _PLAIN_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.dup(1)
    os.dup2(2, 1)  # output of a library must not look like an answer
    load()
    gc.freeze()
    os.write(answers, STARTED + b"\n")
    for line in sys.stdin.buffer:
        os.write(answers, judge_pair(*json.loads(line)) + b"\n")
