"""What engines did over a step, as in Figure 7 of rStar2-Agent (arXiv 2508.20722): of real steps and of simulated ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from strop.errors import RunError
from strop.reports.plots import STYLE, THEME
from strop.reports.scales import Unit, duration, figure, nice_ticks, tick_labels
from strop.runs import RunDirectory, read_json

MAX_ENGINES = 24  # that are drawn; of more, every so-manieth
_LEFT, _WIDTH, _TITLE, _AXIS = 90.0, 860.0, 20.0, 20.0
_ROW, _TALL_ROW, _GAP = 9.0, 16.0, 2.0
_FEW = 8  # engines, each of which gets a taller row


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One engine. Times are seconds since the step began."""

    name: str
    max_rows: int
    rows: Sequence[float]  # mean rows that decoded, of equal spans of the step
    joined_s: float
    left_s: float
    loss: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step."""

    title: str
    duration_s: float
    engines: Sequence[EngineRow]
    queue: Sequence[float] = ()  # mean rollouts that waited for an engine, of equal spans; empty where nobody counted


class _FromFile(BaseModel):
    """What is drawn of a file `step-<k>.timeline.json`; whatever else is in it is passed over."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class _EngineRecord(_FromFile):
    name: str
    max_rows: PositiveInt
    rows: tuple[NonNegativeFloat, ...]
    joined_s: float
    left_s: float
    loss: str


class _StepRecord(_FromFile):
    step: NonNegativeInt  # 0: of an evaluation, which has no steps
    duration_s: NonNegativeFloat
    engines: tuple[_EngineRecord, ...]
    queue: tuple[NonNegativeFloat, ...]


def read_timelines(run: RunDirectory, stage: str) -> list[Timeline]:
    """Of the first and the last step of a stage that wrote one; empty where none did.

    Raises:
        RunError: a file is damaged.
    """
    paths = sorted(run.stage(stage).timeline(0).parent.glob("step-*.timeline.json"))
    return [_timeline(_read(path), stage) for path in dict.fromkeys([*paths[:1], *paths[-1:]])]


def draw(timelines: Sequence[Timeline], *, is_standalone: bool = False) -> Markup:
    """All steps on one time axis, an engine the darker the more of its rows decode; with `is_standalone` for a file."""
    span = max((timeline.duration_s for timeline in timelines), default=0.0) or 1.0
    parts, top = [], 6.0
    for timeline in timelines:
        part, height = _step(timeline, top, span)
        parts.append(part)
        top += height
    parts.append(_axis(top, span))
    return Markup(
        '<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {:.0f} {:.0f}" role="img"'
        ' aria-label="rows that decode on each engine over time">{}{}</svg>'
    ).format(
        _LEFT + _WIDTH + 14,
        top + _AXIS,
        Markup("<style>{}</style>").format(Markup(THEME + STYLE)) if is_standalone else "",
        Markup("").join(parts),
    )


