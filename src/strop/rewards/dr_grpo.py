"""The judge `dr_grpo`, and the process of this machine in which answers are compared without a code service."""

from __future__ import annotations

import atexit
import importlib.util
import os
from collections.abc import Callable

from strop.errors import MachineError, UserError
from strop.sandbox.protocol import PairVerdict
from strop.sandbox.verify_process import ProcessVerifier
from strop.tasks.boxes import BOX, last_box

LIMIT_S = 1.0  # of one comparison
_MAX_CHARS = 4_000  # of one answer; a longer one is not read


def is_equal_to_dr_grpo(gold: str, answer: str, *, is_fast: bool) -> bool:
    """Whether the grader of Dr. GRPO accepts `answer`; see `strop.sandbox.inside.dr_grpo`. Blocks, for `LIMIT_S` at most.

    Args:
        gold: if it has a box, the inside of the last one counts.
        is_fast: without math_verify.

    Raises:
        UserError: pylatexenc is not installed.
        MachineError: answers cannot be compared on this machine.
    """
    need_pylatexenc()
    wanted = last_box(gold) if BOX in gold else gold
    if wanted is None or max(len(wanted), len(answer)) > _MAX_CHARS:
        return False
    if wanted == answer:
        return True
    return ask(lambda at, limit_s: at.compare_as_dr_grpo(wanted, answer, is_fast=is_fast, wall_s=limit_s))


def need_pylatexenc() -> None:
    """Raises `UserError` if it is not installed."""
    if importlib.util.find_spec("pylatexenc") is None:
        raise UserError("judge = 'dr_grpo' needs the library pylatexenc: pip install 'strop[cs336]'.")


def ask(question: Callable[[ProcessVerifier, float], PairVerdict]) -> bool:
    """Whether the process finds two answers equal; at its deadline, the second argument, it does not. Raises `MachineError`."""
    verdict = question(_verifiers.setdefault(os.getpid(), ProcessVerifier(max_processes=1)), LIMIT_S)
    if verdict is PairVerdict.INTERNAL:
        raise MachineError("the process that compares answers was lost twice on one pair.")
    return verdict is PairVerdict.EQUAL


_verifiers: dict[int, ProcessVerifier] = {}  # by process id: a forked process must not use its parent's


@atexit.register
def _close() -> None:
    if (verifier := _verifiers.pop(os.getpid(), None)) is not None:
        verifier.close_now()
