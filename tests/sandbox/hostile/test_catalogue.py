"""Every hostile program at every level, by each kind of user that may start the sandbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from strop.sandbox import IsolationLevel

from .case import CONFINED, NAMESPACES, STRICT, Case
from .cases import CASES
from .contexts import Context, Player

# The levels that each can give, best first; a container with default settings allows no namespaces.
_LEVELS = {
    Context.AS_WE_ARE: (STRICT, NAMESPACES, CONFINED),
    Context.UNPRIVILEGED: (NAMESPACES, CONFINED),
    Context.CONTAINER: (CONFINED,),
}


def _plays(case: Case, context: Context, level: IsolationLevel) -> bool:
    """Every case where the least protects from it; elsewhere those that lean on what differs there."""
    if context is Context.AS_WE_ARE:
        return level is case.holds_from or (case.holds_at(level) and (case.is_core or case.is_short))
    return case.holds_at(level) and case.is_core


def _is_short(case: Case, context: Context, level: IsolationLevel) -> bool:
    return case.is_short and context is Context.AS_WE_ARE and level is NAMESPACES


def _all() -> Iterator[object]:
    for context, levels in _LEVELS.items():
        for level in levels:
            for case in CASES.values():
                if not _plays(case, context, level):
                    continue
                # One player has a level, so one worker has it; the others share a user, and with it a limit of processes.
                group = f"{context}-{level}" if context is Context.AS_WE_ARE else "others"
                marks = [pytest.mark.sandbox, pytest.mark.xdist_group(group)]
                if not _is_short(case, context, level):
                    marks.append(pytest.mark.slow)
                yield pytest.param(context, level, case, marks=marks, id=f"{context}-{level}-{case.name}")


@pytest.mark.parametrize(("context", "level", "case"), list(_all()))
def test_nothing_that_a_program_does_is_felt_outside_it(
    player: Callable[[Context, IsolationLevel], Player], context: Context, level: IsolationLevel, case: Case
) -> None:
    played = player(context, level)
    assert "refused" not in played.greeting, played.greeting["refused"]
    assert played.greeting["level"] == level
    assert played.play(case.name)["violations"] == []
