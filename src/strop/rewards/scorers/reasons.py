"""Brings why a response has no judgement from whoever finds that out to whoever writes it down, past all that lie between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_of_this_judgement: ContextVar[list[str] | None] = ContextVar("_of_this_judgement", default=None)


def tell_why(reason: str) -> None:
    """The response that is being judged gets no judgement, for this reason; nothing where nobody listens."""
    reasons = _of_this_judgement.get()
    if reasons is not None:
        reasons.append(reason)


@contextmanager
def reasons_told() -> Iterator[list[str]]:
    """Fills with what is told within it, by this task or by those that it starts."""
    reasons: list[str] = []
    token = _of_this_judgement.set(reasons)
    try:
        yield reasons
    finally:
        _of_this_judgement.reset(token)
