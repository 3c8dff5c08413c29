"""What the selections and updates of a step amount to: metrics, the time of its phases, and what went wrong, in words."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.algorithms.protocol import Selection
from strop.pipelines.ledger import void_reasons
from strop.training.protocol import UpdateReport
from strop.types import Group


def selection_metrics(selections: Sequence[Selection]) -> dict[str, float]:
    """How many groups and rollouts were learnt from."""
    return {
        "groups/used": float(sum(bool(selection.kept) for selection in selections)),
        "groups/rollouts_used": float(sum(len(selection.kept) for selection in selections)),
    }


def update_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Means over the step's updates; nothing of an empty step, so that a curve shows a hole and not a zero."""
    num_skipped = sum(report.is_skipped for report in reports)
    reports = [report for report in reports if not report.is_skipped]
    if not reports:
        return {"update/skipped": float(num_skipped)}
    num = len(reports)
    metrics = {
        "update/skipped": float(num_skipped),
        "update/loss": sum(report.loss for report in reports) / num,
        "update/grad_norm": sum(report.grad_norm for report in reports) / num,
        "update/learning_rate": reports[-1].learning_rate,
    }
    for name in reports[0].statistics:
        values = [report.statistics[name] for report in reports]
        is_maximum = name.endswith("_max")
        metrics[f"policy/{name}"] = max(values) if is_maximum else sum(values) / num
    return metrics


def not_made(num: int, why: str, *, update: int) -> list[UpdateReport]:
    """Reports of `num` updates that a step without anything to learn from leaves out; `update` were done before."""
    nothing = UpdateReport(
        update=update, loss=math.nan, grad_norm=math.nan, learning_rate=math.nan, statistics={}, skip_reason=why
    )
    return [nothing] * num


def update_rows(reports: Sequence[UpdateReport], *, role: str = "policy") -> list[dict[str, Any]]:
    """Each update of a step by itself, for updates.jsonl: what `update_metrics` and `cost_metrics` say of it alone."""
    return [
        {"role": role, "place": place, "update": report.update, **update_metrics([report]), **cost_metrics([report])}
        | ({"why_skipped": report.skip_reason} if report.is_skipped else {})
        for place, report in enumerate(reports, start=1)
    ]


def cost_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """What the step's updates cost; {} where none was made."""
    costs = [report.cost for report in reports if report.cost is not None]
    if not costs:
        return {}
    time_s = sum(cost.time_s for cost in costs)
    flops_per_s = sum(cost.flops for cost in costs) / time_s
    return {
        "update/tokens_per_s": sum(cost.tokens for cost in costs) / time_s,
        "update/flops_per_s": flops_per_s,
        "machine/flop_utilisation": flops_per_s / costs[-1].peak_flops_per_s,
        "machine/peak_memory_mib": max(cost.peak_memory_mib for cost in costs),
    }


def why_void(groups: Sequence[Group]) -> list[str]:
    """A sentence where no rollout of the step was scored."""
    if any(group.trajectories for group in groups):
        return []
    return [
        "every rollout is void: engine, tools or judges fail, or nobody can judge it; the ledger beside the step's rollouts has"
        " the reason of each."
    ]


def why_some_are_void(groups: Sequence[Group], rollouts: Path) -> list[str]:
    """A sentence where rollouts of the step are void, with the reason met most often in the ledger of that rollouts file."""
    num_void = sum(group.num_void for group in groups)
    reasons = Counter(void_reasons(rollouts)).most_common(1) if num_void else []
    if not reasons:
        return []
    num = num_void + sum(len(group.trajectories) for group in groups)
    return [f"{num_void} of {num} rollouts are void, most often because: {reasons[0][0].rstrip('.')}."]


def why_calls_fail(groups: Sequence[Group]) -> list[str]:
    """A sentence where tools were called and no call of the step came off, with what the policy was shown last."""
    of_each = [each.trajectory.calls for group in groups for each in group.trajectories]
    calls = [call for calls in of_each for call in calls if call.outcome.is_counted]
    if not calls or not all(call.outcome.is_error for call in calls):
        return []
    return [f"every one of {len(calls)} tool calls failed; the last said {calls[-1].text[:120]!r}."]


def how_many_cut_off(groups: Sequence[Group]) -> str:
    """A sentence, with a space before it, where rollouts ran out of tokens before the policy ended them; else empty."""
    scored = [each.trajectory for group in groups for each in group.trajectories]
    num = sum(each.is_truncated for each in scored)
    return f" {num} of {len(scored)} rollouts {'was' if num == 1 else 'were'} cut off at sampling.max_tokens." if num else ""


def why_no_progress(groups: Sequence[Group], reports: Sequence[UpdateReport]) -> list[str]:
    """Why updates that had something to learn from taught nothing, or will soon; empty when all is well."""
    problems = why_calls_fail(groups)
    problems += [f"update {report.update} was skipped: {report.skip_reason}" for report in reports if report.is_skipped]
    if reports and all(report.grad_norm == 0 for report in reports):
        problems.append("the gradient is zero.")
    return problems


class Clock:
    """Times the phases of a step."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed

    @property
    def total(self) -> float:
        """Seconds until the last lap."""
        return self._last - self._start
