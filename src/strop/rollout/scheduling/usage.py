"""How much of each engine was used over time: rows that decode, blocks that are reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class EngineUsage:
    """Integrals of one engine's use; `changes` is its timeline: (time, rows that decode, share of KV memory reserved)."""

    since_s: float
    rows: int = 0
    kv_share: float = 0.0
    busy_s: float = 0.0
    row_s: float = 0.0
    kv_share_s: float = 0.0
    last_busy_s: float = 0.0
    changes: list[tuple[float, int, float]] = field(default_factory=list)

    def move(self, now_s: float, rows: int, kv_share: float) -> None:
        """From `now_s` on the engine decodes `rows` rows."""
        passed = now_s - self.since_s
        if self.rows:
            self.busy_s += passed
            self.row_s += passed * self.rows
            self.last_busy_s = now_s
        self.kv_share_s += passed * self.kv_share
        self.since_s, self.rows, self.kv_share = now_s, rows, kv_share
        self.changes.append((now_s, rows, kv_share))

    def mean_rows(self, start_s: float, end_s: float, num_spans: int) -> list[float]:
        """Mean rows that decode in each of equal spans of time."""
        return means_of_spans([(at, rows) for at, rows, _ in self.changes], start_s, end_s, num_spans)

    def mean_kv_shares(self, start_s: float, end_s: float, num_spans: int) -> list[float]:
        """Mean share of KV memory reserved in each of equal spans of time."""
        return means_of_spans([(at, share) for at, _, share in self.changes], start_s, end_s, num_spans)


def means_of_spans(changes: Sequence[tuple[float, float]], start_s: float, end_s: float, num_spans: int) -> list[float]:
    """Means, over equal spans from `start_s` to `end_s`, of what takes a value at each (time, value) and had been 0 before."""
    width = (end_s - start_s) / num_spans
    totals = [0.0] * num_spans
    if width <= 0 or not changes:
        return totals
    ends = [at for at, _ in changes[1:]] + [end_s]
    for (begin, value), end in zip(changes, ends, strict=True):
        first, last = max(begin, start_s) - start_s, min(end, end_s) - start_s
        if not value or first >= last:
            continue
        for index in range(int(first / width), min(num_spans, int(last / width) + 1)):
            totals[index] += value * max(0.0, min(last, (index + 1) * width) - max(first, index * width))
    return [total / width for total in totals]
