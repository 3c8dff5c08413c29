"""Tells judgements that failed one after the other, in the order of asking, from as many that failed here and there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

MOST_IN_A_ROW = 8
"""Different responses that get no judgement, asked about one after the other, before it is their judge's fault.

A judge that is confused by one response in ten, by chance, comes to that once in 100 million judgements; by one in three, once
in 10 000; by one in two, once in 500. That is so however many are asked about at once: a row is one in the order of asking, and
what is still being asked interrupts it. By completion, those whose retries queue behind all others would end together.
"""

MOST_AT_ALL = 128
"""Different responses in a row, before it is the judge's fault even of one request: twice the groups of DeepSeekMath, of 64."""

_MOST_ROWS = 1024  # that are remembered: what is older has nothing beside it that is still being asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Judgements asked for one after the other, all of which failed."""

    first: int  # in the order of asking
    last: int
    requests: Mapping[Hashable, str]  # what was judged -> the request that it answers

    def is_the_judges_fault(self, *, most_of_one_request: int) -> bool:
        """Whether it is long enough, of each request no more counted than so many: it may be the request that is at fault."""
        counted = sum(min(num, most_of_one_request) for num in Counter(self.requests.values()).values())
        return counted >= MOST_IN_A_ROW or len(self.requests) >= MOST_AT_ALL


class Rows:
    """The rows of one judge."""

    def __init__(self) -> None:
        self._num_begun = 0
        self._open: set[int] = set()
        self._by_first: dict[int, Row] = {}
        self._by_last: dict[int, Row] = {}

    def begin(self) -> int:
        """The judge is to be asked; returns the judgement's number. `end` is owed, whatever comes of it."""
        self._num_begun += 1
        self._open.add(self._num_begun)
        return self._num_begun

    def succeeded(self, number: int) -> None:
        self._open.discard(number)

    def failed(self, number: int, *, judged: Hashable, about: str) -> Row:
        """The row that the judgement is in now.

        Args:
            judged: what it is of; the same counts once in a row.
            about: the request whose responses are judged.
        """
        self._open.discard(number)
        return self._joined(number, {judged: about})

    def end(self, number: int) -> None:
        """Nothing more comes of the judgement. One that neither succeeded nor failed (given up, say) ends no row."""
        if number in self._open:
            self._open.remove(number)
            self._joined(number, {})

    def _joined(self, number: int, requests: Mapping[Hashable, str]) -> Row:
        """The row that `number` is in, with what stands before and after it."""
        before, after = self._by_last.pop(number - 1, None), self._by_first.pop(number + 1, None)
        first, last = number, number
        if before is not None:
            first, requests = before.first, {**before.requests, **requests}
            del self._by_first[first]
        if after is not None:
            last, requests = after.last, {**requests, **after.requests}
            del self._by_last[last]
        row = self._by_first[first] = self._by_last[last] = Row(first=first, last=last, requests=requests)
        if len(self._by_first) > _MOST_ROWS:
            oldest = self._by_first.pop(next(iter(self._by_first)))
            del self._by_last[oldest.last]
        return row
