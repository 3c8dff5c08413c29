"""The stages of a run as a graph -> one SVG: what each stands on, and which is done, stale or to come.

Stages lie in columns, each behind all that it stands on; a line that passes a column has a lane there, as a stage has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from strop.reports.log import StageLog, StageState

_BOX, _LANE, _GAP, _MARGIN = 38.0, 52.0, 30.0, 8.0  # heights of a box and a lane, width between columns
_NAME_CHAR, _FACT_CHAR, _PADDING = 6.9, 5.8, 22.0  # widths at 12 and 11 px, on the generous side
_MARKS = {StageState.DONE: "✓ ", StageState.STALE: "⟳ ", StageState.BEGUN: "… ", StageState.TO_COME: ""}
_CLASSES = {StageState.DONE: "done", StageState.STALE: "stale", StageState.BEGUN: "begun", StageState.TO_COME: "to-come"}


@dataclass(frozen=True, slots=True)
class _Edge:
    """What one stage gives another: weights (`init`), rows (`data`), figures (`results`) or a judge."""

    source: str
    key: str
    target: str


@dataclass(slots=True)
class _Places:
    """Where stages lie, and where lines pass columns in which they have no stage."""

    column: dict[str, int]
    lane: dict[str, int] = field(default_factory=dict)
    passing: dict[tuple[str, str, int], int] = field(default_factory=dict)  # (target, key, column) -> lane


def draw(stages: Sequence[StageLog]) -> Markup:
    """`stages` as an <svg> element; empty where none says what it stands on, or there is only one."""
    by_name = {stage.name: stage for stage in stages}
    edges = [
        _Edge(source, key, stage.name)
        for stage in stages
        for key, sources in stage.inputs.items()
        for source in sources
        if source in by_name and source != stage.name
    ]
    if not edges:
        return Markup("")
    places = _place(stages, edges)
    lefts, widths = _columns(by_name, places.column)
    lanes = [*places.lane.values(), *places.passing.values()]
    middles = {lane: _MARGIN + _BOX / 2 + (lane - min(lanes)) * _LANE for lane in range(min(lanes), max(lanes) + 1)}
    width, height = lefts[-1] + widths[-1] + _MARGIN, middles[max(lanes)] + _BOX / 2 + _MARGIN
    lines = [_line(edge, places, lefts, widths, middles) for edge in edges]
    boxes = [
        _box(by_name[name], lefts[column], widths[column], middles[places.lane[name]]) for name, column in places.column.items()
    ]
    spoken = "; ".join(_spoken(stage) for stage in stages)
    return Markup(
        '<svg class="plot graph" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:.0f} {1:.0f}" style="max-width:{0:.0f}px"'
        ' role="img" aria-label="{2}">{3}</svg>'
    ).format(width, height, spoken, Markup("").join([*lines, *boxes]))


def _place(stages: Sequence[StageLog], edges: Sequence[_Edge]) -> _Places:
    """The longest way on keeps to the middle; what branches off takes the nearest free lane, evaluations above it first."""
    column = _column_of([stage.name for stage in stages], edges)
    ahead = _ways_on(column, edges)
    is_evaluation = {stage.name: stage.kind == "eval" for stage in stages}
    places = _Places(column={stage.name: column[stage.name] for stage in stages})
    for number in range(max(column.values()) + 1):
        taken: set[int] = set()
        here = [name for name in column if column[name] == number]
        passing = {(edge.target, edge.key): edge for edge in edges if column[edge.source] < number < column[edge.target]}
        waiting: list[tuple[int, int, str, _Edge | None]] = [
            (-ahead[name], order, name, None) for order, name in enumerate(here)
        ]
        waiting += [(-ahead[edge.target], len(here), edge.target, edge) for edge in passing.values()]
        for _, _, name, edge in sorted(waiting, key=lambda each: each[:2]):
            if edge is None:
                lane = _free_lane(_wanted(name, edges, places), taken, is_upward=is_evaluation[name])
                places.lane[name] = lane
            else:
                before = places.passing.get((edge.target, edge.key, number - 1), places.lane.get(edge.source, 0))
                lane = _free_lane(before, taken, is_upward=is_evaluation[edge.source])
                places.passing[edge.target, edge.key, number] = lane
            taken.add(lane)
    return places


def _column_of(names: Sequence[str], edges: Sequence[_Edge]) -> dict[str, int]:
    """Each stage right behind the last that it stands on; one that stands on none right before the first that needs it."""
    column = dict.fromkeys(names, 0)
    for _ in names:  # as many rounds as the longest way can have steps
        for edge in edges:
            column[edge.target] = min(max(column[edge.target], column[edge.source] + 1), len(names))
    for name in names:
        following = [column[edge.target] for edge in edges if edge.source == name]
        if following and not any(edge.target == name for edge in edges):
            column[name] = max(0, min(following) - 1)
    return column


def _ways_on(column: Mapping[str, int], edges: Sequence[_Edge]) -> dict[str, int]:
    """How many stages follow one on the longest way on."""
    ahead = dict.fromkeys(column, 0)
    for name in sorted(column, key=lambda each: column[each], reverse=True):
        ahead[name] = max((ahead[edge.target] + 1 for edge in edges if edge.source == name), default=0)
    return ahead


def _wanted(name: str, edges: Sequence[_Edge], places: _Places) -> int:
    """The lane nearest to the middle from which a line leads to `name`."""
    number = places.column[name] - 1
    lanes = [
        places.passing.get((name, edge.key, number), places.lane.get(edge.source, 0)) for edge in edges if edge.target == name
    ]
    return min(lanes, key=abs, default=0)


def _free_lane(wanted: int, taken: set[int], *, is_upward: bool) -> int:
    sign = -1 if is_upward else 1
    candidates: Iterator[int] = (wanted + sign * side * far for far in range(len(taken) + 1) for side in (1, -1))
    return next(lane for lane in candidates if lane not in taken)


def _columns(stages: Mapping[str, StageLog], column: Mapping[str, int]) -> tuple[list[float], list[float]]:
    """The left edge and the width of each column."""
    widths = [0.0] * (max(column.values()) + 1)
    for name, number in column.items():
        stage = stages[name]
        text = max(_NAME_CHAR * len(_MARKS[stage.state] + name), _FACT_CHAR * len(_facts(stage)))
        widths[number] = max(widths[number], text + _PADDING)
    lefts = [_MARGIN + sum(widths[:number]) + number * _GAP for number in range(len(widths))]
    return lefts, widths


def _line(
    edge: _Edge, places: _Places, lefts: Sequence[float], widths: Sequence[float], middles: Mapping[int, float]
) -> Markup:
    """From the right of one box to the left of another, level where it passes a column."""
    first, last = places.column[edge.source], places.column[edge.target]
    x, y = lefts[first] + widths[first], middles[places.lane[edge.source]]
    path = f"M{x:.1f} {y:.1f}"
    for number in range(first + 1, last + 1):
        lane = places.lane[edge.target] if number == last else places.passing[edge.target, edge.key, number]
        left, level = lefts[number], middles[lane]
        bend = (left - x) / 2
        path += f"C{x + bend:.1f} {y:.1f} {left - bend:.1f} {level:.1f} {left:.1f} {level:.1f}"
        if number < last:
            path += f"H{left + widths[number]:.1f}"
        x, y = left + widths[number], level
    return Markup('<path class="edge {}" d="{}"><title>{} → {} ({})</title></path>').format(
        edge.key, path, edge.source, edge.target, edge.key
    )


def _box(stage: StageLog, left: float, width: float, middle: float) -> Markup:
    box = Markup(
        '<g class="{}"><title>{}</title><rect class="box" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}" rx="7"/>'
    ).format(_CLASSES[stage.state], _spoken(stage), left, middle - _BOX / 2, width, _BOX)
    text = Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>')
    name = text.format("name", left + 11, middle - 3, _MARKS[stage.state] + stage.name)
    return box + name + text.format("facts", left + 11, middle + 12, _facts(stage)) + Markup("</g>")


def _facts(stage: StageLog) -> str:
    """The line below a stage's name."""
    facts = [stage.kind.replace("_", " ")] if stage.kind and stage.kind != stage.name else []
    if stage.steps:
        facts.append(f"{len(stage.steps)} step{'' if len(stage.steps) == 1 else 's'}")
    if stage.state is not StageState.DONE:
        facts.append(stage.state)
    return ", ".join(facts)


def _spoken(stage: StageLog) -> str:
    standing = [name for names in stage.inputs.values() for name in names]
    because = f" ({stage.why_stale})" if stage.why_stale else ""
    return f"{stage.name}: {stage.state}{because}" + (f", stands on {', '.join(standing)}" if standing else "")
