"""Counts what happened in the service, cheaply enough for every call; `metrics` shows it to Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from strop.sandbox.protocol import PairVerdict, RunOutcome, RunResult

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(slots=True)
class Histogram:
    """How often a time fell into each bucket; the last is everything beyond."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, time_s: float) -> None:
        self.counts[bisect_left(BUCKETS_S, time_s)] += 1
        self.total_s += time_s


@dataclass(slots=True)
class Tally:
    """Since the start of the service."""

    outcomes: Counter[RunOutcome] = field(default_factory=Counter)
    verdicts: Counter[PairVerdict] = field(default_factory=Counter)
    queue_s: Histogram = field(default_factory=Histogram)
    setup_s: Histogram = field(default_factory=Histogram)
    run_s: Histogram = field(default_factory=Histogram)
    cpu_s: float = 0.0
    num_retries: int = 0
    num_cancelled: int = 0
    num_rejoined: int = 0  # by their id
    num_without_node: int = 0
    num_nodes_joined: int = 0
    num_nodes_lost: int = 0
    num_sessions_lost: int = 0

    def add(self, result: RunResult) -> None:
        self.outcomes[result.outcome] += 1
        timings = result.timings
        if result.node:  # it ran
            self.queue_s.add(timings.queue_s)
            self.setup_s.add(timings.setup_s)
            self.run_s.add(timings.run_s)
            self.cpu_s += timings.cpu_s
