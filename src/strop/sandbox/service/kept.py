"""Answers of calls that have an id, kept for a while: who asks again after a lost connection gets the same answer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from strop.sandbox.protocol import RunRequest, RunResult


@dataclass(frozen=True, slots=True)
class Kept:
    """One answer, and the mark of the request it belongs to, which is not kept itself."""

    digest: int
    result: RunResult
    expires_at: float

    def is_answer_to(self, request: RunRequest) -> bool:
        return self.digest == hash(request)

    @property
    def num_bytes(self) -> int:
        return 512 + len(self.result.text) + len(self.result.reason)


class KeptAnswers:
    """By client and id; the oldest go first, by age, by number and by size."""

    def __init__(self, *, keep_s: float, max_kept: int, max_kept_bytes: int) -> None:
        self._keep_s = keep_s
        self._max_kept = max_kept
        self._max_bytes = max_kept_bytes
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: tuple[str, str], request: RunRequest, result: RunResult, *, now: float) -> None:
        self._drop(key)
        kept = self._kept[key] = Kept(hash(request), result, now + self._keep_s)
        self.num_bytes += kept.num_bytes
        while self._kept and (len(self._kept) > self._max_kept or self.num_bytes > self._max_bytes):
            self._drop(next(iter(self._kept)))

    def find(self, key: tuple[str, str], *, now: float) -> Kept | None:
        kept = self._kept.get(key)
        return kept if kept is not None and kept.expires_at >= now else None

    def expire(self, *, now: float) -> None:
        while self._kept and next(iter(self._kept.values())).expires_at < now:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[str, str]) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self.num_bytes -= kept.num_bytes