def _read(path: Path) -> _StepRecord:
    try:
        return _StepRecord.model_validate_json(json.dumps(read_json(path)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunError(
            f"{path}: not the timeline of a step: {place + ': ' if place else ''}{first['msg']}. Delete it, and the report does"
            " without this picture; nothing else reads it."
        ) from error


def _timeline(record: _StepRecord, stage: str) -> Timeline:
    engines = [EngineRow(**dict(each)) for each in record.engines]
    spans = sum(engine.max_rows * (engine.left_s - engine.joined_s) for engine in engines)
    rows = sum(sum(engine.rows) / max(1, len(engine.rows)) for engine in engines) * record.duration_s
    name = f"{stage}, step {record.step}" if record.step else stage
    lost = sum(bool(engine.loss) for engine in engines)
    title = f"{name}: {duration(record.duration_s)}, {figure(rows / spans if spans else 0.0, Unit.PERCENT)} of rows busy"
    title += f", {lost} {'engine' if lost == 1 else 'engines'} lost" if lost else ""
    return Timeline(title=title, duration_s=record.duration_s, engines=engines, queue=record.queue)


def _step(timeline: Timeline, top: float, span: float) -> tuple[Markup, float]:
    """The rows of one step below its title, and the height that they take."""
    parts = [Markup('<text class="title" x="0" y="{:.1f}">{}</text>').format(top + 12, timeline.title)]
    chosen = list(timeline.engines)[:: max(1, -(-len(timeline.engines) // MAX_ENGINES))]
    height = _TALL_ROW if len(chosen) <= _FEW else _ROW
    y = top + _TITLE
    for engine in chosen:
        parts.append(_label(engine.name, y, height))
        parts.append(_presence(engine, y, height, span))
        parts.append(_shades(engine.rows, engine.max_rows, timeline.duration_s / span, y, height, colour=0))
        if engine.loss:
            parts.append(_loss(engine, y, height, span))
        y += height + _GAP
    if any(timeline.queue):
        parts.append(_label(f"waiting ≤ {max(timeline.queue):.0f}", y, height))
        parts.append(_shades(timeline.queue, max(timeline.queue), timeline.duration_s / span, y, height, colour=1))
        y += height + _GAP
    end = _LEFT + _WIDTH * timeline.duration_s / span
    line = Markup('<line class="boundary" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>')
    parts.append(line.format(end, top + _TITLE, y))
    return Markup("").join(parts), y - top + 14


def _label(text: str, y: float, height: float) -> Markup:
    return Markup('<text x="0" y="{:.1f}">{}</text>').format(y + height / 2 + 4, text)


def _presence(engine: EngineRow, y: float, height: float, span: float) -> Markup:
    """A pale ground for as long as the engine was there."""
    begin, end = (_LEFT + _WIDTH * at / span for at in (engine.joined_s, engine.left_s))
    return Markup('<rect class="f6" opacity="0.12" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}"/>').format(
        begin, y, max(0.0, end - begin), height
    )


def _shades(means: Sequence[float], most: float, share: float, y: float, height: float, *, colour: int) -> Markup:
    """Equal spans on the first `share` of the width, as dark as their mean is of `most`; neighbours of one shade joined."""
    shades = [max(0.1, round(10 * mean / most) / 10) if mean > 0 else 0.0 for mean in means]
    width = _WIDTH * share / max(1, len(shades))
    parts, begin = [], 0
    for index in range(1, len(shades) + 1):
        if index < len(shades) and shades[index] == shades[begin]:
            continue
        if shades[begin] > 0:
            parts.append(
                Markup('<rect class="f{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}" opacity="{}"/>').format(
                    colour, _LEFT + begin * width, y, (index - begin) * width, height, shades[begin]
                )
            )
        begin = index
    return Markup("").join(parts)


def _loss(engine: EngineRow, y: float, height: float, span: float) -> Markup:
    """A cross where the engine was lost; why, for a pointer that rests on it."""
    x, middle, reach = _LEFT + _WIDTH * engine.left_s / span, y + height / 2, 4
    cross = "M{:.1f} {:.1f}l{} {}m0 -{}l-{} {}".format(x - reach, middle - reach, *[2 * reach] * 2, *[2 * reach] * 3)
    return Markup('<path class="line s4" d="{}"><title>{}</title></path>').format(cross, engine.loss)


def _axis(top: float, span: float) -> Markup:
    """Seconds since each step began."""
    ticks = [tick for tick in nice_ticks(0.0, span, count=6) if tick <= span * 1.001]
    labels = tick_labels(ticks, Unit.SECONDS) if len(ticks) > 1 else [duration(tick) for tick in ticks]
    parts = [Markup('<line class="axis" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(_LEFT, _LEFT + _WIDTH, top, top)]
    for tick, label in zip(ticks, labels, strict=True):
        x = _LEFT + _WIDTH * tick / span
        parts.append(Markup('<line class="axis" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>').format(x, top, top + 4))
        parts.append(Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>').format(x, top + 16, label))
    return Markup("").join(parts)
