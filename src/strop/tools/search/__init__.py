"""Text search in your own passages, in cached results, or by a service over HTTP: what all these backends give the tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from strop.errors import StropError


class QueryRefused(StropError):  # noqa: N818 - named for what happened
    """The backend does not answer this query: a mistake of the policy, which gets the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A piece of text in a corpus or an answer."""

    id: str
    title: str  # empty if it has none
    text: str


class Backend(Protocol):
    """A source of results, shared by all rollouts."""

    @property
    def longest_call_s(self) -> float:
        """See `Tool.longest_call_s`."""
        return 0.0

    async def results(self, query: str, *, top_k: int) -> str:
        """The text for the policy, best result first; empty if nothing was found.

        Raises:
            QueryRefused: the query itself cannot be answered.
            MachineError: the backend failed, after its retries.
        """


def as_pages(passages: Sequence[Passage]) -> str:
    """One line a passage, as in ARPO's search results: `Page 1: ...`."""
    lines = []
    for number, passage in enumerate(passages, start=1):
        text = f"{passage.title}: {passage.text}" if passage.title else passage.text
        lines.append(f"Page {number}: {' '.join(text.split())}")
    return "\n".join(lines)
