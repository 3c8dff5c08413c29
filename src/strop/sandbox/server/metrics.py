"""Counters of the service, cheap enough for every call, and their text for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.sandbox.protocol import PairVerdict, RunOutcome, RunResult

if TYPE_CHECKING:
    from strop.sandbox.server.dispatcher import Dispatcher

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(slots=True)
class Histogram:
    """How often a time fell into each bucket; the last one holds all longer times."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, time_s: float) -> None:
        self.counts[bisect_left(_BUCKETS_S, time_s)] += 1
        self.total_s += time_s


@dataclass(slots=True)
class Tally:
    """Counts since the start of the service."""

    outcomes: Counter[RunOutcome] = field(default_factory=Counter)
    verdicts: Counter[PairVerdict] = field(default_factory=Counter)
    queue_s: Histogram = field(default_factory=Histogram)
    run_s: Histogram = field(default_factory=Histogram)
    num_cancelled: int = 0
    num_rejoined: int = 0

    def add(self, result: RunResult) -> None:
        self.outcomes[result.outcome] += 1
        if result.node:  # it ran
            self.queue_s.add(result.timings.queue_s)
            self.run_s.add(result.timings.run_s)


def exposition(dispatcher: Dispatcher) -> str:
    """The metrics in the text format of Prometheus, version 0.0.4."""
    return "".join(f"{line}\n" for line in _lines(dispatcher))


def _lines(dispatcher: Dispatcher) -> Iterator[str]:
    tally, held, box = dispatcher.tally, dispatcher.admission.held, dispatcher.box
    yield from _family("counter", "calls_total", "Runs by outcome.", _by_label("outcome", RunOutcome, tally.outcomes))
    yield from _family("counter", "verdicts_total", "Pairs by verdict.", _by_label("verdict", PairVerdict, tally.verdicts))
    for name, text, num in (
        ("cancelled", "Runs that no client waited for any more.", tally.num_cancelled),
        ("retries", "Runs sent once more after a fault of the supervisor.", box.num_retries),
        ("rejoined", "Requests that found the running call or the cached answer of their id.", tally.num_rejoined),
        ("nodes_lost", "Supervisors that died.", box.num_nodes_lost),
        ("sessions_lost", "Sessions that ended without a request of their client.", box.num_sessions_lost),
    ):
        yield from _family("counter", f"{name}_total", text, {"": num})
    yield from _histogram("queue_seconds", "From arrival to a slot.", tally.queue_s)
    yield from _histogram("run_seconds", "From the first instruction to the end.", tally.run_s)
    for name, text, value in (
        ("held", "Jobs that are accepted and not answered yet.", held.num),
        ("held_bytes", "Bytes of these jobs.", held.num_bytes),
        ("queued", "Jobs that wait for a slot.", len(box.queue)),
        ("sessions", "Sessions that are open.", box.num_sessions),
        ("kept_bytes", "Bytes of answers that are cached for a client that may ask again.", dispatcher.kept.num_bytes),
        ("node_slots", "Slots of the supervisor.", 0 if box.node is None else box.node.num_slots),
        ("node_running", "Jobs of the supervisor.", box.num_running),
    ):
        yield from _family("gauge", name, text, {"": value})


def _family(kind: str, name: str, text: str, samples: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP strop_sandbox_{name} {text}"
    yield f"# TYPE strop_sandbox_{name} {kind}"
    for label, value in samples.items():
        yield f"strop_sandbox_{name}{label} {value}"


def _by_label(label: str, kinds: type[RunOutcome] | type[PairVerdict], counts: Mapping[Any, int]) -> dict[str, int]:
    return {f'{{{label}="{kind}"}}': counts[kind] for kind in kinds}


def _histogram(name: str, text: str, histogram: Histogram) -> Iterator[str]:
    yield from _family("histogram", name, text, {})
    total = 0
    for bound, count in zip((*map(str, _BUCKETS_S), "+Inf"), histogram.counts, strict=True):
        total += count
        yield f'strop_sandbox_{name}_bucket{{le="{bound}"}} {total}'
    yield f"strop_sandbox_{name}_count {total}"
    yield f"strop_sandbox_{name}_sum {histogram.total_s}"
