"""One player for each context and level, started when the first case needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from strop.sandbox import IsolationLevel

from .contexts import Context, Player


@pytest.fixture(scope="session")
def player() -> Iterator[Callable[[Context, IsolationLevel], Player]]:
    players: dict[tuple[Context, IsolationLevel], Player] = {}

    def get(context: Context, level: IsolationLevel) -> Player:
        if (context, level) not in players:
            players[context, level] = Player(context, level)
        return players[context, level]

    yield get
    left = {f"{context}, {level}": player.close() for (context, level), player in players.items()}
    assert not any(left.values()), f"after the last case and `close`: {left}"
