"""One drawing across the RL stages of a run: accuracy, length and truncation on one axis of steps.

As in Figure 8 of rStar2-Agent (arXiv 2508.20722), whose stages differ in how long a response may be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from strop.reports.log import RunLog, StageLog
from strop.reports.panels import offsets_of
from strop.reports.plots import Point, Series, thinned
from strop.reports.scales import Unit, figure, nice_ticks, tick_labels

_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 62.0, 16.0, 42.0
_HEIGHT, _GAP, _AXIS, _LEGEND = 118.0, 34.0, 20.0, 24.0
_CHAR = 5.9  # width of one character at 11 px
_EVALUATED = 2  # colour of evaluations


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One axis of figures: lines of what each step logged, and a dot for each evaluation."""

    title: str
    unit: Unit
    metrics: Mapping[str, str]  # key in metrics.jsonl -> name of its line; the first is owed
    evaluated: str  # key in an evaluation's result
    interval: tuple[str, str] | None = None


_ROWS = (
    _Row(
        title="accuracy",
        unit=Unit.PERCENT,
        metrics={"rollout/accuracy": "training tasks", "validation/accuracy": "held-out tasks, while it trains"},
        evaluated="accuracy",
        interval=("accuracy_low", "accuracy_high"),
    ),
    _Row(
        title="response length, tokens",
        unit=Unit.PLAIN,
        metrics={"rollout/length_tokens_mean": "training tasks", "validation/length_tokens_mean": "held-out tasks"},
        evaluated="length_tokens_mean",
    ),
    _Row(
        title="truncated",
        unit=Unit.PERCENT,
        metrics={"rollout/truncated_fraction": "training tasks", "validation/truncated_fraction": "held-out tasks"},
        evaluated="truncated_fraction",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dot:
    """What an evaluation found of the policy at `x`."""

    x: float
    stage: str
    figures: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class _Scene:
    """What all rows share: the stages on their common axis of steps, and the evaluations."""

    stages: Sequence[StageLog]
    offsets: Sequence[int]
    labels: Sequence[str]
    dots: Sequence[_Dot]
    parts: list[Markup] = field(default_factory=list)

    @property
    def span(self) -> Point:
        """From before the first step, where the policy is that of the cold start, to the last."""
        return self.begin(0) - 0.5, self.offsets[-1] + max(self.stages[-1].steps) + 0.5

    def begin(self, index: int) -> float:
        """Between the last step of a stage and the first of the next."""
        return self.offsets[index] + min(self.stages[index].steps) - 0.5

    def x(self, value: float) -> float:
        low, high = self.span
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low)


def stages_in_sequence(log: RunLog) -> list[StageLog]:
    """Stages of rollouts that have logged steps and are not stale, each of which the last stands on: the longest such row.

    Of rows that are equally long the later one. Stages that stand side by side do not follow each other.
    """
    standing: dict[str, set[str]] = {}  # on which stages each stands, however far
    for stage in log.stages:
        parents = {stage.init, *(name for names in stage.inputs.values() for name in names)} & standing.keys()
        standing[stage.name] = parents.union(*(standing[name] for name in parents))
    stepped = [stage for stage in log.stages if stage.is_stepped and stage.steps and not stage.why_stale]
    rows = [[each for each in stepped if each is last or each.name in standing[last.name]] for last in reversed(stepped)]
    return max(rows, key=len, default=[])


def draw(log: RunLog) -> Markup:
    """The drawing as an <svg> element; empty where no two stages of rollouts with steps follow each other."""
    stages = stages_in_sequence(log)
    if len(stages) < 2:
        return Markup("")
    offsets = offsets_of(stages)
    scene = _Scene(
        stages=stages, offsets=offsets, labels=[_label(log, stage) for stage in stages], dots=_dots(log, stages, offsets)
    )
    top = _TOP
    for row in _ROWS:
        _draw_row(scene, row, top)
        top += _HEIGHT + _GAP
    bottom = top - _GAP
    _draw_boundaries(scene, bottom)
    _draw_steps(scene, bottom)
    _draw_legend(scene, bottom + _AXIS + _LEGEND)
    return Markup(
        '<svg class="plot across" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">'
        "{}</svg>"
    ).format(_WIDTH, bottom + _AXIS + _LEGEND + 8, _spoken(scene), Markup("").join(scene.parts))


def _label(log: RunLog, stage: StageLog) -> str:
    """The stage, and how long its responses may be."""
    most = log.recipe.get(f"stages.{stage.name}.sampling.max_tokens", "")
    return f"{stage.name}, {most} tokens" if most.isdigit() else stage.name


def _dots(log: RunLog, stages: Sequence[StageLog], offsets: Sequence[int]) -> list[_Dot]:
    """Evaluations of what a stage made, at its last step, and of what it began with, before its first."""
    at: dict[str, float] = {}
    for stage, offset in zip(stages, offsets, strict=True):
        at.setdefault(stage.init, offset + min(stage.steps) - 0.5)
        at[stage.name] = offset + max(stage.steps)
    of = {stage.name: stage.init for stage in log.stages}
    return [
        _Dot(x=at[of[each.stage]], stage=each.stage, figures=each.figures)
        for each in log.current_evaluations
        if not each.condition and of.get(each.stage) in at
    ]


def _draw_row(scene: _Scene, row: _Row, top: float) -> None:
    lines = {key: _lines(scene, key) for key in row.metrics}
    dots = [dot for dot in scene.dots if row.evaluated in dot.figures]
    values = [y for of_stages in lines.values() for points in of_stages for _, y in points] + [
        dot.figures[row.evaluated] for dot in dots
    ]
    values += [dot.figures[key] for dot in dots for key in row.interval or () if key in dot.figures]
    owed = next(iter(row.metrics))
    title = row.title if lines[owed] else f"{row.title} (missing: {owed})"
    scene.parts.append(Markup('<text class="row" x="{}" y="{:.1f}">{}</text>').format(_LEFT, top - 7, title))
    ticks = nice_ticks(0.0, max(values, default=0.0) or 1.0, count=3)

    def y(value: float) -> float:
        return top + _HEIGHT * (1 - value / ticks[-1])

    for index, (tick, label) in enumerate(zip(ticks, tick_labels(ticks, row.unit), strict=True)):
        scene.parts.append(
            Markup('<line class="{}" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                "grid" if index else "axis", _LEFT, _WIDTH - _RIGHT, y(tick), y(tick)
            )
            + Markup('<text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(_LEFT - 7, y(tick) + 3.8, label)
        )
    for colour, of_stages in enumerate(lines.values()):
        scene.parts += [_line(scene, points, colour, y) for points in of_stages]
    scene.parts += [_dot(scene, dot, row, y) for dot in dots]


def _lines(scene: _Scene, key: str) -> list[tuple[Point, ...]]:
    """What the steps of each stage logged under `key`, without the stages that have none; long ones as means of equal spans."""
    found = []
    for stage, offset in zip(scene.stages, scene.offsets, strict=True):
        points = tuple((float(offset + step), metrics[key]) for step, metrics in stage.steps.items() if key in metrics)
        found += [thinned(Series(label=key, points=points)).points] if points else []
    return found


def _line(scene: _Scene, points: Sequence[Point], colour: int, y: Callable[[float], float]) -> Markup:
    """Of one stage: a line breaks where another begins, since lengths and tasks may be others from there on."""
    dots = [(scene.x(x), y(value)) for x, value in points]
    path = "M" + "L".join(f"{x:.1f} {level:.1f}" for x, level in dots)
    line = Markup('<path class="line s{}" d="{}"/>').format(colour, path) if len(dots) > 1 else Markup("")
    if len(dots) > 30:
        return line
    circle = Markup('<circle class="f{}" cx="{:.1f}" cy="{:.1f}" r="2.4"/>')
    return line + Markup("").join(circle.format(colour, *dot) for dot in dots)


def _dot(scene: _Scene, dot: _Dot, row: _Row, y: Callable[[float], float]) -> Markup:
    """An evaluation, with its interval where it has one."""
    x, value = scene.x(dot.x), dot.figures[row.evaluated]
    whisker = Markup("")
    if row.interval is not None and all(key in dot.figures for key in row.interval):
        low, high = (y(dot.figures[key]) for key in row.interval)
        whisker = Markup('<line class="line s{0}" opacity="0.6" x1="{1:.1f}" x2="{1:.1f}" y1="{2:.1f}" y2="{3:.1f}"/>').format(
            _EVALUATED, x, low, high
        )
    return whisker + Markup('<circle class="f{}" cx="{:.1f}" cy="{:.1f}" r="4.5"><title>{}: {}</title></circle>').format(
        _EVALUATED, x, y(value), dot.stage, figure(value, row.unit)
    )


def _draw_boundaries(scene: _Scene, bottom: float) -> None:
    """A mark where each stage begins, and its name above its steps; the limit of its responses where there is room."""
    ends = [scene.begin(index) for index in range(1, len(scene.stages))] + [scene.span[1]]
    for index, (stage, label) in enumerate(zip(scene.stages, scene.labels, strict=True)):
        left, right = scene.x(scene.begin(index)), scene.x(ends[index])
        if index:
            scene.parts.append(
                Markup('<line class="boundary" x1="{0:.1f}" x2="{0:.1f}" y1="4" y2="{1:.1f}"/>').format(left, bottom)
            )
        text = label if len(label) * _CHAR < right - left - 10 else stage.name
        if len(text) * _CHAR < right - left - 10:
            scene.parts.append(Markup('<text class="name" x="{:.1f}" y="14">{}</text>').format(left + 6, text))


def _draw_steps(scene: _Scene, bottom: float) -> None:
    """The axis of steps, numbered on from stage to stage."""
    low, high = scene.span
    ticks = [tick for tick in nice_ticks(low, high, count=10, is_integer=True) if low <= tick <= high]
    scene.parts.append(Markup('<text x="{}" y="{:.1f}" text-anchor="end">step</text>').format(_LEFT - 7, bottom + 16))
    scene.parts += [
        Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>').format(scene.x(tick), bottom + 16, figure(tick))
        for tick in ticks
    ]


def _draw_legend(scene: _Scene, y: float) -> None:
    logged = {key for stage in scene.stages for key in stage.metrics}
    shown = [(colour, name) for colour, (key, name) in enumerate(_ROWS[0].metrics.items()) if key in logged]
    shown += [(_EVALUATED, "evaluations, with 95% interval")] if scene.dots else []
    x = _LEFT
    for colour, name in shown:
        scene.parts.append(
            Markup('<circle class="f{}" cx="{:.1f}" cy="{:.1f}" r="4"/><text x="{:.1f}" y="{:.1f}">{}</text>').format(
                colour, x, y - 3.8, x + 9, y, name
            )
        )
        x += 9 + len(name) * _CHAR + 24


def _spoken(scene: _Scene) -> str:
    """Per row, where it began and where it ended."""
    facts = []
    for row in _ROWS:
        points = [point for of_stage in _lines(scene, next(iter(row.metrics))) for point in of_stage]
        if points:
            facts.append(f"{row.title} from {figure(points[0][1], row.unit)} to {figure(points[-1][1], row.unit)}")
    return f"across {', '.join(stage.name for stage in scene.stages)}: " + "; ".join(facts)
