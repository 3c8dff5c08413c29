"""Turns the log of a run into sections of plots, each with a sentence that says what to look for; `panels.toml` names them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strop.config import Config, load_toml, validate
from strop.evaluation.metrics import BUCKETS, DURATIONS
from strop.reports.log import Metrics, RunLog, StageLog
from strop.reports.number_format import Unit, unit_of
from strop.reports.plots import Boundary, Drawing, Look, Plot, Point, Series

MAX_TOOLS = 6  # a server may have dozens; the page stays small
ELAPSED = "time/elapsed_s"
_BY_ENGINE = "scheduler/row_share/"  # one metric per engine, which the timeline shows


class Panel(Config):
    """One plot to draw."""

    title: str
    metrics: dict[str, str]  # the name of each metric's line
    note: str = ""  # what to look for, in a sentence
    interval: tuple[str, str] | None = None  # the metrics of the band around its one line
    look: Look = Look.LINE
    from_zero: bool = True  # its axis contains 0
    needs_tool_calls: bool = False  # its metrics are absent without a tool call
    is_by_time: bool = False  # against the seconds of training, where a stage logs them
    of: tuple[str, ...] = ("",)  # it is drawn where a metric was logged whose name begins so

    @property
    def unit(self) -> Unit:
        return unit_of(next(iter(self.metrics)))


class SectionKeys(Config):
    """Panels under one heading."""

    title: str
    of: tuple[str, ...] = ()  # it shows the stages that logged such a metric other than 0
    is_open: bool = True  # unfolded; the first section of a page always is
    has_durations: bool = False  # has a panel of durations for each tool as well
    panels: tuple[str, ...]


class Panels(Config):
    """The content of `panels.toml`."""

    optional: tuple[str, ...]
    hidden: tuple[str, ...]
    progress: dict[str, str]
    sweep: tuple[str, ...]
    across: SectionKeys
    sections: tuple[SectionKeys, ...]
    panels: dict[str, Panel]

    def of(self, section: SectionKeys) -> list[Panel]:
        return [self.panels[name] for name in section.panels]


_FILE = Path(__file__).with_name("panels.toml")
PANELS = validate(Panels, load_toml(_FILE), place=str(_FILE))


def duration_panels(stages: Sequence[StageLog]) -> list[Panel]:
    """Return a panel for each of the most called tools; its legend counts the calls of each bucket in all steps.

    A single slow call is too thin to be seen in a stack, so the legend shows it.
    """
    totals = _totals(stages)
    most_called = sorted(totals, key=lambda tool: (-totals[tool].total(), tool))
    return [_panel(tool, totals[tool], num_left_out=len(totals) - MAX_TOOLS) for tool in most_called[:MAX_TOOLS]]


def _panel(tool: str, of_tool: Counter[str], *, num_left_out: int) -> Panel:
    rest = f" {num_left_out} tools with fewer calls are not shown." if num_left_out > 0 else ""
    return Panel(
        title=f"Durations of {tool} calls",
        metrics={f"{DURATIONS}{tool}/{bucket}": _label(bucket, of_tool[bucket]) for bucket in BUCKETS if bucket in of_tool},
        note=f"Calls of a step by duration, the quickest at the bottom. The legend counts the calls of all steps.{rest}",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Plots under one heading; folded unless `is_open`."""

    title: str
    drawings: tuple[Drawing, ...]
    is_open: bool = True


def sections(log: RunLog) -> list[Section]:
    """Return every metric that the run logged, or should have logged next to others, the most important first."""
    found: list[Section] = []
    for keys in PANELS.sections:
        if stages := [stage for stage in log.stages if _has_logged(stage, keys.of)]:
            panels = [*PANELS.of(keys), *(duration_panels(stages) if keys.has_durations else [])]
            found.append(section_of(keys.title, panels, stages, is_open=keys.is_open or not found))
    drawn = {key for panel in PANELS.panels.values() for key in (*panel.metrics, *(panel.interval or ()))}
    all_logged = {key for stage in log.stages for key in stage.metrics if not key.startswith((_BY_ENGINE, DURATIONS))}
    if undrawn := sorted(all_logged - drawn - {*PANELS.hidden}):
        stages = [stage for stage in log.stages if stage.steps]
        panels = [Panel(title=key, metrics={key: key}, from_zero=False) for key in undrawn]
        found.append(section_of("Everything else in the log", panels, stages, is_open=False))
    return found


