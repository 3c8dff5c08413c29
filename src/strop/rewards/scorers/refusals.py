"""Tells a response that a service will not judge, such as an over-long one, from a service that judges nothing (any more)."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from strop.rewards.scorers.rows import Rows
from strop.web import ServiceRefused

logger = logging.getLogger(__name__)

MOST_AT_THE_START = 8  # judgements in a row that fail, from the first on, before it is the service's fault

MOST_OF_ONE_REQUEST = 1
"""Of a row that may answer one request: what is too long for the service is so with every response to a long request."""


class Refusals:
    """Counts what one service refused. One that refuses everything, from the start or from one day on, is told of.

    Args:
        what: what becomes of what is refused, for warnings.
    """

    def __init__(self, what: str = "not judged, and excluded from their groups") -> None:
        self._what = what
        self.num_refused = 0
        self._has_judged = False
        self._rows = Rows()

    @contextmanager
    def asking(self, num: int = 1) -> Iterator[list[int]]:
        """The service is asked for so many judgements within it; gives their numbers, in the order of asking."""
        numbers = [self._rows.begin() for _ in range(num)]
        try:
            yield numbers
        finally:
            for number in numbers:
                self._rows.end(number)

    def judged(self, numbers: Sequence[int]) -> None:
        """The service gave these judgements."""
        self._has_judged = True
        for number in numbers:
            self._rows.succeeded(number)

    def add(self, refused: ServiceRefused, number: int, *, judged: Hashable, about: str) -> None:
        """One response that is not judged.

        Args:
            judged: what was to be judged; the same counts once in a row.
            about: the request that it answers.

        Raises:
            ServiceRefused: `refused` itself, where another request would fare no better, or where nothing was judged yet and
                this is the last of several; or that several in a row were refused, of different requests.
        """
        if not refused.is_of_what_was_asked:
            raise refused
        self.num_refused += 1
        if not self._has_judged and self.num_refused >= MOST_AT_THE_START:
            raise refused
        row = self._rows.failed(number, judged=judged, about=about)
        if row.is_the_judges_fault(most_of_one_request=MOST_OF_ONE_REQUEST):
            raise ServiceRefused(
                f"{len(row.requests)} different responses in a row were refused, to {len(set(row.requests.values()))} different"
                f" requests ({self.num_refused} so far {self._what}); the last: {refused} It did not refuse all before: look at"
                " the server's log. Does it serve another model now, or one of a shorter context? Mend it, and go on."
            )
        if self.num_refused.bit_count() == 1:  # 1, 2, 4, ...
            logger.warning("%d so far %s; the last: %s", self.num_refused, self._what, refused)
