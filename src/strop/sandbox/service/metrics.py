"""What Prometheus reads: the tally of a dispatcher and its state at this moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from strop.sandbox.protocol import PairVerdict, RunOutcome
from strop.sandbox.service.dispatcher import Dispatcher
from strop.sandbox.service.tally import BUCKETS_S, Histogram


def exposition(dispatcher: Dispatcher) -> tuple[bytes, str]:
    """The metrics as text, and the type of that text."""
    registry = CollectorRegistry()
    registry.register(_DispatcherCollector(dispatcher))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _DispatcherCollector(Collector):
    """Reads counters that are kept anyway, so a call costs nothing more for being measured."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        dispatcher, tally = self._dispatcher, self._dispatcher.tally
        yield _by_label("strop_sandbox_calls", "Runs by outcome.", "outcome", [(o, tally.outcomes[o]) for o in RunOutcome])
        yield _by_label("strop_sandbox_verdicts", "Pairs by verdict.", "verdict", [(v, tally.verdicts[v]) for v in PairVerdict])
        for name, text, num in (
            ("cancelled", "Runs that nobody waited for any more.", tally.num_cancelled),
            ("retries", "Jobs placed anew after a fault of their node.", tally.num_retries),
            ("rejoined", "Requests that found the running call or the kept answer of their id.", tally.num_rejoined),
            ("without_node", "Runs that were told that there is no node.", tally.num_without_node),
            ("nodes_joined", "Nodes that joined.", tally.num_nodes_joined),
            ("nodes_lost", "Nodes that left without being drained.", tally.num_nodes_lost),
            ("sessions_lost", "Sessions lost through no wish of their client.", tally.num_sessions_lost),
            ("program_cpu_seconds", "CPU time of all programs.", tally.cpu_s),
        ):
            yield CounterMetricFamily(f"strop_sandbox_{name}", text, value=num)
        yield _histogram("strop_sandbox_queue_seconds", "From arrival to a slot.", tally.queue_s)
        yield _histogram("strop_sandbox_setup_seconds", "From the slot to the first instruction.", tally.setup_s)
        yield _histogram("strop_sandbox_run_seconds", "From there to the end.", tally.run_s)
        for name, text, value in (
            ("held", "Jobs accepted and not answered yet.", dispatcher.admission.held.num),
            ("held_bytes", "Bytes of them.", dispatcher.admission.held.num_bytes),
            ("queued", "Jobs that wait for a slot.", len(dispatcher.floor.queue)),
            ("clients", "Clients with jobs.", dispatcher.admission.num_clients),
            ("sessions", "Sessions that are open.", len(dispatcher.sessions)),
            ("kept_answers", "Answers kept for a client that may ask again.", len(dispatcher.runs.kept)),
            ("kept_bytes", "Bytes of them.", dispatcher.runs.kept.num_bytes),
        ):
            yield GaugeMetricFamily(f"strop_sandbox_{name}", text, value=value)
        slots = GaugeMetricFamily("strop_sandbox_node_slots", "Slots of a node.", labels=["node", "level"])
        running = GaugeMetricFamily("strop_sandbox_node_running", "Jobs on a node.", labels=["node", "level"])
        by_node: dict[tuple[str, str], tuple[int, int]] = {}
        for seat in dispatcher.floor.seats:  # a name may be there twice, a sample may not
            labels = (seat.node.name, seat.node.level.value)
            num_slots, num_running = by_node.get(labels, (0, 0))
            by_node[labels] = num_slots + seat.node.num_slots, num_running + len(seat.running)
        for labels, (num_slots, num_running) in by_node.items():
            slots.add_metric(labels, num_slots)
            running.add_metric(labels, num_running)
        yield slots
        yield running


def _by_label(name: str, text: str, label: str, values: Sequence[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, num in values:
        family.add_metric([value], num)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    buckets, total = [], 0
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total_s)
