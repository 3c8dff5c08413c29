"""The log of a run -> sections of plots, each with a sentence that says what to look for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.evaluation.summary import DURATIONS
from strop.reports.curves import (
    BRANCHING,
    BY_ENGINE,
    ENGINES,
    FINE_TUNING,
    IMITATION,
    LEARNING,
    OPTIMISATION,
    PREFERENCES,
    RATIOS,
    REWARD_MODEL,
    TIME,
    TOOL_CALLS,
    UPDATES,
    Panel,
)
from strop.reports.durations import duration_panels
from strop.reports.log import Metrics, RunLog, StageLog
from strop.reports.plots import Boundary, Look, Plot, Point, Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A plot and the sentence below its title."""

    plot: Plot
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Plots under one heading; `is_open` is False for what only a closer look needs."""

    title: str
    drawings: tuple[Drawing, ...]
    is_open: bool = True


ELAPSED = "time/elapsed_s"
_ALL = (
    *LEARNING,
    *OPTIMISATION,
    *RATIOS,
    *IMITATION,
    *TIME,
    *TOOL_CALLS,
    *BRANCHING,
    *ENGINES,
    *FINE_TUNING,
    *REWARD_MODEL,
    *PREFERENCES,
)


def sections(log: RunLog) -> list[Section]:
    """Every metric that the run logged, and every one that it should have, under headings; what matters most first.

    Tool calls, expert iteration, reward models and DPO have a section only where there were some.
    """
    tuned = [stage for stage in log.stages if _is_fine_tuning(stage)]
    rewarding = [stage for stage in log.stages if stage.kind == "reward_model"]
    preferring = [stage for stage in log.stages if stage.kind == "dpo"]
    others = [stage for stage in log.stages if stage not in (*tuned, *rewarding, *preferring)]
    trained = [stage for stage in others if stage.steps or stage.is_stepped]
    imitating = [stage for stage in trained if stage.kind == "expert_iteration"]
    is_imitation = bool(imitating) and len(imitating) == len(trained)
    found: list[Section] = []
    if trained:
        found += [
            _section("Learning", LEARNING, trained, is_open=True),
            _section("Optimisation", OPTIMISATION if is_imitation else (*OPTIMISATION, *RATIOS), trained, is_open=True),
            _section("Time", TIME, trained, is_open=True),
        ]
    if imitating:
        found.append(_section("Expert iteration", IMITATION, imitating, is_open=True))
    if _called_tools(trained):
        found.append(_section("Tool calls", (*TOOL_CALLS, *duration_panels(trained)), trained, is_open=True))
    if any(key.startswith("branching/") for stage in trained for key in stage.metrics):
        found.append(_section("Branching", BRANCHING, trained, is_open=True))
    if any(key.startswith("scheduler/") for stage in trained for key in stage.metrics):
        found.append(_section("Engines", ENGINES, trained, is_open=False))
    if several := [stage for stage in trained if stage.has_several_updates]:
        found.append(_section("Update by update", UPDATES, several, is_open=False, is_by_update=True))
    if tuned:
        found.append(_section("Supervised fine-tuning", FINE_TUNING, tuned, is_open=not trained))
    if rewarding:
        found.append(_section("Reward model", REWARD_MODEL, rewarding, is_open=not trained))
    if preferring:
        found.append(_section("Preference pairs", PREFERENCES, preferring, is_open=not trained))
    drawn = {key for panel in _ALL for key in (*panel.metrics, *(panel.interval or ()))}
    logged = {key for stage in log.stages for key in stage.metrics if not key.startswith((BY_ENGINE, DURATIONS))}
    undrawn = sorted(logged - drawn - {"scheduler/engines", "scheduler/lost_turns", ELAPSED, "budget/is_spent"})
    if undrawn:
        panels = [Panel(title=key, metrics={key: key}, note="", y_low=None) for key in undrawn]
        found.append(_section("Everything else in the log", panels, [*tuned, *rewarding, *preferring, *trained], is_open=False))
    return found


def trailing_mean(points: Sequence[Point], window: int) -> tuple[Point, ...]:
    """Each point's mean with up to `window` - 1 points before it: it never looks ahead of what was known at that step."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    return tuple((x, (sums[end] - sums[max(0, end - window)]) / min(end, window)) for end, (x, _) in enumerate(points, start=1))


def _is_fine_tuning(stage: StageLog) -> bool:
    return stage.kind in ("sft", "distil") or any(key.startswith("sft/") for key in stage.metrics)


def _called_tools(stages: Sequence[StageLog]) -> bool:
    keys = [key for panel in TOOL_CALLS for key in panel.metrics]
    return any(metrics.get(key, 0.0) > 0 for stage in stages for metrics in stage.steps.values() for key in keys)


