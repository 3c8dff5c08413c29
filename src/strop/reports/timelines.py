"""Activity of the engines over a step, real or simulated, as in Figure 7 of rStar2-Agent (arXiv 2508.20722)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from strop.errors import RunError
from strop.reports.html import render
from strop.reports.number_format import Unit, duration, figure, nice_ticks, tick_labels
from strop.run_directory import RunDirectory, read_json

MAX_ENGINES = 24  # of more engines, every n-th is drawn
_LEFT, _WIDTH, _TITLE = 90.0, 860.0, 20.0
_ROW, _TALL_ROW, _GAP = 9.0, 16.0, 2.0
_FEW = 8  # up to so many engines get taller rows


class _FromFile(BaseModel):
    """The fields of a file `step-<k>.timeline.json` that are drawn; others are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class EngineRow(_FromFile):
    """One engine. Times are seconds since the step began."""

    name: str
    max_rows: PositiveInt
    rows: tuple[NonNegativeFloat, ...]  # mean rows that decoded, of equal spans of the step
    joined_s: float
    left_s: float
    loss: str = ""


class _StepRecord(_FromFile):
    step: NonNegativeInt  # 0: of an evaluation, which has no steps
    duration_s: NonNegativeFloat
    engines: tuple[EngineRow, ...]
    queue: tuple[NonNegativeFloat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step."""

    title: str
    duration_s: float
    engines: Sequence[EngineRow]
    queue: Sequence[float] = ()  # mean rollouts that waited for an engine, of equal spans; empty if not counted


def read_timelines(run: RunDirectory, stage: str) -> list[Timeline]:
    """Read the timelines of the first and the last step of a stage that has one.

    Raises:
        RunError: a file is damaged.
    """
    paths = sorted(run.stage(stage).timeline(0).parent.glob("step-*.timeline.json"))
    return [_timeline(_read(path), stage) for path in dict.fromkeys([*paths[:1], *paths[-1:]])]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Where one step is drawn: its title, then a row for each engine and one for the queue."""

    timeline: Timeline
    top: float
    span: float  # seconds of the axis

    @property
    def engines(self) -> Sequence[EngineRow]:
        """The engines that are drawn."""
        return self.timeline.engines[:: max(1, -(-len(self.timeline.engines) // MAX_ENGINES))]

    @property
    def height(self) -> float:
        """Of a row."""
        return _TALL_ROW if len(self.engines) <= _FEW else _ROW

    @property
    def most_waiting(self) -> float:
        return max(self.timeline.queue, default=0.0)

    @property
    def bottom(self) -> float:
        return self.y(len(self.engines) + (self.most_waiting > 0))

    def y(self, row: int) -> float:
        return self.top + _TITLE + row * (self.height + _GAP)

    def shades(self, means: Sequence[float], most: float) -> list[tuple[float, float, float]]:
        """Return begin, width and shade of equal spans of the step, shaded by mean / most; equal neighbours are joined."""
        shades = [max(0.1, round(10 * mean / most) / 10) if mean > 0 else 0.0 for mean in means]
        width = _WIDTH * self.timeline.duration_s / self.span / max(1, len(shades))
        found, begin = [], 0
        for shade, alike in itertools.groupby(shades):
            num = len(list(alike))
            if shade > 0:
                found.append((begin * width, num * width, shade))
            begin += num
        return found


def draw(timelines: Sequence[Timeline], *, is_standalone: bool = False) -> Markup:
    """Return all steps on one time axis; darker engines decode more rows. `is_standalone` adds the theme, for a file."""
    span = max((timeline.duration_s for timeline in timelines), default=0.0) or 1.0
    steps, bottom = list[_Step](), 6.0
    for timeline in timelines:
        steps.append(_Step(timeline=timeline, top=bottom, span=span))
        bottom = steps[-1].bottom + 14
    ticks = [tick for tick in nice_ticks(0.0, span, count=6) if tick <= span * 1.001]
    labels = tick_labels(ticks, Unit.SECONDS) if len(ticks) > 1 else [duration(tick) for tick in ticks]
    return render(
        "timelines.svg.j2",
        steps=steps,
        left=_LEFT,
        width=_WIDTH,
        bottom=bottom,
        x=lambda at_s: _LEFT + _WIDTH * at_s / span,
        ticks=list(zip(ticks, labels, strict=True)),
        is_standalone=is_standalone,
    )


def _read(path: Path) -> _StepRecord:
    try:
        return _StepRecord.model_validate_json(json.dumps(read_json(path)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunError(
            f"{path}: not the timeline of a step: {place + ': ' if place else ''}{first['msg']}. Delete it: only"
            " the report reads it."
        ) from error


def _timeline(record: _StepRecord, stage: str) -> Timeline:
    engines = record.engines
    spans = sum(engine.max_rows * (engine.left_s - engine.joined_s) for engine in engines)
    rows = sum(sum(engine.rows) / max(1, len(engine.rows)) for engine in engines) * record.duration_s
    name = f"{stage}, step {record.step}" if record.step else stage
    lost = sum(bool(engine.loss) for engine in engines)
    title = f"{name}: {duration(record.duration_s)}, {figure(rows / spans if spans else 0.0, Unit.PERCENT)} of rows busy"
    title += f", {lost} {'engine' if lost == 1 else 'engines'} lost" if lost else ""
    return Timeline(title=title, duration_s=record.duration_s, engines=engines, queue=record.queue)
