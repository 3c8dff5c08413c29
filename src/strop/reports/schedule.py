"""What the engines did over a simulated step, policy beside policy: rStar2-Agent's Figure 7 (arXiv 2508.20722) from figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from strop.reports.plots import STYLE, THEME
from strop.reports.scales import duration, figure
from strop.rollout.scheduling import EngineUsage
from strop.rollout.simulation.simulate import Outcome

_MAX_ENGINES = 24  # that are drawn; of more, every so-manieth
_BINS = 240
_LEFT, _WIDTH, _ROW, _GAP = 90.0, 860.0, 9.0, 2.0

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}
body{{margin:2rem auto;max-width:1000px;padding:0 1rem;background:var(--page);color:var(--ink);font:15px system-ui,sans-serif}}
table{{border-collapse:collapse;margin:1rem 0}}td,th{{padding:.25rem .9rem .25rem 0;text-align:right}}
td:first-child,th:first-child{{text-align:left}}tr+tr{{border-top:1px solid var(--line)}}
</style></head><body><h1>{title}</h1>{timeline}<table>{rows}</table></body></html>
"""


def draw_timelines(outcomes: Mapping[str, Outcome]) -> Markup:
    """A row an engine, as dark as it has rows that decode, on one time axis for all policies; an <svg> of its own."""
    span = max(outcome.makespan_s for outcome in outcomes.values())
    most = max((rows for each in outcomes.values() for usage in each.usage.values() for _, rows, _ in usage.changes), default=1)
    parts, top = [], 6.0
    for name, outcome in outcomes.items():
        parts.append(
            Markup('<text class="title" x="0" y="{}">{}: {}, engines busy {:.0%} of the time</text>').format(
                top + 12, name, duration(outcome.makespan_s), outcome.busy_share
            )
        )
        top += 20
        chosen = list(outcome.usage.items())[:: max(1, -(-len(outcome.usage) // _MAX_ENGINES))]
        for engine, usage in chosen:
            parts.append(Markup('<text x="0" y="{}">{}</text>').format(top + _ROW, engine))
            parts.append(_row(usage, top, span, max(1, most)))
            top += _ROW + _GAP
        end = _LEFT + _WIDTH * outcome.makespan_s / span
        parts.append(
            Markup('<line class="boundary" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>').format(
                end, top - len(chosen) * (_ROW + _GAP), top
            )
        )
        top += 14
    return Markup(
        '<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {:.0f} {:.0f}" role="img"'
        ' aria-label="rows that decode on each engine over time"><style>{}</style>{}</svg>'
    ).format(_LEFT + _WIDTH + 10, top, Markup(THEME + STYLE), Markup("").join(parts))


def _row(usage: EngineUsage, top: float, span: float, most: int) -> Markup:
    """Mean rows of each of equal spans of time, neighbours of one shade joined."""
    shades = [max(0.1, round(10 * mean / most) / 10) if mean else 0.0 for mean in _mean_rows(usage, span)]
    width = _WIDTH / _BINS
    parts, begin = [], 0
    for index in range(1, _BINS + 1):
        if index < _BINS and shades[index] == shades[begin]:
            continue
        if shades[begin] > 0:
            parts.append(
                Markup('<rect class="f0" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}" opacity="{}"/>').format(
                    _LEFT + begin * width, top, (index - begin) * width, _ROW, shades[begin]
                )
            )
        begin = index
    return Markup("").join(parts)


def _mean_rows(usage: EngineUsage, span: float) -> list[float]:
    width = span / _BINS
    totals = [0.0] * _BINS
    ends = [at for at, _, _ in usage.changes[1:]]
    for (begin, rows, _), end in zip(usage.changes, ends, strict=False):
        at = begin
        while rows and at < end:
            index = min(_BINS - 1, int(at / width))
            until = end if index == _BINS - 1 else min(end, (index + 1) * width)
            totals[index] += rows * (until - at)
            at = until if until > at else end
    return [total / width for total in totals]


def schedule_table(outcomes: Mapping[str, Outcome], *, bound_s: float) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """The same figures of every policy: column names, and a row a figure."""
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
    return ("", *outcomes), rows


def schedule_page(title: str, outcomes: Mapping[str, Outcome], *, bound_s: float) -> str:
    """The timelines and the table as one page that needs no other file."""
    header, table = schedule_table(outcomes, bound_s=bound_s)
    rows = [Markup("<tr>{}</tr>").format(Markup("").join(Markup("<th>{}</th>").format(name) for name in header))]
    rows += [Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(cell) for cell in row)) for row in table]
    return str(
        Markup(_PAGE).format(
            title=title, style=Markup(THEME + STYLE), timeline=draw_timelines(outcomes), rows=Markup("").join(rows)
        )
    )
