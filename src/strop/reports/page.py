"""The report of a run: whether it learned, how, and what its rollouts look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from strop.reports.evaluations import benchmark_table
from strop.reports.html import render
from strop.reports.log import RunLog, StageLog, StageState, read_run
from strop.reports.panels import across, sections
from strop.reports.rollouts import RolloutTable, clipped, read_rollouts
from strop.reports.scales import Unit, counted, figure
from strop.reports.timelines import Timeline, read_timelines
from strop.reports.timelines import draw as draw_timelines
from strop.run_directory import RunDirectory, names_damage, write_text

_BOX, _LANE, _GAP, _MARGIN = 38.0, 52.0, 30.0, 8.0  # heights of a box and a lane, width between columns
_NAME_CHAR, _FACT_CHAR, _PADDING = 6.9, 5.8, 22.0  # widths at 12 and 11 px, on the generous side
_MARKS = {StageState.DONE: "✓ ", StageState.STALE: "⟳ ", StageState.BEGUN: "… ", StageState.TO_COME: ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the evaluations show, in a sentence, and the evidence for it."""

    text: str
    support: str
    tone: str  # good, bad or flat


@names_damage
def write_report(run: RunDirectory) -> Path:
    """Write the run's report into its directory, also while it runs.

    Raises:
        RunError: the directory is not a run directory, a file is damaged, or the report cannot be written.
    """
    log = read_run(run)
    timelines = [timeline for stage in log.stages if stage.is_stepped for timeline in read_timelines(run, stage.name)]
    write_text(run.report, report_page(log, read_rollouts(run, log), timelines))
    return run.report


def report_page(log: RunLog, rollouts: RolloutTable, timelines: Sequence[Timeline] = ()) -> str:
    """Return the page; `timelines` show the activity of the engines."""
    return render(
        "report.html.j2",
        log=log,
        verdict=verdict(log),
        benchmarks=benchmark_table(
            (each.init, each.benchmark, each.figures["accuracy"])
            for each in log.current_evaluations
            if each.init and each.benchmark and not each.condition and "accuracy" in each.figures
        ),
        graph=draw_graph(log.stages),
        sections=[*filter(None, [across(log)]), *sections(log)],
        timelines=draw_timelines(timelines) if timelines else "",
        table=rollouts,
        clipped=clipped,
    )


def verdict(log: RunLog) -> Verdict:
    """Say whether the run learned. A change counts only if the intervals before and after do not overlap."""
    pair = log.before_and_after
    if pair is None:
        return _verdict_without_pair(log)
    before, after = pair
    first, last = before.figures.get("accuracy"), after.figures.get("accuracy")
    if first is None or last is None:
        rewards = [each.figures.get("reward_mean") for each in pair]
        texts = ["unknown" if reward is None else figure(reward) for reward in rewards]
        return Verdict(
            text=f"Mean reward went from {texts[0]} to {texts[1]}.",
            support="No reward says what is right, so there is no accuracy.",
            tone="flat",
        )
    shown = [figure(value, Unit.PERCENT) for value in (first, last)]
    moved = f"from {shown[0]} to {shown[1]}"
    bounds = [each.figures.get(f"accuracy_{end}") for each in pair for end in ("low", "high")]
    if any(bound is None for bound in bounds):
        word = "rose" if last > first else "fell" if last < first else "stayed"
        return Verdict(text=f"Accuracy {word} {moved}.", support="No intervals were logged.", tone="flat")
    stages = f"Stage {before.stage} against stage {after.stage}"
    low_before, high_before, low_after, high_after = (bound or 0.0 for bound in bounds)
    if low_after > high_before:
        return Verdict(text=f"Accuracy rose {moved}.", support=f"{stages}: the 95% intervals do not overlap.", tone="good")
    if high_after < low_before:
        return Verdict(text=f"Accuracy fell {moved}.", support=f"{stages}: the 95% intervals do not overlap.", tone="bad")
    return Verdict(
        text=f"Accuracy went {moved}: the change may be chance." if first != last else f"Accuracy stayed at {shown[0]}.",
        support=f"{stages}: the 95% intervals overlap; use more tasks or more steps.",
        tone="flat",
    )


def _verdict_without_pair(log: RunLog) -> Verdict:
    if not log.evaluations:
        support = "A recipe evaluates with stages of kind eval: give it one before and one after training."
        return Verdict(text="No evaluation yet.", support=support, tone="flat")
    support = "No earlier evaluation of the same tasks and an ancestor of the model."
    if stale := [each.stage for each in log.evaluations if each.stage in log.stale]:
        first = next(iter(log.stale))
        support = f"Stale, so not compared: {', '.join(stale)}. Rerun with `strop train` and --from {first}."
    if not log.current_evaluations:
        return Verdict(text="No evaluation matches the recipe.", support=support, tone="flat")
    last = log.current_evaluations[-1]
    accuracy = last.figures.get("accuracy")
    reward = last.figures.get("reward_mean")
    shown = f"mean reward {'unknown' if reward is None else figure(reward)}"
    if accuracy is not None:
        shown = f"accuracy {figure(accuracy, Unit.PERCENT)}"
    return Verdict(text=f"After stage {last.stage}: {shown}.", support=support, tone="flat")


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


def draw_graph(stages: Sequence[StageLog]) -> Markup:
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
    facts += [*stage.hours, *stage.utilisation]
    facts += [counted(len(stage.nodes), "node")] if stage.nodes else []
    facts += [stage.state] if stage.state is not StageState.DONE else []
    return ", ".join(facts)


def _spoken(stage: StageLog) -> str:
    inputs = [name for names in stage.inputs.values() for name in names]
    because = f" ({stage.why_stale})" if stage.why_stale else ""
    depends = f", depends on {', '.join(inputs)}" if inputs else ""
    return f"{stage.name}: {stage.state}{because}{depends}" + "".join(f"; on {node}" for node in stage.nodes)
