"""Tells a response that confuses a judge from a judge that talks nonsense, from the start or from one day on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from strop.web import ServiceRefused

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 8
"""Different responses without a verdict, asked about one after the other, before it is the judge's fault.

A judge that is confused by one response in ten, by chance, comes to that once in 100 million judgements; by one in three, once
in 10 000; by one in two, once in 500. That is so however many are asked about at once: a row is one in the order of asking, and
what is still being asked interrupts it. By completion, those whose retries queue behind all others would end together.
"""

MOST_OF_ONE_REQUEST = 4
"""Of those eight that may answer one request: it may be what confuses the judge, and its responses are judged together."""

MOST_AT_ALL = 128
"""Different responses in a row, before it is the judge's fault even of one request: twice the groups of DeepSeekMath, of 64."""

_MOST_ROWS = 1024  # that are remembered: what is older has nothing beside it that is still being asked


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Judgements asked for one after the other, none of which held a verdict."""

    first: int  # in the order of asking
    last: int
    requests: Mapping[Hashable, str]  # what was judged -> the request that it answers

    @property
    def is_the_judges_fault(self) -> bool:
        counted = sum(min(num, MOST_OF_ONE_REQUEST) for num in Counter(self.requests.values()).values())
        return counted >= MOST_IN_A_ROW or len(self.requests) >= MOST_AT_ALL


class Unclear:
    """Counts the judgements of one judge that hold no verdict, and warns of the 1st, 2nd, 4th, 8th, ...

    Args:
        judge: what messages call it.
    """

    def __init__(self, judge: str) -> None:
        self._judge = judge
        self._num_begun = self._num_clear = self._num_unclear = 0
        self._open: set[int] = set()
        self._by_first: dict[int, _Row] = {}
        self._by_last: dict[int, _Row] = {}

    def begin(self) -> int:
        """The judge is to be asked; returns the judgement's number. `end` is owed, whatever comes of it."""
        self._num_begun += 1
        self._open.add(self._num_begun)
        return self._num_begun

    def clear(self, number: int) -> None:
        """The judgement held a verdict."""
        self._open.remove(number)
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
        self._open.remove(number)
        self._num_unclear += 1
        row = self._joined(number, {judged: about})
        num_replies = f"{len(replies)} {'reply' if len(replies) == 1 else 'replies'}"
        end = f"{'' if replies[-1] else 'nothing, in '}{replies[-1][-200:]!r}"
        last = f"the last reply{', cut off at service.max_tokens,' if is_cut_off else ''} ends with {end}"
        num = self._num_clear + self._num_unclear
        if row.is_the_judges_fault:
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
        if number in self._open:
            self._open.remove(number)
            self._joined(number, {})

    def _joined(self, number: int, requests: Mapping[Hashable, str]) -> _Row:
        """The row that `number` is in, with what stands before and after it."""
        before, after = self._by_last.pop(number - 1, None), self._by_first.pop(number + 1, None)
        first, last = number, number
        if before is not None:
            first, requests = before.first, {**before.requests, **requests}
            del self._by_first[first]
        if after is not None:
            last, requests = after.last, {**requests, **after.requests}
            del self._by_last[last]
        row = self._by_first[first] = self._by_last[last] = _Row(first=first, last=last, requests=requests)
        if len(self._by_first) > _MOST_ROWS:
            oldest = self._by_first.pop(next(iter(self._by_first)))
            del self._by_last[oldest.last]
        return row
