"""What a search backend owes to the search tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from strop.errors import StropError


class QueryRefused(StropError):  # noqa: N818 - named for what happened
    """The backend will not answer this query, however often it is asked: the policy's mistake, and it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A piece of text that can be found."""

    id: str
    title: str  # empty where it has none
    text: str


class Backend(Protocol):
    """Where results come from. Shared by all rollouts."""

    @property
    def longest_call_s(self) -> float:
        """See `Tool.longest_call_s`."""
        return 0.0

    async def results(self, query: str, *, top_k: int) -> str:
        """What the policy reads, best first; empty when nothing was found.

        Raises:
            QueryRefused: the query itself cannot be answered.
            MachineError: the backend failed, after what tries it makes.
        """


def as_pages(passages: Sequence[Passage]) -> str:
    """One line for each, as in ARPO's search results: `Page 1: ...`."""
    lines = []
    for number, passage in enumerate(passages, start=1):
        text = f"{passage.title}: {passage.text}" if passage.title else passage.text
        lines.append(f"Page {number}: {' '.join(text.split())}")
    return "\n".join(lines)
