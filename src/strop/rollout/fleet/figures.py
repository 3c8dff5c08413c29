"""What a batch came to: who was busy, who waited, what was lost; as metrics of a step and as a picture of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.rollout.scheduling import EngineSpec, EngineUsage, Ledger, Scheduler, Why
from strop.rollout.scheduling.usage import means_of_spans

NUM_SPANS = 240  # of a timeline


@dataclass(slots=True, eq=False)
class QueueMeter:
    """How many rollouts waited for an engine, over time."""

    started_s: float
    changes: list[tuple[float, int]] = field(default_factory=list)

    def move(self, now_s: float, length: int) -> None:
        if not self.changes or self.changes[-1][1] != length:
            self.changes.append((now_s, length))

    @property
    def most(self) -> int:
        return max((length for _, length in self.changes), default=0)

    @property
    def empty_since_s(self) -> float:
        """When nobody waited any more; the start where nobody ever did."""
        return self.changes[-1][0] if self.most else self.started_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine's part in a batch. Times are seconds since the batch began."""

    name: str
    max_rows: int
    kv_tokens: int
    joined_s: float
    left_s: float  # or the end of the batch
    loss: str  # why it was given up; empty where it was not
    busy_s: float
    row_s: float
    kv_share_s: float
    kv_share_max: float
    tail_idle_s: float  # in which it decoded nothing, after nobody waited any more
    rows: tuple[float, ...]  # mean of each of equal spans of the batch
    kv_shares: tuple[float, ...]  # likewise, of KV memory that was reserved

    @property
    def present_s(self) -> float:
        return self.left_s - self.joined_s

    @property
    def row_share(self) -> float:
        return self.row_s / (self.present_s * self.max_rows) if self.present_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """One batch of rollouts, played."""

    policy: str
    duration_s: float
    engines: tuple[EngineReport, ...]
    ledger: Ledger
    queue: tuple[float, ...]  # mean length in each of equal spans
    queue_max: int
    evictions: int
    cached_tokens: int
    request_tokens: int
    lost_before: tuple[str, ...] = ()  # engines that were given up between the batch before and this one

    def as_metrics(self) -> dict[str, float]:
        """Metrics `scheduler/*` of a step; shares of time are left out where nothing was played."""
        ledger = self.ledger
        metrics = {
            "scheduler/engines": float(len(self.engines)),
            "scheduler/engines_lost": float(sum(bool(engine.loss) for engine in self.engines) + len(self.lost_before)),
            "scheduler/restarts": float(ledger.runs[Why.RESTART]),
            "scheduler/lost_turns": float(ledger.lost_turns),
            "scheduler/evictions": float(self.evictions),
            "scheduler/recomputed_tokens": float(ledger.recomputed_tokens),
            "scheduler/suspended": float(ledger.suspended),
            "scheduler/branches_refused": float(ledger.branches_refused),
            "scheduler/queue_max": float(self.queue_max),
            "scheduler/longest_rollout_s": ledger.longest_rollout_s,
            "scheduler/longest_rollout_tokens": float(ledger.longest_rollout_tokens),
        }
        if self.request_tokens:
            metrics["scheduler/cached_token_share"] = self.cached_tokens / self.request_tokens
        if ledger.offered:
            metrics["scheduler/queue_wait_mean_s"] = ledger.queue_wait_s / ledger.offered
        if ledger.tool_turns:
            metrics["scheduler/tool_wait_mean_s"] = ledger.tool_wait_s / ledger.turns
            metrics["scheduler/tool_run_mean_s"] = ledger.tool_run_s / ledger.tool_turns
        return metrics | self._shares()

    def _shares(self) -> dict[str, float]:
        present_s = sum(engine.present_s for engine in self.engines)
        if present_s <= 0 or not self.ledger.turns:
            return {}
        rows = sum(engine.present_s * engine.max_rows for engine in self.engines)
        shares = {
            "scheduler/row_share": sum(engine.row_s for engine in self.engines) / rows,
            "scheduler/busy_share": sum(engine.busy_s for engine in self.engines) / present_s,
            "scheduler/tail_idle_share": sum(engine.tail_idle_s for engine in self.engines) / present_s,
            "scheduler/queue_mean": sum(self.queue) / len(self.queue),
        }
        if self.policy != "static":  # which reserves nothing
            shares["scheduler/kv_share_mean"] = sum(engine.kv_share_s for engine in self.engines) / present_s
            shares["scheduler/kv_share_max"] = max(engine.kv_share_max for engine in self.engines)
        if len(self.engines) > 1:
            shares |= {f"scheduler/row_share/{engine.name}": engine.row_share for engine in self.engines}
        return shares

    def as_timeline(self) -> dict[str, Any]:
        """What a picture of the batch is drawn from, as JSON."""
        return {
            "policy": self.policy,
            "duration_s": round(self.duration_s, 6),
            "engines": [
                {
                    "name": engine.name,
                    "max_rows": engine.max_rows,
                    "kv_tokens": engine.kv_tokens,
                    "joined_s": round(engine.joined_s, 6),
                    "left_s": round(engine.left_s, 6),
                    "loss": engine.loss,
                    "rows": [round(mean, 3) for mean in engine.rows],
                    "kv_shares": [round(mean, 4) for mean in engine.kv_shares],
                }
                for engine in self.engines
            ],
            "queue": [round(mean, 2) for mean in self.queue],
        }


