"""What a model that scores responses owes to whoever asks it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from strop.web import ServiceRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question and what was answered: all that a scorer is shown."""

    prompt: str
    response: str


class Scorer(Protocol):
    """Gives responses numbers; larger is better, and the scale is the model's own."""

    async def score(self, exchanges: Sequence[Exchange]) -> list[float | None]:
        """One finite number each, in order; None for one that the scorer will not judge, such as an over-long one.

        Raises:
            UserError: the scorer cannot be had, or answers what are no scores, after every try. The run stops; what was
                judged is on disk, and the same command goes on from there.
        """

    async def close(self) -> None:
        """Safe to call twice."""


def checked_scores(scores: Any, *, num: int, place: str) -> list[float]:
    """`scores` as what it should be: `num` finite numbers. Raises `ServiceRefused` that says what it is instead."""
    if not isinstance(scores, list) or len(scores) != num:
        what = f"{len(scores)} scores" if isinstance(scores, list) else f"{str(scores)[:200]!r}, which is no list of scores,"
        raise ServiceRefused(f"{place} answered {what} where {num} were asked for. Does another kind of service run there?")
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise ServiceRefused(f"{place} answered {score!r} where a finite number was asked for.")
    return [float(score) for score in scores]