def _has_logged(stage: StageLog, prefixes: tuple[str, ...]) -> bool:
    """Whether a step of `stage` logged a metric other than 0 whose name begins with one of `prefixes`."""
    return any(value and key.startswith(prefixes) for metrics in stage.steps.values() for key, value in metrics.items())


def trailing_mean(points: Sequence[Point], window: int) -> tuple[Point, ...]:
    """Return each point's mean with up to `window` - 1 points before it, and none after it."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    return tuple((x, (sums[end] - sums[max(0, end - window)]) / min(end, window)) for end, (x, _) in enumerate(points, start=1))


def section_of(title: str, panels: Sequence[Panel], stages: Sequence[StageLog], *, is_open: bool) -> Section:
    logged = {key for stage in stages for key in stage.metrics}
    shown = [panel for panel in panels if any(key in logged or not _is_optional(key) for key in panel.metrics)]
    shown = [panel for panel in shown if not panel.is_by_time or ELAPSED in logged]
    shown = [panel for panel in shown if any(key.startswith(panel.of) for key in logged)]
    drawings = tuple(Drawing(plot=_plot(panel, stages), note=panel.note) for panel in shown)
    return Section(title=title, drawings=drawings, is_open=is_open)


def _is_optional(metric: str) -> bool:
    """Whether not every run logs `metric`, so that an absent one is not reported as missing."""
    return metric.startswith(PANELS.optional)


def _plot(panel: Panel, stages: Sequence[StageLog]) -> Plot:
    offsets = _offsets_by_time(stages) if panel.is_by_time else offsets_of(stages)
    steps = [
        (offset + (metrics[ELAPSED] if panel.is_by_time else step), metrics)
        for stage, offset in zip(stages, offsets, strict=True)
        for step, metrics in stage.steps.items()
        if not panel.is_by_time or ELAPSED in metrics
    ]
    logged = {key for _, metrics in steps for key in metrics}
    has_no_calls = panel.needs_tool_calls and {metrics.get("rollout/tool_calls_mean") for _, metrics in steps} == {0.0}
    series: list[Series] = []
    for colour, (key, label) in enumerate(panel.metrics.items()):
        if key in logged:
            points = _points(panel, key, steps)
            if panel.interval is None:
                series += _lines(panel, label, points, colour)
            else:
                series.append(Series(label=label, points=points, colour=colour, band=_band(panel.interval, steps)))
    return Plot(
        title=panel.title,
        series=tuple(series),
        unit=panel.unit,
        x_label="seconds" if panel.is_by_time else "step",
        boundaries=() if panel.is_by_time else _boundaries(stages, offsets),
        missing=() if has_no_calls else tuple(key for key in panel.metrics if not (key in logged or _is_optional(key))),
        absent="no tool calls" if has_no_calls else "",
        # All plots of a section have the same range of steps.
        x_low=0.0 if panel.is_by_time else min((x for x, _ in steps), default=None),
        x_high=max((x for x, _ in steps), default=None),
        y_low=0.0 if panel.from_zero else None,
    )


def _points(panel: Panel, key: str, steps: Sequence[tuple[float, Metrics]]) -> tuple[Point, ...]:
    """Return the points of `key`. In a stack, a phase that a step does not have counts 0."""
    if panel.look is Look.AREA:
        return tuple((x, metrics.get(key, 0.0)) for x, metrics in steps if not panel.metrics.keys().isdisjoint(metrics))
    return tuple((x, metrics[key]) for x, metrics in steps if key in metrics)


def _band(interval: tuple[str, str], steps: Sequence[tuple[float, Metrics]]) -> tuple[tuple[float, float, float], ...]:
    """Return the band where both ends of `interval` were logged."""
    low, high = interval
    return tuple((x, metrics[low], metrics[high]) for x, metrics in steps if low in metrics and high in metrics)


def _lines(panel: Panel, label: str, points: tuple[Point, ...], colour: int) -> list[Series]:
    """Return one line; with one metric and enough points, the faint points and their trailing mean."""
    window = len(points) // 10
    if panel.look is Look.AREA or len(panel.metrics) > 1 or window < 2:
        return [Series(label=label, points=points, colour=colour, look=panel.look)]
    return [
        Series(label="each step", points=points, colour=colour, look=Look.FAINT),
        Series(label=f"{label}, mean of {window} steps", points=trailing_mean(points, window), colour=colour),
    ]


def offsets_of(stages: Sequence[StageLog]) -> list[int]:
    """Return where each stage begins on the common axis: after the last step of the one before."""
    offsets: list[int] = []
    last: int | None = None
    for stage in stages:
        offsets.append(0 if last is None or not stage.steps else last + 1 - min(stage.steps))
        if stage.steps:
            last = offsets[-1] + max(stage.steps)
    return offsets


def _offsets_by_time(stages: Sequence[StageLog]) -> list[float]:
    """Return when each stage begins on the common axis: when the one before ends."""
    lengths = [max((metrics.get(ELAPSED, 0.0) for metrics in stage.steps.values()), default=0.0) for stage in stages]
    return [sum(lengths[:index]) for index in range(len(stages))]


def _boundaries(stages: Sequence[StageLog], offsets: Sequence[float]) -> tuple[Boundary, ...]:
    """Return where each of several stages begins, and where settings of a stage switched."""
    found: list[Boundary] = []
    for stage, offset in zip(stages, offsets, strict=True):
        if stage.steps and len(stages) > 1:
            found.append(Boundary(x=offset + min(stage.steps), label=stage.name))
        # A switch after the last step would lie outside the plot.
        found += [Boundary(x=offset + step, label=what) for step, what in stage.switches.items() if step in stage.steps]
    return tuple(found)


def stages_in_sequence(log: RunLog) -> list[StageLog]:
    """Return the longest chain of current RL stages with logged steps, each an ancestor of the next; the later of equals."""
    ancestors: dict[str, set[str]] = {}
    for stage in log.stages:
        parents = {stage.init, *(name for names in stage.inputs.values() for name in names)} & ancestors.keys()
        ancestors[stage.name] = parents.union(*(ancestors[name] for name in parents))
    stepped = [stage for stage in log.stages if stage.is_stepped and stage.steps and not stage.why_stale]
    chains = [[each for each in stepped if each is last or each.name in ancestors[last.name]] for last in reversed(stepped)]
    return max(chains, key=len, default=[])


def across(log: RunLog) -> Section | None:
    """Return accuracy, length and truncation on one axis of steps; None unless two RL stages follow each other.

    As in Figure 8 of rStar2-Agent (arXiv 2508.20722), whose stages differ in how long a response may be.
    """
    stages = stages_in_sequence(log)
    if len(stages) < 2:
        return None
    drawings = []
    for panel in PANELS.of(PANELS.across):
        evaluated = _evaluations(log, stages, next(iter(panel.metrics)).partition("/")[2])
        for drawing in section_of("", [panel], stages, is_open=True).drawings:
            drawings.append(replace(drawing, plot=replace(drawing.plot, series=(*drawing.plot.series, *evaluated))))
    return Section(title=PANELS.across.title, drawings=tuple(drawings))


def _evaluations(log: RunLog, stages: Sequence[StageLog], key: str) -> tuple[Series, ...]:
    """Return the evaluations of a stage's result at its last step, and of its `init` before its first. Without controls."""
    at: dict[str, float] = {}
    for stage, offset in zip(stages, offsets_of(stages), strict=True):
        at.setdefault(stage.init, offset + min(stage.steps) - 0.5)
        at[stage.name] = offset + max(stage.steps)
    init = {stage.name: stage.init for stage in log.stages}
    points = sorted(
        (at[init[each.stage]], each.figures[key])
        for each in log.current_evaluations
        if not each.condition and init.get(each.stage) in at and key in each.figures
    )
    return (Series(label="evaluations", points=tuple(points), colour=2),) if points else ()
