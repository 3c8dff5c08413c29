"""What a scheduler counts, and the report of one batch of rollouts: engine use, queue, memory and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.engine.protocol import CompletionRequest
    from strop.rollout.scheduler.admission import EngineSpec
    from strop.types import Completion

NUM_SPANS = 240  # of a timeline


@dataclass(slots=True)
class Ledger:
    """Counts since the scheduler began. After every event, offered + branched = ended + rollouts that are still live."""

    offered: int = 0
    branched: int = 0
    ended: int = 0
    runs: Counter[str] = field(default_factory=Counter)  # by `RunReason`
    turns: int = 0  # that came back and counted
    sampled_tokens: int = 0  # of these turns, and of pieces of others
    observation_tokens: int = 0
    tool_turns: int = 0  # turns whose tools have answered
    lost_turns: int = 0  # completions that an engine was sampling when it died
    stale_answers: int = 0  # completions that came back after their engine was lost or their rollout had ended; not counted
    branches_queued: int = 0  # for which their parent's engine had no room at once
    recomputed_tokens: int = 0  # that an engine had computed before: after evictions and lost engines
    moved_tokens: int = 0  # of contexts that an engine with less to compute computed again
    tool_wait_s: float = 0.0  # between the end of a turn and the start of its tools
    tool_run_s: float = 0.0  # between the start of the tools and their last answer
    queue_wait_s: float = 0.0  # between the offer and the first run
    longest_rollout_s: float = 0.0  # between the first run and the end
    longest_rollout_tokens: int = 0  # of one response, observations included
    evictions: int = 0  # turns whose conversation was no longer in its engine's cache
    request_tokens: int = 0  # of all turns
    cached_tokens: int = 0  # of these
    drafted_tokens: int = 0
    branch_tokens: int = 0  # that branches share with their parents
    branch_cached_tokens: int = 0  # of these

    def count(self, request: CompletionRequest, completion: Completion) -> None:
        """A whole turn came back."""
        self.request_tokens += len(request.ids)
        self.cached_tokens += completion.cached_tokens
        self.drafted_tokens += completion.drafted_tokens

    def as_metrics(self, *names: str) -> dict[str, float]:
        """Return the metrics `scheduler/*` of these counts; of all if none is named."""
        names = names or tuple(name for name in self.__dataclass_fields__ if name != "runs")
        return {f"scheduler/{name}": float(getattr(self, name)) for name in names}


@dataclass(slots=True, eq=False)
class StepFunction:
    """A value over time that changes in steps; 0 before the first change."""

    changes: list[tuple[float, float]] = field(default_factory=list)  # (time, new value)

    def set(self, at_s: float, value: float) -> None:
        self.changes.append((at_s, value))

    def since(self, start_s: float) -> StepFunction:
        """The same function, with `start_s` as time 0."""
        before = [value for at_s, value in self.changes if at_s < start_s][-1:]
        later = [(at_s - start_s, value) for at_s, value in self.changes if at_s >= start_s]
        return StepFunction([*((0.0, value) for value in before), *later])

    def forget(self) -> None:
        """Drop all changes but the last."""
        del self.changes[:-1]

    @property
    def max(self) -> float:
        return max((value for _, value in self.changes), default=0.0)

    def positive_s(self, start_s: float, end_s: float) -> float:
        """How long the value is above 0 between two times."""
        return sum(last - first for first, last, _ in self._steps(start_s, end_s))

    def last_positive_s(self, end_s: float) -> float:
        """The last time up to `end_s` at which the value is above 0; 0 if it never is."""
        return max((last for _, last, _ in self._steps(0.0, end_s)), default=0.0)

    def integral(self, end_s: float) -> float:
        return sum((last - first) * value for first, last, value in self._steps(0.0, end_s))

    def means(self, end_s: float, num_spans: int) -> list[float]:
        """The mean value in each of `num_spans` equal spans of time."""
        width = end_s / num_spans
        totals = [0.0] * num_spans
        if width <= 0:
            return totals
        for first, last, value in self._steps(0.0, end_s):
            for index in range(int(first / width), min(num_spans, int(last / width) + 1)):
                totals[index] += value * max(0.0, min(last, (index + 1) * width) - max(first, index * width))
        return [total / width for total in totals]

    def _steps(self, start_s: float, end_s: float) -> Iterator[tuple[float, float, float]]:
        """(begin, end, value) of each step with a value above 0, cut to `start_s` and `end_s`."""
        for (begin, value), (end, _) in zip(self.changes, [*self.changes[1:], (end_s, 0.0)], strict=False):
            first, last = max(begin, start_s), min(end, end_s)
            if value and first < last:
                yield first, last, value


@dataclass(slots=True, eq=False)
class EngineUsage:
    """What one engine did over time."""

    joined_s: float
    left_s: float | None = None  # when it was lost
    rows: StepFunction = field(default_factory=StepFunction)  # completions that it samples
    kv_share: StepFunction = field(default_factory=StepFunction)  # of its KV memory that is reserved; may exceed 1

    def record(self, now_s: float, rows: int, kv_share: float) -> None:
        self.rows.changes.append((now_s, rows))  # not by `set`: it happens at nearly every event
        self.kv_share.changes.append((now_s, kv_share))

    def since(self, start_s: float) -> EngineUsage:
        """The same with `start_s` as time 0."""
        left_s = None if self.left_s is None else self.left_s - start_s
        rows, kv_share = self.rows.since(start_s), self.kv_share.since(start_s)
        return EngineUsage(joined_s=max(0.0, self.joined_s - start_s), left_s=left_s, rows=rows, kv_share=kv_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine's part in a batch. Times are in seconds since the batch began."""

    spec: EngineSpec
    usage: EngineUsage
    left_s: float  # or the end of the batch
    loss: str  # why the engine was removed; empty if it was not

    @property
    def present_s(self) -> float:
        return self.left_s - self.usage.joined_s

    @property
    def row_s(self) -> float:
        return self.usage.rows.integral(self.left_s)

    @property
    def possible_row_s(self) -> float:
        """What `row_s` would be if all rows decoded all the time."""
        return self.present_s * self.spec.max_conversations

    def tail_idle_s(self, tail_s: float) -> float:
        """How long it sampled nothing after `tail_s`."""
        start_s = min(self.left_s, max(tail_s, self.usage.joined_s))
        return self.left_s - start_s - self.usage.rows.positive_s(start_s, self.left_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """One batch of rollouts."""

    policy: str
    duration_s: float
    engines: tuple[EngineReport, ...]
    ledger: Ledger
    queue: StepFunction  # rollouts that wait for an engine
    lost_before: tuple[str, ...]  # engines that were lost between the previous batch and this one

    def as_metrics(self) -> dict[str, float]:
        """Return the metrics `scheduler/*` of a step. Shares of time are left out if nothing was sampled."""
        ledger = self.ledger
        metrics = {
            "scheduler/engines": float(len(self.engines)),
            "scheduler/engines_lost": float(sum(bool(engine.loss) for engine in self.engines) + len(self.lost_before)),
            "scheduler/restarts": float(ledger.runs["restart"]),
            "scheduler/queue_max": self.queue.max,
            **ledger.as_metrics("evictions", "drafted_tokens", "lost_turns", "recomputed_tokens", "moved_tokens"),
            **ledger.as_metrics("branches_queued", "longest_rollout_s", "longest_rollout_tokens"),
        }
        if ledger.request_tokens:
            metrics["scheduler/cached_token_share"] = ledger.cached_tokens / ledger.request_tokens
        if ledger.branch_tokens:
            metrics["scheduler/branch_cached_token_share"] = ledger.branch_cached_tokens / ledger.branch_tokens
        if ledger.offered:
            metrics["scheduler/queue_wait_mean_s"] = ledger.queue_wait_s / ledger.offered
        if ledger.tool_turns and ledger.turns:  # of batches that steps share, a tool's turn may have ended in the report before
            metrics["scheduler/tool_wait_mean_s"] = ledger.tool_wait_s / ledger.turns
        if ledger.tool_turns:
            metrics["scheduler/tool_run_mean_s"] = ledger.tool_run_s / ledger.tool_turns
        return metrics | self._shares()

    def _shares(self) -> dict[str, float]:
        engines, present_s = self.engines, sum(engine.present_s for engine in self.engines)
        if present_s <= 0 or not self.ledger.turns:
            return {}
        tail_s = self.queue.changes[-1][0] if self.queue.max else 0.0  # when the last waiting rollout started
        shares = {
            "row_share": sum(each.row_s for each in engines) / sum(each.possible_row_s for each in engines),
            "busy_share": sum(each.usage.rows.positive_s(0.0, each.left_s) for each in engines) / present_s,
            "tail_idle_share": sum(each.tail_idle_s(tail_s) for each in engines) / present_s,
            "queue_mean": self.queue.integral(self.duration_s) / self.duration_s,
        }
        if self.policy != "static":  # which reserves nothing
            shares["kv_share_mean"] = sum(each.usage.kv_share.integral(each.left_s) for each in engines) / present_s
            shares["kv_share_max"] = max(each.usage.kv_share.max for each in engines)
        if len(engines) > 1:
            shares |= {f"row_share/{each.spec.name}": each.row_s / (each.possible_row_s or 1.0) for each in engines}
        return {f"scheduler/{name}": share for name, share in shares.items()}

    def as_timeline(self) -> Mapping[str, Any]:
        """Return what the report draws of the batch, as JSON: means of equal spans of time."""

        def means(function: StepFunction, digits: int) -> list[float]:
            return [round(mean, digits) for mean in function.means(self.duration_s, NUM_SPANS)]

        return {
            "policy": self.policy,
            "duration_s": round(self.duration_s, 6),
            "engines": [
                {
                    "name": engine.spec.name,
                    "max_rows": engine.spec.max_conversations,
                    "kv_tokens": engine.spec.kv_blocks * engine.spec.block_tokens,
                    "joined_s": round(engine.usage.joined_s, 6),
                    "left_s": round(engine.left_s, 6),
                    "loss": engine.loss,
                    "rows": means(engine.usage.rows, 3),
                    "kv_shares": means(engine.usage.kv_share, 4),
                }
                for engine in self.engines
            ],
            "queue": means(self.queue, 2),
        }
