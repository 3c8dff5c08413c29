"""Counts verdicts as they pass, and keeps a few of each kind to show."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.curation.verdict import Verdict
from strop.seeds import derive_seed

_NUM_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTally:
    """What one rule did: of the tasks that all rules before it left it saw those whose sources it judges."""

    name: str
    num_seen: int
    num_dropped: int
    samples: tuple[Verdict, ...]


@dataclass(slots=True)
class Tally:
    """Which are shown does not depend on how the input was cut: those of the smallest hash of rule and id."""

    num_tasks: int = 0
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)  # source -> rule that dropped ("": none) -> tasks
    _samples: dict[str, list[tuple[int, int, Verdict]]] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        return sum(counts[""] for counts in self.verdicts.values())

    def add(self, verdict: Verdict) -> None:
        self.num_tasks += 1
        self.verdicts.setdefault(verdict.task.source, Counter())[verdict.rule] += 1
        heap = self._samples.setdefault(verdict.rule, [])
        entry = (-derive_seed("shown", verdict.rule, verdict.task.id), -self.num_tasks, verdict)
        if len(heap) < _NUM_SAMPLES:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)

    def samples(self, rule: str = "") -> tuple[Verdict, ...]:
        """A few of what `rule` dropped, or of what was kept."""
        return tuple(verdict for *_, verdict in sorted(self._samples.get(rule, ()), reverse=True))

    def by_rule(self, scopes: Mapping[str, frozenset[str] | None]) -> list[RuleTally]:
        """One for each rule, in the order in which they judged.

        Args:
            scopes: by the rule's name the sources that it judges; None: all.
        """
        found = []
        left = {source: counts.total() for source, counts in self.verdicts.items()}
        for name, scope in scopes.items():
            num_seen = sum(num for source, num in left.items() if scope is None or source in scope)
            num_dropped = sum(counts[name] for counts in self.verdicts.values())
            found.append(RuleTally(name=name, num_seen=num_seen, num_dropped=num_dropped, samples=self.samples(name)))
            left = {source: num - self.verdicts[source][name] for source, num in left.items()}
        return found
