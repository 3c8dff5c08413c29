r"""Judges pairs of answers with `math_verify`, one after the other, in a child that never ran a program.

The child may hang in any pair, inside C code that hears no signal, so nothing here keeps time: the supervisor does, from the
lines that it reads, and kills. A hang costs its whole limit either way; an alarm in here would only save the fork of the next
child, a hundredth of that, and leave half-filled caches behind.

    payload   a JSON list of [gold, answer]
    lines     `start`, then `<index> <verdict>` for each pair in order; the clock of a pair runs from the line before its own

Texts enter, indices and verdicts leave: neither answer is ever written anywhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from . import answers

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
    _read_faster()


def judge(payload: bytes, emit: Callable[[bytes], None]) -> None:
    """Emit a line as each verdict is known. Whatever a pair raises is that pair's, and it is unreadable.

    Args:
        emit: given one line, without its end, that must leave the process at once.
    """
    pairs = json.loads(payload)
    with contextlib.redirect_stdout(None):  # nothing that a library prints may look like a verdict
        emit(STARTED)
        for index, (gold, answer) in enumerate(pairs):
            try:
                verdict = compare(gold, answer)
            except Exception:  # MemoryError and RecursionError among them
                verdict = UNREADABLE
            emit(b"%d %s" % (index, verdict))


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


def _read_faster() -> None:
    """Have LaTeX parsed in two stages, and integers without a parser for Python: the same trees at less than half the cost."""
    import sympy
    from antlr4.atn.PredictionMode import PredictionMode
    from antlr4.error.Errors import ParseCancellationException
    from antlr4.error.ErrorStrategy import BailErrorStrategy
    from latex2sympy2_extended import latex2sympy2

    class Converter(latex2sympy2._Latex2Sympy):  # type: ignore[misc]
        def create_parser(self, latex: str) -> Any:
            # SLL prediction gives the tree of full LL, or a syntax error (the documentation of ANTLR's PredictionMode), for
            # the grammar reads to the end of its input. Only after an error the slow way decides.
            parser = super().create_parser(latex)
            parser._interp.predictionMode = PredictionMode.SLL
            parser._errHandler = BailErrorStrategy()
            try:
                tree = parser.math()
            except ParseCancellationException:
                tree = super().create_parser(latex).math()
            return SimpleNamespace(math=lambda: tree)

        def parse_number(self, text: str) -> Any:
            digits = text.replace(",", "")
            if digits.isascii() and digits.isdigit():
                return sympy.Integer(digits)
            return super().parse_number(text)

    latex2sympy2._Latex2Sympy = Converter
