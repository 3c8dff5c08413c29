"""The report of a run: whether it learned, how, and what its rollouts look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.reports.evaluations import benchmark_table
from strop.reports.html import render
from strop.reports.log import Evaluation, RunLog, StageLog, StageState, read_run
from strop.reports.number_format import Table, Unit, counted, figure
from strop.reports.panels import across, sections
from strop.reports.rollouts import RolloutTable, clipped, read_rollouts
from strop.reports.timelines import Timeline, read_timelines
from strop.reports.timelines import draw as draw_timelines
from strop.run_directory import RunDirectory, names_damage, write_text

_MARKS = {StageState.DONE: "✓ ", StageState.STALE: "⟳ ", StageState.BEGUN: "… ", StageState.TO_COME: ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the evaluations show, in a sentence, and the evidence for it."""

    text: str
    support: str
    tone: str = "flat"  # or good, or bad


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
            (each.init, each.benchmark, each.figures)
            for each in log.current_evaluations
            if each.init and each.benchmark and not each.condition and "accuracy" in each.figures
        ),
        stages=stages_table(log.stages),
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
        support = "No reward says what is right, so there is no accuracy. A function does with right_above."
        return Verdict(text=f"Mean reward went from {_reward(before)} to {_reward(after)}.", support=support)
    shown = [figure(value, Unit.PERCENT) for value in (first, last)]
    moved = f"from {shown[0]} to {shown[1]}"
    bounds = [each.figures.get(f"accuracy_{end}") for each in pair for end in ("low", "high")]
    if any(bound is None for bound in bounds):
        word = "rose" if last > first else "fell" if last < first else "stayed"
        return Verdict(text=f"Accuracy {word} {moved}.", support="No intervals were logged.")
    stages = f"Stage {before.stage} against stage {after.stage}"
    low_before, high_before, low_after, high_after = (bound or 0.0 for bound in bounds)
    if low_after > high_before:
        return Verdict(text=f"Accuracy rose {moved}.", support=f"{stages}: the 95% intervals do not overlap.", tone="good")
    if high_after < low_before:
        return Verdict(text=f"Accuracy fell {moved}.", support=f"{stages}: the 95% intervals do not overlap.", tone="bad")
    return Verdict(
        text=f"Accuracy went {moved}: the change may be chance." if first != last else f"Accuracy stayed at {shown[0]}.",
        support=f"{stages}: the 95% intervals overlap; use more tasks or more steps.",
    )


def _reward(evaluation: Evaluation) -> str:
    reward = evaluation.figures.get("reward_mean")
    return "unknown" if reward is None else figure(reward)


def _verdict_without_pair(log: RunLog) -> Verdict:
    if not log.evaluations:
        support = "A recipe evaluates with stages of kind eval: give it one before and one after training."
        return Verdict(text="No evaluation yet.", support=support)
    support = "No earlier evaluation of the same tasks and an ancestor of the model."
    if stale := [each.stage for each in log.evaluations if each.stage in log.stale]:
        first = next(iter(log.stale))
        support = f"Stale, so not compared: {', '.join(stale)}. Rerun with `strop train` and --from {first}."
    if not log.current_evaluations:
        return Verdict(text="No evaluation matches the recipe.", support=support)
    last = log.current_evaluations[-1]
    accuracy = last.figures.get("accuracy")
    shown = f"mean reward {_reward(last)}" if accuracy is None else f"accuracy {figure(accuracy, Unit.PERCENT)}"
    return Verdict(text=f"After stage {last.stage}: {shown}.", support=support)


def stages_table(stages: Sequence[StageLog]) -> Table:
    """Return a row for each stage: what it reads, by key, how far it has come, and what it took."""
    return Table.of(map(_stage_row, stages))


def _stage_row(stage: StageLog) -> dict[str, str]:
    steps = [counted(len(stage.steps), "step")] if stage.steps else []
    return {
        "stage": stage.name,
        "kind": stage.kind,
        "reads": ", ".join(f"{name} ({key})" for key, names in stage.inputs.items() for name in names),
        "state": f"{_MARKS[stage.state]}{stage.state}" + (f": {stage.why_stale}" if stage.why_stale else ""),
        "work": ", ".join([*steps, *stage.hours, *stage.utilisation]) + "".join(f"; on {node}" for node in stage.nodes),
    }
