"""How much of each engine was used over time: rows that decode, blocks that are reserved."""

from __future__ import annotations

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
