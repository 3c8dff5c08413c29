"""Tells a response that confuses a judge from a judge that talks nonsense, from the start or from one day on."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

from strop.rewards.scorers.rows import Rows
from strop.web import ServiceRefused

logger = logging.getLogger(__name__)

MOST_OF_ONE_REQUEST = 4
"""Of a row that may answer one request: it may be what confuses the judge, and its responses are judged together."""


class Unclear:
    """Counts the judgements of one judge that hold no verdict, and warns of the 1st, 2nd, 4th, 8th, ...

    Args:
        judge: what messages call it.
    """

    def __init__(self, judge: str) -> None:
        self._judge = judge
        self._num_clear = self._num_unclear = 0
        self._rows = Rows()

    def begin(self) -> int:
        """The judge is to be asked; returns the judgement's number. `end` is owed, whatever comes of it."""
        return self._rows.begin()

    def clear(self, number: int) -> None:
        """The judgement held a verdict."""
        self._rows.succeeded(number)
        self._num_clear += 1

    def add(self, number: int, *, judged: Hashable, about: str, replies: Sequence[str], is_cut_off: bool) -> str:
        """The judgement held none in `replies`; returns why that is so, in the same words in every run.

        Args:
            judged: what it is of; the same counts once in a row.
            about: the request whose responses are judged.
            is_cut_off: the last reply was.

        Raises:
            ServiceRefused: it is the judge's fault.
        """
        self._num_unclear += 1
        row = self._rows.failed(number, judged=judged, about=about)
        num_replies = f"{len(replies)} {'reply' if len(replies) == 1 else 'replies'}"
        end = f"{'' if replies[-1] else 'nothing, in '}{replies[-1][-200:]!r}"
        last = f"the last reply{', cut off at service.max_tokens,' if is_cut_off else ''} ends with {end}"
        num = self._num_clear + self._num_unclear
        if row.is_the_judges_fault(most_of_one_request=MOST_OF_ONE_REQUEST):
            raise ServiceRefused(
                f"{self._judge} gave no verdict on {len(row.requests)} different responses in a row, in {num_replies} each"
                f" ({self._num_unclear} of {num} judgements so far hold none); {last}. Look at the server's log. Take a model"
                " that follows the prompt, raise service.max_tokens if it is cut off, or change the prompt."
            )
        why = f"{self._judge} gave no verdict in {num_replies}; {last}"
        if self._num_unclear.bit_count() == 1:  # 1, 2, 4, ...
            logger.warning(
                "%d of %d judgements so far hold no verdict, and do not count; the last: %s", self._num_unclear, num, why
            )
        return why

    def end(self, number: int) -> None:
        """Nothing more comes of the judgement. One that was neither clear nor unclear (refused, given up) ends no row."""
        self._rows.end(number)
