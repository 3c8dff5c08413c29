"""Tells a response that a service will not judge, such as an over-long one, from a service that judges nothing (any more)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from strop.rewards.scorers.rows import Rows
from strop.web import ServiceRefused

logger = logging.getLogger(__name__)

MOST_AT_THE_START = 8  # judgements in a row that fail, from the first on, before it is the service's fault

MOST_OF_ONE_REQUEST = 1
"""Of a row that may answer one request: what the service will not take may stand in the request."""

_NUM_COMPARED = 8192  # judgements, of a whole step of DAPO (512 prompts x 16): its tail is not to be compared with itself


class Refusals:
    """Counts what one service refused. One that refuses everything, from the start or from one day on, is told of.

    What is longer than half of what it judged of late is in no row: it may be too long. Rollouts are judged as they end, so a
    step's longest are asked about one after the other. Its longest judgement would be too weak a bound: bytes tell the tokens,
    by which a service counts, to 10 % or 20 %, and of thousands that it judged some have more bytes than most that it refuses.

    Args:
        what: what becomes of what is refused, for warnings.
    """

    def __init__(self, what: str = "not judged, and excluded from their groups") -> None:
        self._what = what
        self.num_refused = 0
        self._rows = Rows()
        self._asked: dict[int, tuple[str, ...]] = {}
        self._judged_bytes: deque[int] = deque(maxlen=_NUM_COMPARED)

    @contextmanager
    def asking(self, *asked: tuple[str, ...]) -> Iterator[list[int]]:
        """The service is asked about each within it; gives the judgements' numbers, in the order of asking.

        Args:
            asked: the texts that are judged together, the request that they answer first. The same count once in a row.
        """
        numbers = [self._rows.begin() for _ in asked]
        self._asked.update(zip(numbers, asked, strict=True))
        try:
            yield numbers
        finally:
            for number in numbers:
                self._rows.end(number)
                del self._asked[number]

    def judged(self, numbers: Sequence[int]) -> None:
        """The service gave these judgements."""
        for number in numbers:
            self._rows.succeeded(number)
            self._judged_bytes.append(_num_bytes(self._asked[number]))

    def add(self, refused: ServiceRefused, number: int) -> None:
        """One response that is not judged.

        Raises:
            ServiceRefused: `refused` itself, where another request would fare no better, or where nothing was judged yet and
                this is the last of several; or that several in a row were refused, of different requests and none too long.
        """
        if not refused.is_of_what_was_asked:
            raise refused
        self.num_refused += 1
        if not self._judged_bytes and self.num_refused >= MOST_AT_THE_START:
            raise refused
        asked = self._asked[number]
        if not self._judged_bytes or _num_bytes(asked) > median(self._judged_bytes):
            self._rows.end(number)
        else:
            row = self._rows.failed(number, judged=asked, about=asked[0])
            if row.is_the_judges_fault(most_of_one_request=MOST_OF_ONE_REQUEST):
                raise ServiceRefused(
                    f"{len(row.requests)} different responses in a row were refused, to {len(set(row.requests.values()))}"
                    f" different requests ({self.num_refused} so far {self._what}); the last: {refused} It judged longer ones"
                    " before: look at the server's log. Does it serve another model now, or one of a shorter context? Mend it,"
                    " and go on."
                )
        if self.num_refused.bit_count() == 1:  # 1, 2, 4, ...
            logger.warning("%d so far %s; the last: %s", self.num_refused, self._what, refused)


def _num_bytes(texts: tuple[str, ...]) -> int:
    """Closer to their tokens than characters are: a Chinese one has about as many as three English ones."""
    return sum(len(text.encode(errors="replace")) for text in texts)