def _section(
    title: str, panels: Sequence[Panel], stages: Sequence[StageLog], *, is_open: bool, is_by_update: bool = False
) -> Section:
    logged = {key for stage in stages for _, metrics in _logged(stage, is_by_update=is_by_update) for key in metrics}
    owed = [panel for panel in panels if not panel.optional.issuperset(panel.metrics) or logged & panel.metrics.keys()]
    owed = [panel for panel in owed if not panel.is_by_time or ELAPSED in logged]
    drawings = tuple(Drawing(plot=_plot(panel, stages, is_by_update=is_by_update), note=panel.note) for panel in owed)
    return Section(title=title, drawings=drawings, is_open=is_open)


def _logged(stage: StageLog, *, is_by_update: bool) -> Sequence[tuple[float, Metrics]]:
    """What the stage logged, and at which step: of each update, or of each step."""
    return stage.updates if is_by_update else tuple(stage.steps.items())


def _plot(panel: Panel, stages: Sequence[StageLog], *, is_by_update: bool) -> Plot:
    offsets = _offsets_by_time(stages) if panel.is_by_time else offsets_of(stages)
    steps = [
        (offset + (metrics[ELAPSED] if panel.is_by_time else step), metrics)
        for stage, offset in zip(stages, offsets, strict=True)
        for step, metrics in _logged(stage, is_by_update=is_by_update)
        if not panel.is_by_time or ELAPSED in metrics
    ]
    logged = {key for _, metrics in steps for key in metrics}
    series: list[Series] = []
    for colour, (key, label) in enumerate(panel.metrics.items()):
        if key in logged:
            points = _points(panel, key, steps)
            if panel.interval is None:
                series += _lines(panel, label, points, colour, of="update" if is_by_update else "step")
            else:
                series.append(Series(label=label, points=points, colour=colour, band=_band(panel.interval, steps)))
    return Plot(
        title=panel.title,
        series=tuple(series),
        unit=panel.unit,
        x_label="seconds" if panel.is_by_time else "step",
        boundaries=() if panel.is_by_time else _boundaries(stages, offsets),
        missing=tuple(key for key in panel.metrics if key not in logged and key not in panel.optional),
        # Every plot of a section has the same steps, whatever each logged.
        x_low=0.0 if panel.is_by_time else min((x for x, _ in steps), default=None),
        x_high=max((x for x, _ in steps), default=None),
        y_low=panel.y_low,
        y_high=panel.y_high,
    )


def _points(panel: Panel, key: str, steps: Sequence[tuple[float, Metrics]]) -> tuple[Point, ...]:
    """Where `key` was logged. In a stack, a phase that a step did not have took no time there."""
    if panel.look is Look.AREA:
        return tuple((x, metrics.get(key, 0.0)) for x, metrics in steps if not panel.metrics.keys().isdisjoint(metrics))
    return tuple((x, metrics[key]) for x, metrics in steps if key in metrics)


def _band(interval: tuple[str, str], steps: Sequence[tuple[float, Metrics]]) -> tuple[tuple[float, float, float], ...]:
    """Where both ends of `interval` were logged."""
    low, high = interval
    return tuple((x, metrics[low], metrics[high]) for x, metrics in steps if low in metrics and high in metrics)


def _lines(panel: Panel, label: str, points: tuple[Point, ...], colour: int, *, of: str) -> list[Series]:
    """One line; where there is one metric and enough points, its trailing mean with the points themselves faint behind it."""
    window = len(points) // 10
    if panel.look is Look.AREA or len(panel.metrics) > 1 or window < 2:
        return [Series(label=label, points=points, colour=colour, look=panel.look)]
    return [
        Series(label=f"each {of}", points=points, colour=colour, look=Look.FAINT),
        Series(label=f"{label}, mean of {window} {of}s", points=trailing_mean(points, window), colour=colour),
    ]


def offsets_of(stages: Sequence[StageLog]) -> list[int]:
    """Where each stage begins on the common axis: right after the last step of the one before."""
    offsets: list[int] = []
    last: int | None = None
    for stage in stages:
        offsets.append(0 if last is None or not stage.steps else last + 1 - min(stage.steps))
        if stage.steps:
            last = offsets[-1] + max(stage.steps)
    return offsets


def _offsets_by_time(stages: Sequence[StageLog]) -> list[float]:
    """When each stage begins on the common axis: as the one before ends."""
    lengths = [max((metrics.get(ELAPSED, 0.0) for metrics in stage.steps.values()), default=0.0) for stage in stages]
    return [sum(lengths[:index]) for index in range(len(stages))]


def _boundaries(stages: Sequence[StageLog], offsets: Sequence[float]) -> tuple[Boundary, ...]:
    """Where each of several stages begins, and where settings of a stage switched."""
    found: list[Boundary] = []
    for stage, offset in zip(stages, offsets, strict=True):
        if stage.steps and len(stages) > 1:
            found.append(Boundary(x=offset + min(stage.steps), label=stage.name))
        # One that no step has come to yet would lie behind the figures.
        found += [Boundary(x=offset + step, label=what) for step, what in stage.switches.items() if step in stage.steps]
    return tuple(found)
