"""Which rollouts have waited for a tool for long, so that their memory may go to those who wait for an engine."""

from __future__ import annotations

from collections.abc import Iterator

from strop.types import RolloutKey


class SlowTools:
    """Tools count as slow `after_s` seconds after their start. They start in the order of time, so they turn slow in it."""

    def __init__(self, after_s: float | None) -> None:
        self._after_s = after_s
        self._due_s: dict[RolloutKey, float] = {}  # when tools that run will count as slow
        self._slow: dict[RolloutKey, None] = {}  # those that do

    def __iter__(self) -> Iterator[RolloutKey]:
        """Rollouts whose tools are slow, the longest ago started first."""
        return iter(self._slow)

    def __bool__(self) -> bool:
        return bool(self._slow)

    @property
    def next_due_s(self) -> float | None:
        """When another one counts as slow; None: not before another starts."""
        return next(iter(self._due_s.values()), None)

    def started(self, key: RolloutKey, *, now_s: float) -> None:
        if self._after_s is not None:
            self._due_s[key] = now_s + self._after_s

    def forget(self, key: RolloutKey) -> None:
        """The tools are answered, or nobody waits for them, or the rollout has nothing left to give back."""
        self._due_s.pop(key, None)
        self._slow.pop(key, None)

    def advance(self, now_s: float) -> None:
        while (due_s := self.next_due_s) is not None and due_s <= now_s:
            key = next(iter(self._due_s))
            del self._due_s[key]
            self._slow[key] = None
