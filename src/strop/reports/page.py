"""The report of a run: whether it learned, how, and what its rollouts look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.reports.evaluations import benchmark_table
from strop.reports.html import render
from strop.reports.log import Evaluation, RunLog, read_run
from strop.reports.panels import across, sections
from strop.reports.rollouts import RolloutTable, clipped, read_rollouts
from strop.reports.scales import Unit, figure
from strop.reports.stage_graph import draw as draw_graph
from strop.reports.timelines import Timeline, read_timelines
from strop.reports.timelines import draw as draw_timelines
from strop.run_directory import RunDirectory, names_damage, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One metric before and after. `tone` says what the change means: good, bad or flat."""

    title: str
    metric: str
    before: str
    after: str
    change: str
    tone: str
    caption: str


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
    pair = log.before_and_after
    return render(
        "report.html.j2",
        log=log,
        verdict=verdict(log),
        pair=pair,
        cards=cards(*pair) if pair else (),
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
    if log.stages and all(stage.kind not in ("", "eval") for stage in log.stages):
        return Verdict(
            text="Nothing was evaluated.",
            support="The recipe has no stage of kind eval. Add one before and one after training.",
            tone="flat",
        )
    if not log.evaluations:
        return Verdict(
            text="No evaluation yet.",
            support="There is no stages/<name>/eval/result.json.",
            tone="flat",
        )
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


def cards(before: Evaluation, after: Evaluation) -> list[Card]:
    """Return the main metrics before and after."""
    pair = (before, after)
    has_accuracy = all("accuracy" in each.figures for each in pair)
    score = (
        _card("Accuracy", "accuracy", pair, "avg@k over the evaluation's tasks", _more_is_good)
        if has_accuracy
        else _card("Mean reward", "reward_mean", pair, "over the evaluation's rollouts", _more_is_good, Unit.PLAIN)
    )
    return [
        score,
        _card("Tool errors", "tool_error_rate", pair, "share of calls that failed", _less_is_good),
        _card("Tool errors when right", "tool_error_rate_correct", pair, "share of calls, correct rollouts", _less_is_good),
        _card("Response length", "length_tokens_mean", pair, "mean tokens of a rollout", _neither, Unit.PLAIN),
    ]


def _card(
    title: str,
    metric: str,
    pair: tuple[Evaluation, Evaluation],
    caption: str,
    tone: Callable[[float], str],
    unit: Unit = Unit.PERCENT,
) -> Card:
    first, last = (each.figures.get(metric) for each in pair)
    before, after = (_value(each, metric, unit) for each in pair)
    is_known = first is not None and last is not None
    return Card(
        title=title,
        metric=metric,
        before=before,
        after=after,
        change=_change(first, last, unit) if first is not None and last is not None else "",
        tone=tone(last - first) if first is not None and last is not None and before != after else "flat",
        caption=caption if is_known else "not known for both",
    )


def _value(evaluation: Evaluation, metric: str, unit: Unit) -> str:
    value = evaluation.figures.get(metric)
    if value is not None:
        return figure(value, unit)
    has_no_calls = evaluation.figures.get("tool_calls_mean") == 0
    return "no tool calls" if has_no_calls and metric.startswith("tool_error_rate") else "–"


def _change(first: float, last: float, unit: Unit) -> str:
    if unit is Unit.PERCENT:
        points = round((last - first) * 100, 1)
        return f"{'+' if points > 0 else '−' if points < 0 else '±'}{abs(points):.1f} points"
    if first == 0:
        return ""
    share = round((last - first) / first * 100)
    return f"{'+' if share > 0 else '−' if share < 0 else '±'}{abs(share)}%"


def _more_is_good(change: float) -> str:
    return "good" if change > 0 else "bad"


def _less_is_good(change: float) -> str:
    return "good" if change < 0 else "bad"


def _neither(change: float) -> str:
    del change
    return "flat"
