"""The table and the timelines of a simulated step, one policy next to the other: rStar2-Agent (arXiv 2508.20722), Figure 7."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from strop.reports.html import render
from strop.reports.number_format import Table, duration, figure
from strop.reports.timelines import EngineRow, Timeline, draw
from strop.simulation.simulate import Outcome

_BINS = 240


def draw_timelines(outcomes: Mapping[str, Outcome], *, is_standalone: bool = True) -> Markup:
    """Draw one row for each engine, darker the more rows decode, on one time axis for all policies."""
    return draw([_timeline(name, outcome) for name, outcome in outcomes.items()], is_standalone=is_standalone)


def _timeline(name: str, outcome: Outcome) -> Timeline:
    end_s, most = outcome.makespan_s, _most_rows(outcome)
    return Timeline(
        title=f"{name}: {duration(end_s)}, engines busy {outcome.busy_share:.0%} of the time",
        duration_s=end_s,
        engines=[
            EngineRow(name=engine, max_rows=most, rows=tuple(usage.rows.means(end_s, _BINS)), joined_s=0.0, left_s=end_s)
            for engine, usage in outcome.usage.items()
        ],
    )


def _most_rows(outcome: Outcome) -> int:
    """The most rows that an engine decoded at once."""
    return max(1, *(int(usage.rows.max) for usage in outcome.usage.values()))


def schedule_table(outcomes: Mapping[str, Outcome], *, bound_s: float) -> Table:
    """Return one row for each metric, one column for each policy."""
    each = list(outcomes.values())
    rows: list[tuple[str, ...]] = [
        ("makespan", *(duration(one.makespan_s) for one in each)),
        ("over the lower bound", *(f"{one.makespan_s / bound_s:.3f}" for one in each)),
        ("engines busy", *(f"{one.busy_share:.1%}" for one in each)),
        ("rows that decode", *(f"{one.row_share:.1%}" for one in each)),
        ("idle at the end of the step", *(f"{one.tail_idle_share:.1%}" for one in each)),
        ("work of full engines, share of time", *(f"{bound_s / one.makespan_s:.1%}" for one in each)),
        ("KV memory in use, at most", *(f"{one.peak_kv_share:.1%}" for one in each)),
        ("evictions", *(figure(one.evictions) for one in each)),
        ("recomputed tokens", *(figure(one.recomputed_tokens) for one in each)),
        ("prefilled tokens", *(figure(one.prefilled_tokens) for one in each)),
        ("tool calls in the queue, at most", *(figure(one.max_tools_queued) for one in each)),
        ("mean wait for a tool", *(duration(one.ledger.tool_wait_s / max(1, one.ledger.tool_turns)) for one in each)),
        ("mean wait for an engine", *(duration(one.ledger.queue_wait_s / max(1, one.ledger.offered)) for one in each)),
        ("longest rollout", *(duration(one.ledger.longest_rollout_s) for one in each)),
        ("scheduling, µs an event", *(f"{one.scheduling_us_per_event:.1f}" for one in each)),
    ]
    return Table(columns=("", *outcomes), rows=tuple(rows))


def schedule_page(title: str, outcomes: Mapping[str, Outcome], *, bound_s: float) -> str:
    """Return the timelines and the table as one self-contained page."""
    return render(
        "schedule.html.j2",
        title=title,
        figures=schedule_table(outcomes, bound_s=bound_s),
        timelines=draw_timelines(outcomes, is_standalone=False),
        num_rows=max(map(_most_rows, outcomes.values())),
    )
