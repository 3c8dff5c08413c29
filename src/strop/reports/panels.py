"""Turns the log of a run into sections of plots, each with a sentence that says what to look for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from strop.evaluation.metrics import BUCKETS, DURATIONS
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
    Panel,
    is_optional,
)
from strop.reports.log import Metrics, RunLog, StageLog
from strop.reports.plots import Boundary, Drawing, Look, Plot, Point, Series

MAX_TOOLS = 6  # a server may have dozens; the page stays small


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
        f"Durations of {tool} calls",
        {f"{DURATIONS}{tool}/{bucket}": _label(bucket, of_tool[bucket]) for bucket in BUCKETS if bucket in of_tool},
        f"Calls of a step by duration, the quickest at the bottom. The legend counts the calls of all steps.{rest}",
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
    """Return every metric that the run logged or should have logged, the most important first.

    Tool calls, expert iteration, reward models and DPO have a section only if the run has some.
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
            section_of("Learning", LEARNING, trained, is_open=True),
            section_of("Optimisation", OPTIMISATION if is_imitation else (*OPTIMISATION, *RATIOS), trained, is_open=True),
            section_of("Time", TIME, trained, is_open=True),
        ]
    if imitating:
        found.append(section_of("Expert iteration", IMITATION, imitating, is_open=True))
    if _called_tools(trained):
        found.append(section_of("Tool calls", (*TOOL_CALLS, *duration_panels(trained)), trained, is_open=True))
    if any(key.startswith("branching/") for stage in trained for key in stage.metrics):
        found.append(section_of("Branching", BRANCHING, trained, is_open=True))
    if any(key.startswith("scheduler/") for stage in trained for key in stage.metrics):
        found.append(section_of("Engines", ENGINES, trained, is_open=False))
    if several := [stage for stage in trained if stage.has_several_updates]:
        keys = sorted({key for stage in several for _, metrics in stage.updates for key in metrics})
        found.append(section_of("Update by update", _plain(keys), several, is_open=False, is_by_update=True))
    if tuned:
        found.append(section_of("Supervised fine-tuning", FINE_TUNING, tuned, is_open=not trained))
    if rewarding:
        found.append(section_of("Reward model", REWARD_MODEL, rewarding, is_open=not trained))
    if preferring:
        found.append(section_of("Preference pairs", PREFERENCES, preferring, is_open=not trained))
    drawn = {key for panel in _ALL for key in (*panel.metrics, *(panel.interval or ()))}
    logged = {key for stage in log.stages for key in stage.metrics if not key.startswith((BY_ENGINE, DURATIONS))}
    undrawn = sorted(logged - drawn - {"scheduler/engines", "scheduler/lost_turns", ELAPSED, "budget/is_spent"})
    if undrawn:
        stages = [*tuned, *rewarding, *preferring, *trained]
        found.append(section_of("Everything else in the log", _plain(undrawn), stages, is_open=False))
    return found


def _plain(keys: Sequence[str]) -> list[Panel]:
    """Return one panel per metric."""
    return [Panel(key, {key: key}, "", y_low=None) for key in keys]


def trailing_mean(points: Sequence[Point], window: int) -> tuple[Point, ...]:
    """Return each point's mean with up to `window` - 1 points before it, and none after it."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    return tuple((x, (sums[end] - sums[max(0, end - window)]) / min(end, window)) for end, (x, _) in enumerate(points, start=1))


def _is_fine_tuning(stage: StageLog) -> bool:
    return stage.kind in ("sft", "distil") or any(key.startswith("sft/") for key in stage.metrics)


def _called_tools(stages: Sequence[StageLog]) -> bool:
    keys = [key for panel in TOOL_CALLS for key in panel.metrics]
    return any(metrics.get(key, 0.0) > 0 for stage in stages for metrics in stage.steps.values() for key in keys)


def section_of(
    title: str, panels: Sequence[Panel], stages: Sequence[StageLog], *, is_open: bool, is_by_update: bool = False
) -> Section:
    logged = {key for stage in stages for _, metrics in _logged(stage, is_by_update=is_by_update) for key in metrics}
    shown = [panel for panel in panels if any(key in logged or not is_optional(key) for key in panel.metrics)]
    shown = [panel for panel in shown if not panel.is_by_time or ELAPSED in logged]
    drawings = tuple(Drawing(plot=_plot(panel, stages, is_by_update=is_by_update), note=panel.note) for panel in shown)
    return Section(title=title, drawings=drawings, is_open=is_open)


def _logged(stage: StageLog, *, is_by_update: bool) -> Sequence[tuple[float, Metrics]]:
    """Return what the stage logged, with its step: of each update, or of each step."""
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
    has_no_calls = panel.needs_tool_calls and {metrics.get("rollout/tool_calls_mean") for _, metrics in steps} == {0.0}
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
        missing=() if has_no_calls else tuple(key for key in panel.metrics if not (key in logged or is_optional(key))),
        absent="no tool calls" if has_no_calls else "",
        # All plots of a section have the same range of steps.
        x_low=0.0 if panel.is_by_time else min((x for x, _ in steps), default=None),
        x_high=max((x for x, _ in steps), default=None),
        y_low=panel.y_low,
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


def _lines(panel: Panel, label: str, points: tuple[Point, ...], colour: int, *, of: str) -> list[Series]:
    """Return one line; with one metric and enough points, the faint points and their trailing mean."""
    window = len(points) // 10
    if panel.look is Look.AREA or len(panel.metrics) > 1 or window < 2:
        return [Series(label=label, points=points, colour=colour, look=panel.look)]
    return [
        Series(label=f"each {of}", points=points, colour=colour, look=Look.FAINT),
        Series(label=f"{label}, mean of {window} {of}s", points=trailing_mean(points, window), colour=colour),
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


_TRAINING, _HELD_OUT = "training tasks", "held-out tasks"
_PANELS = {  # key in an evaluation's result -> its panel
    "accuracy": Panel("Accuracy", {"rollout/accuracy": _TRAINING, "validation/accuracy": _HELD_OUT}, ""),
    "length_tokens_mean": Panel(
        "Response length",
        {"rollout/length_tokens_mean": _TRAINING, "validation/length_tokens_mean": _HELD_OUT},
        "Tokens after the prompt, tool output included.",
    ),
    "truncated_fraction": Panel(
        "Truncated",
        {"rollout/truncated_fraction": _TRAINING, "validation/truncated_fraction": _HELD_OUT},
        "Share of rollouts without tokens left.",
    ),
}


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
    for key, panel in _PANELS.items():
        evaluated = _evaluations(log, stages, key)
        for drawing in section_of("", [panel], stages, is_open=True).drawings:
            drawings.append(replace(drawing, plot=replace(drawing.plot, series=(*drawing.plot.series, *evaluated))))
    return Section(title="Across stages", drawings=tuple(drawings))


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