def report_of(
    scheduler: Scheduler,
    specs: Sequence[EngineSpec],
    queue: QueueMeter,
    *,
    policy: str,
    started_s: float,
    ended_s: float,
    joined_s: Mapping[str, float],
    left_s: Mapping[str, float],
    losses: Mapping[str, str],
    evictions: int,
    cached_tokens: int,
    request_tokens: int,
) -> BatchReport:
    """What the batch from `started_s` to `ended_s` came to. Times are the scheduler's clock's."""
    engines = tuple(
        _engine_report(
            spec,
            scheduler.usage[spec.name],
            started_s=started_s,
            ended_s=ended_s,
            joined_s=joined_s[spec.name],
            left_s=left_s.get(spec.name, ended_s),
            tail_s=queue.empty_since_s,
            loss=losses.get(spec.name, ""),
        )
        for spec in specs
    )
    return BatchReport(
        policy=policy,
        duration_s=ended_s - started_s,
        engines=engines,
        ledger=scheduler.ledger,
        queue=tuple(means_of_spans(queue.changes, started_s, ended_s, NUM_SPANS)),
        queue_max=queue.most,
        evictions=evictions,
        cached_tokens=cached_tokens,
        request_tokens=request_tokens,
    )


def _engine_report(
    spec: EngineSpec,
    usage: EngineUsage,
    *,
    started_s: float,
    ended_s: float,
    joined_s: float,
    left_s: float,
    tail_s: float,
    loss: str,
) -> EngineReport:
    usage.move(max(left_s, usage.since_s), 0, 0.0)
    # Static asks for more than an engine has rows; what waits inside the engine does not decode.
    rows = [(at, min(asked, spec.max_conversations)) for at, asked, _ in usage.changes]
    means = means_of_spans(rows, started_s, ended_s, NUM_SPANS)
    return EngineReport(
        name=spec.name,
        max_rows=spec.max_conversations,
        kv_tokens=spec.kv_blocks * spec.block_tokens,
        joined_s=joined_s - started_s,
        left_s=left_s - started_s,
        loss=loss,
        busy_s=usage.busy_s,
        row_s=sum(means) / NUM_SPANS * (ended_s - started_s),
        kv_share_s=usage.kv_share_s,
        kv_share_max=max((share for _, _, share in usage.changes), default=0.0),
        tail_idle_s=_idle_s(usage, max(tail_s, joined_s), left_s),
        rows=tuple(means),
        kv_shares=tuple(usage.mean_kv_shares(started_s, ended_s, NUM_SPANS)),
    )


def _idle_s(usage: EngineUsage, start_s: float, end_s: float) -> float:
    """Of the time from `start_s` to `end_s`, in how much nothing decoded."""
    ends = [at for at, _, _ in usage.changes[1:]] + [end_s]
    busy_s = sum(
        max(0.0, min(end, end_s) - max(begin, start_s))
        for (begin, rows, _), end in zip(usage.changes, ends, strict=False)
        if rows
    )
    return max(0.0, end_s - start_s) - busy_s if end_s > start_s else 0.0
