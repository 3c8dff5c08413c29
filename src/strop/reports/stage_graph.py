"""The stages of a run as a graph -> one SVG: what each depends on, and which is done, stale or to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from strop.reports.html import render
from strop.reports.log import StageLog, StageState
from strop.reports.scales import counted

_BOX, _LANE, _GAP, _MARGIN = 38.0, 52.0, 30.0, 8.0  # heights of a box and a lane, width between columns
_NAME_CHAR, _FACT_CHAR, _PADDING = 6.9, 5.8, 22.0  # widths at 12 and 11 px, on the generous side
_MARKS = {StageState.DONE: "✓ ", StageState.STALE: "⟳ ", StageState.BEGUN: "… ", StageState.TO_COME: ""}


@dataclass(frozen=True, slots=True)
class _Edge:
    """What one stage gives another: weights (`init`), rows (`data`), metrics (`results`) or a judge."""

    source: str
    key: str
    target: str


@dataclass(frozen=True, slots=True)
class _Box:
    """Where a stage is drawn."""

    left: float
    width: float
    middle: float


def draw(stages: Sequence[StageLog]) -> Markup:
    """Return `stages` as an <svg> element; empty if no stage depends on another."""
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
    places = _places(by_name, edges)
    width = max(place.left + place.width for place in places.values()) + _MARGIN
    height = max(place.middle for place in places.values()) + _BOX / 2 + _MARGIN
    return render(
        "stage_graph.svg.j2",
        by_name=by_name,
        edges=edges,
        places=places,
        width=width,
        height=height,
        box=_BOX,
        marks=_MARKS,
        path=_path,
        facts=_facts,
        spoken=_spoken,
    )


def _places(stages: Mapping[str, StageLog], edges: Sequence[_Edge]) -> dict[str, _Box]:
    """Place each stage in the column after the last that it depends on, in the first free lane.

    A lane stays reserved up to the last stage that reads the result, so that no line crosses a box of its own lane.
    """
    column = dict.fromkeys(stages, 0)
    for _ in stages:  # as many rounds as the longest path can have steps
        for edge in edges:
            column[edge.target] = min(max(column[edge.target], column[edge.source] + 1), len(stages))
    widths = [0.0] * (max(column.values()) + 1)
    for name, number in column.items():
        stage = stages[name]
        text = max(_NAME_CHAR * len(_MARKS[stage.state] + name), _FACT_CHAR * len(_facts(stage)))
        widths[number] = max(widths[number], text + _PADDING)
    reserved: dict[int, int] = {}  # lane -> the last column in which it is in use
    places = {}
    for name in sorted(column, key=column.__getitem__):
        number = column[name]
        lane = next(lane for lane in range(len(stages)) if reserved.get(lane, -1) < number)
        reserved[lane] = max([number, *(column[edge.target] - 1 for edge in edges if edge.source == name)])
        left = _MARGIN + sum(widths[:number]) + number * _GAP
        places[name] = _Box(left, widths[number], _MARGIN + _BOX / 2 + lane * _LANE)
    return places


def _path(source: _Box, target: _Box) -> str:
    """Return a line from the right of one box, level up to the last gap, to the left of the other."""
    start, bend = source.left + source.width, target.left - _GAP / 2
    path = f"M{start:.1f} {source.middle:.1f}H{target.left - _GAP:.1f}C{bend:.1f} {source.middle:.1f}"
    return f"{path} {bend:.1f} {target.middle:.1f} {target.left:.1f} {target.middle:.1f}"


def _facts(stage: StageLog) -> str:
    """Return the line below a stage's name."""
    facts = [stage.kind.replace("_", " ")] if stage.kind and stage.kind != stage.name else []
    facts += [counted(len(stage.steps), "step")] if stage.steps else []
    facts += stage.hours
    facts += [counted(len(stage.nodes), "node")] if stage.nodes else []
    facts += [stage.state] if stage.state is not StageState.DONE else []
    return ", ".join(facts)


def _spoken(stage: StageLog) -> str:
    inputs = [name for names in stage.inputs.values() for name in names]
    because = f" ({stage.why_stale})" if stage.why_stale else ""
    depends = f", depends on {', '.join(inputs)}" if inputs else ""
    return f"{stage.name}: {stage.state}{because}{depends}" + "".join(f"; on {node}" for node in stage.nodes)
