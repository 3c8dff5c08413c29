r"""Judges pairs of answers with `math_verify`, and sympy where asked, one after the other, where no program ever ran.

The child may hang in any pair, inside C code that hears no signal, so nothing here keeps time: the supervisor does, from the
lines that it reads, and kills. A hang costs its whole limit either way; an alarm in here would only save the fork of the next
child, a hundredth of that, and leave half-filled caches behind.

    payload   a JSON list of [gold, answer], with pairs of expressions behind them where sympy is asked about their differences
    lines     `start`, then `<index> <verdict>` for each pair in order; the clock of a pair runs from the line before its own

Texts enter, indices and verdicts leave: neither answer is ever written anywhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from . import answers, latex

STARTED = b"start"
EQUAL, UNEQUAL, UNREADABLE = b"equal", b"unequal", b"unreadable"


def prime() -> None:
    """`load`, and take the common paths once: a path costs 10 to 144 ms the first time, 0.1 to 3 ms ever after."""
    load()
    for form in answers.forms():
        _parse(form)
    for gold, answer in answers.comparisons():
        compare(gold, answer)
        compare(gold, f"{answer}+1")
    _parse.cache_clear()


def load() -> None:
    """Import everything, which takes a third of a second."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    latex.read_faster()


def judge(payload: bytes, emit: Callable[[bytes], None]) -> None:
    """Emit a line as each verdict is known. Whatever a pair raises is that pair's, and it is unreadable.

    Args:
        emit: given one line, without its end, that must leave the process at once.
    """
    pairs = json.loads(payload)
    with contextlib.redirect_stdout(None):  # nothing that a library prints may look like a verdict
        emit(STARTED)
        for index, (gold, answer, *differences) in enumerate(pairs):
            try:
                verdict = EQUAL if _are_zero(differences) else compare(gold, answer)
            except Exception:  # MemoryError and RecursionError among them
                verdict = UNREADABLE
            emit(b"%d %s" % (index, verdict))


def _are_zero(differences: Sequence[Sequence[str]]) -> bool:
    """Whether there are some, and sympy can read them, and finds all of them to be 0."""
    with contextlib.suppress(Exception):  # math_verify may read what sympy's grammar does not
        return bool(differences) and all(is_zero_difference(gold, answer) for gold, answer in differences)
    return False


def is_zero_difference(gold: str, answer: str) -> bool:
    """Whether sympy finds the difference of the two to be 0. May hang, and may take all memory; what it cannot read raises."""
    import sympy
    from latex2sympy2_extended import latex2sympy

    return bool(sympy.simplify(latex2sympy(gold) - latex2sympy(answer)) == 0)


def compare(gold: str, answer: str) -> bytes:
    """What `math_verify` says of the two, in this order: it is not symmetric."""
    from math_verify import verify

    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if not parsed_gold or not parsed_answer:
        return UNREADABLE
    # The limits of math_verify are off: they swallow what they stop, and a timeout must not look like a wrong answer.
    return EQUAL if verify(parsed_gold, parsed_answer, timeout_seconds=None) else UNEQUAL


@lru_cache(maxsize=256)  # the attempts at one task share its gold answer, and often their own
def _parse(text: str) -> Any:
    from math_verify import parse

    return parse(rf"\boxed{{{text}}}", parsing_timeout=None)
