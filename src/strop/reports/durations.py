"""How long the calls of each tool took: metrics of the histogram -> one stacked plot a tool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from strop.evaluation.summary import BUCKETS, DURATIONS
from strop.reports.curves import Panel
from strop.reports.log import StageLog
from strop.reports.plots import Look

MAX_TOOLS = 6  # a server may have dozens; the page stays small


def duration_panels(stages: Sequence[StageLog]) -> list[Panel]:
    """A panel for each of the most called tools, buckets from quick to slow; each is named with its calls in all steps.

    A single slow call is too thin to be seen in a stack; its bucket and its number stand in the legend.
    """
    totals = _totals(stages)
    most_called = sorted(totals, key=lambda tool: (-totals[tool].total(), tool))
    return [_panel(tool, totals[tool], num_left_out=len(totals) - MAX_TOOLS) for tool in most_called[:MAX_TOOLS]]


def _panel(tool: str, of_tool: Counter[str], *, num_left_out: int) -> Panel:
    rest = f" {num_left_out} tools that are called less are left out here." if num_left_out > 0 else ""
    return Panel(
        title=f"Durations of {tool} calls",
        metrics={f"{DURATIONS}{tool}/{bucket}": _label(bucket, of_tool[bucket]) for bucket in BUCKETS if bucket in of_tool},
        note=f"Calls of a step by how long they took, the quickest at the bottom; beside each its calls in all steps.{rest}",
        look=Look.AREA,
    )


def _label(bucket: str, num: int) -> str:
    seconds = bucket.removesuffix("s").replace("over-", "over ").replace("-", " to ")
    return f"{seconds} s: {num:,}"


def _totals(stages: Sequence[StageLog]) -> dict[str, Counter[str]]:
    """Calls by tool and bucket, over all steps."""
    totals: dict[str, Counter[str]] = {}
    for stage in stages:
        for metrics in stage.steps.values():
            for name, num in metrics.items():
                if name.startswith(DURATIONS):
                    tool, _, bucket = name.removeprefix(DURATIONS).rpartition("/")
                    totals.setdefault(tool, Counter())[bucket] += round(num)
    return totals
