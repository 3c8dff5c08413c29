"""Tells a response that confuses a judge from a judge that talks nonsense, from the start or from one day on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from strop.web import ServiceRefused

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 8
"""Different responses without a verdict, none with one between them, before it is the judge's fault.

A judge that is confused by one response in ten, by chance, comes to that once in 100 million judgements; by one in three, once
in 10 000; by one in two, once in 500.
"""


class Unclear:
    """Counts the judgements of one judge that hold no verdict, and warns of the 1st, 2nd, 4th, 8th, ...

    Args:
        judge: what messages call it.
    """

    def __init__(self, judge: str) -> None:
        self._judge = judge
        self._num_clear = self._num_unclear = 0
        self._in_a_row: dict[str, str] = {}  # what the judge was asked -> the request that it is about

    def clear(self) -> None:
        """A judgement held a verdict."""
        self._num_clear += 1
        self._in_a_row.clear()

    def add(self, asked: str, *, about: str, replies: Sequence[str], is_cut_off: bool) -> str:
        """A judgement of `asked` held none in `replies`; returns why that is so, in the same words in every run.

        The same question counts once in a row, and a judge that was clear before is not to blame for one request that confuses
        it, however many responses to it there are.

        Args:
            about: the request whose responses are judged.
            is_cut_off: the last reply was.

        Raises:
            ServiceRefused: it is the judge's fault.
        """
        self._num_unclear += 1
        self._in_a_row[asked] = about
        if len(self._in_a_row) > MOST_IN_A_ROW:
            del self._in_a_row[next(iter(self._in_a_row))]
        num_replies = f"{len(replies)} {'reply' if len(replies) == 1 else 'replies'}"
        end = f"{'' if replies[-1] else 'nothing, in '}{replies[-1][-200:]!r}"
        last = f"the last reply{', cut off at service.max_tokens,' if is_cut_off else ''} ends with {end}"
        num = self._num_clear + self._num_unclear
        num_requests = len(set(self._in_a_row.values()))
        if len(self._in_a_row) == MOST_IN_A_ROW and (num_requests > 1 or not self._num_clear):
            raise ServiceRefused(
                f"{self._judge} gave no verdict on {MOST_IN_A_ROW} different responses in a row, in {num_replies} each"
                f" ({self._num_unclear} of {num} judgements so far hold none); {last}. Look at the server's log. Take a model"
                " that follows the prompt, raise service.max_tokens if it is cut off, or change the prompt."
            )
        why = f"{self._judge} gave no verdict in {num_replies}; {last}"
        if self._num_unclear.bit_count() == 1:  # 1, 2, 4, ...
            logger.warning(
                "%d of %d judgements so far hold no verdict, and do not count; the last: %s", self._num_unclear, num, why
            )
        return why
