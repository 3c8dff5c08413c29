"""At which commits data sets of the hub are read, so that what goes on after a kill reads what it began with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    commits: dict[str, str]
    tell: Callable[[], None]
    around: _Kept | None


_of_this_work: ContextVar[_Kept | None] = ContextVar("_of_this_work", default=None)


@contextmanager
def keeping_commits(commits: dict[str, str], *, tell: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within it, also in threads, data sets are read at their `commits`; one that has none there gets it, and `tell` is called.

    Of several, one in the other, the innermost that has a data set says at which commit it is read, and each gets it.

    Args:
        commits: by data set, `org/name` or `org/name@tag`.
    """
    token = _of_this_work.set(_Kept(commits=commits, tell=tell, around=_of_this_work.get()))
    try:
        yield
    finally:
        _of_this_work.reset(token)


def kept_commit(dataset: str) -> str | None:
    """The commit at which the work that goes on has begun to read `dataset`."""
    return next((kept.commits[dataset] for kept in _all_kept() if dataset in kept.commits), None)


def keep_commit(dataset: str, commit: str) -> None:
    """The work that goes on has read `dataset` at `commit`. Nothing happens where nobody keeps it."""
    for kept in _all_kept():
        if kept.commits.get(dataset) != commit:
            kept.commits[dataset] = commit
            kept.tell()


def _all_kept() -> Iterator[_Kept]:
    kept = _of_this_work.get()
    while kept is not None:
        yield kept
        kept = kept.around
