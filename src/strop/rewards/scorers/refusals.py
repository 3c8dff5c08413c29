"""Tells a response that a service will not judge, such as an over-long one, from a service that judges nothing."""

from __future__ import annotations

import logging

from strop.web import ServiceRefused

logger = logging.getLogger(__name__)

MOST_AT_THE_START = 8  # judgements in a row that fail, from the first on, before it is the service's fault


class Refusals:
    """Counts what one service refused. One that refuses everything from the start is told of, and nothing is judged by it.

    Args:
        what: what becomes of what is refused, for warnings.
    """

    def __init__(self, what: str = "not judged, and excluded from their groups") -> None:
        self._what = what
        self.num_refused = 0
        self._has_judged = False

    def judged(self) -> None:
        """The service judged something, so what it refuses from now on is refused for its own sake."""
        self._has_judged = True

    def add(self, refused: ServiceRefused) -> None:
        """One response that is not judged.

        Raises:
            ServiceRefused: `refused` itself, where another request would fare no better, or where nothing was judged yet and
                this is the last of several.
        """
        if not refused.is_of_what_was_asked:
            raise refused
        self.num_refused += 1
        if not self._has_judged and self.num_refused >= MOST_AT_THE_START:
            raise refused
        if self.num_refused.bit_count() == 1:  # 1, 2, 4, ...
            logger.warning("%d so far %s; the last: %s", self.num_refused, self._what, refused)
