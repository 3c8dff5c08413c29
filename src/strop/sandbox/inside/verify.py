r"""Judges pairs of answers by `math_verify`, sympy or the grader of Dr. GRPO, in a process where no program runs.

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
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import dr_grpo, kernel

# Read now: the sandbox hides this folder. The first line is a comment.
_COMMON_ANSWERS = Path(__file__).with_name("answers.txt").read_text().splitlines()[1:]
# The one rule whose decision needs its context in answers like x^3+3x; full LL everywhere costs ten times as much.
_RULE_IN_CONTEXT = "atom_expr"
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
    _read_faster()
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
        with contextlib.suppress(Exception):  # math_verify may read what sympy's grammar does not
            if differences and all(is_zero_difference(*pair) for pair in differences):
                return EQUAL
        return UNEQUAL if gold is None or answer is None else compare(gold, answer)
    except Exception:  # including MemoryError and RecursionError
        return UNREADABLE


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


def _read_faster() -> None:
    """Make `math_verify` read LaTeX several times faster in this process, to the same trees.

    Nearly all of its time goes into ANTLR's full LL prediction, whose results no cache keeps. SLL prediction is cached, and
    gives the same tree or a syntax error (the documentation of ANTLR's PredictionMode; it holds for grammars that read to the
    end of the input, as this one does). The same is true of any mixture of the two, decision by decision: where SLL decides
    otherwise than LL would, the input cannot be read that way. So the cheap way comes first, and only a syntax error leads to
    the next.
    """
    import sympy
    from antlr4.atn.PredictionMode import PredictionMode
    from antlr4.error.Errors import ParseCancellationException
    from antlr4.error.ErrorStrategy import BailErrorStrategy
    from latex2sympy2_extended import latex2sympy2

    class Converter(latex2sympy2._Latex2Sympy):  # type: ignore[misc]
        def create_parser(self, latex: str) -> Any:
            tree = self._try(latex, ()) or self._try(latex, decisions) or super().create_parser(latex).math()
            return SimpleNamespace(math=lambda: tree)

        def _try(self, latex: str, in_context: Collection[int]) -> Any:
            """The tree, by LL prediction of the decisions `in_context` and SLL prediction of others; None after an error."""
            parser = super().create_parser(latex)
            parser._errHandler = BailErrorStrategy()
            simulator, predict = parser._interp, parser._interp.adaptivePredict

            def predict_by_mode(tokens: Any, decision: int, context: Any) -> Any:
                simulator.predictionMode = PredictionMode.LL if decision in in_context else PredictionMode.SLL
                return predict(tokens, decision, context)

            simulator.adaptivePredict = predict_by_mode
            try:
                return parser.math()
            except ParseCancellationException:
                return None

        def parse_number(self, text: str) -> Any:
            digits = text.replace(",", "")
            if digits.isascii() and digits.isdigit():
                return sympy.Integer(digits)  # else sympy would have Python parse it, in a namespace made for that one number
            return super().parse_number(text)

    parser_class = latex2sympy2.PSParser
    decisions = {
        number
        for number, state in enumerate(parser_class.atn.decisionToState)
        if parser_class.ruleNames[state.ruleIndex] == _RULE_IN_CONTEXT
    }
    latex2sympy2._Latex2Sympy = Converter


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
