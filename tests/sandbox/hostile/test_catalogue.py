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


def _is_short(case: Case, context: Context, level: IsolationLevel) -> bool:
    return case.is_short and context is Context.AS_WE_ARE and level is NAMESPACES


def _all() -> Iterator[object]:
    for context, levels in _LEVELS.items():
        for level in levels:
            for case in CASES.values():
                if not case.holds_at(level) or not (context is Context.AS_WE_ARE or case.is_short or case.is_core):
                    continue
                marks = [pytest.mark.sandbox, *([] if _is_short(case, context, level) else [pytest.mark.slow])]
                yield pytest.param(context, level, case, marks=marks, id=f"{context}-{level}-{case.name}")


@pytest.mark.parametrize(("context", "level", "case"), list(_all()))
def test_nothing_that_a_program_does_is_felt_outside_it(
    player: Callable[[Context, IsolationLevel], Player], context: Context, level: IsolationLevel, case: Case
) -> None:
    played = player(context, level)
    assert "refused" not in played.greeting, played.greeting["refused"]
    assert played.greeting["level"] == level
    assert played.play(case.name)["violations"] == []
