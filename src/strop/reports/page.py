"""A run directory -> report.html: did it learn, how, and what its rollouts look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.reports.across import draw as draw_across
from strop.reports.across import stages_in_sequence
from strop.reports.html import render
from strop.reports.log import Evaluation, RunLog, read_run
from strop.reports.panels import sections
from strop.reports.rollouts import RolloutTable, read_rollouts
from strop.reports.scales import Unit, figure
from strop.reports.stage_graph import draw as draw_graph
from strop.reports.timelines import Timeline, read_timelines
from strop.reports.timelines import draw as draw_timelines
from strop.runs import RunDirectory, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One figure before and after. `tone` is good, bad or flat: what the change means, not which way it went."""

    title: str
    metric: str
    before: str
    after: str
    change: str
    tone: str
    caption: str
    is_missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the evaluations say, in a sentence and in what supports it."""

    text: str
    support: str
    tone: str  # good, bad or flat


def write_report(run: RunDirectory) -> Path:
    """Write the run's report beside its logs, whole or not at all; the run may still go on.

    Raises:
        RunError: the directory is not a run's, a file of it is damaged, or the report cannot be written.
    """
    log = read_run(run)
    timelines = [timeline for stage in log.stages if stage.is_stepped for timeline in read_timelines(run, stage.name)]
    write_text(run.report, report_page(log, read_rollouts(run, log), timelines))
    return run.report


def report_page(log: RunLog, rollouts: RolloutTable, timelines: Sequence[Timeline] = ()) -> str:
    """The page itself; `timelines` of what the engines did."""
    pair = log.before_and_after
    return render(
        "report.html.j2",
        {
            "log": log,
            "verdict": verdict(log),
            "pair": pair,
            "cards": cards(*pair) if pair else (),
            "graph": draw_graph(log.stages),
            "across": draw_across(log),
            "beside": _beside(log),
            "sections": sections(log),
            "timelines": draw_timelines(timelines) if timelines else "",
            "table": rollouts,
        },
    )


def _beside(log: RunLog) -> list[str]:
    """Stages of rollouts with steps that are not in the sequence that is drawn."""
    drawn = [stage.name for stage in stages_in_sequence(log)]
    return [stage.name for stage in log.stages if stage.is_stepped and stage.steps and stage.name not in drawn]


def verdict(log: RunLog) -> Verdict:
    """Whether the run learned. It claims a change only where the intervals of before and after lie apart."""
    pair = log.before_and_after
    if pair is None:
        return _verdict_without_pair(log)
    before, after = pair
    first, last = before.figures.get("accuracy"), after.figures.get("accuracy")
    if first is None or last is None:
        return Verdict(
            text="Whether it learned is not known: accuracy is missing.",
            support="An evaluation's result.json has no “accuracy”.",
            tone="flat",
        )
    moved = f"from {figure(first, Unit.PERCENT)} to {figure(last, Unit.PERCENT)}"
    bounds = [each.figures.get(f"accuracy_{end}") for each in pair for end in ("low", "high")]
    if any(bound is None for bound in bounds):
        word = "rose" if last > first else "fell" if last < first else "stayed"
        return Verdict(text=f"Accuracy {word} {moved}.", support="No intervals were logged beside it.", tone="flat")
    stages = f"Stage {before.stage} against stage {after.stage}"
    low_before, high_before, low_after, high_after = (bound or 0.0 for bound in bounds)
    if low_after > high_before:
        return Verdict(text=f"Accuracy rose {moved}.", support=f"{stages}: the 95% intervals lie apart.", tone="good")
    if high_after < low_before:
        return Verdict(text=f"Accuracy fell {moved}.", support=f"{stages}: the 95% intervals lie apart.", tone="bad")
    return Verdict(
        text=f"Accuracy went {moved}: no change that can be told from chance.",
        support=f"{stages}: the 95% intervals overlap; more tasks or more steps would tell.",
        tone="flat",
    )


def _verdict_without_pair(log: RunLog) -> Verdict:
    if log.stages and all(stage.kind not in ("", "eval") for stage in log.stages):
        return Verdict(
            text="Nothing was evaluated.",
            support="The recipe has no stage of kind eval; one before and one after training would tell whether it learned.",
            tone="flat",
        )
    if not log.evaluations:
        return Verdict(
            text="No evaluation yet.",
            support="Missing: stages/<name>/eval/result.json of an evaluation before and of one after training.",
            tone="flat",
        )
    support = "Missing: an evaluation of the same tasks of a model that it was trained from, to compare with."
    if stale := [each.stage for each in log.evaluations if each.stage in log.stale]:
        first = next(iter(log.stale))
        support = f"Stale, so compared with nothing: {', '.join(stale)}. `strop train` with --from {first} evaluates anew."
    if not log.current_evaluations:
        return Verdict(text="No evaluation of what the recipe makes now.", support=support, tone="flat")
    last = log.current_evaluations[-1]
    accuracy = last.figures.get("accuracy")
    shown = "accuracy is missing" if accuracy is None else f"accuracy {figure(accuracy, Unit.PERCENT)}"
    return Verdict(text=f"After stage {last.stage}: {shown}.", support=support, tone="flat")


def cards(before: Evaluation, after: Evaluation) -> list[Card]:
    """The figures that a reader looks for first."""
    return [
        _card("Accuracy", "accuracy", before, after, Unit.PERCENT, "avg@k over the evaluation's tasks", _more_is_good),
        _card("Tool errors", "tool_error_rate", before, after, Unit.PERCENT, "share of calls that went wrong", _less_is_good),
        _card(
            "Tool errors when right",
            "tool_error_rate_correct",
            before,
            after,
            Unit.PERCENT,
            "share of calls, in correct trajectories",
            _less_is_good,
        ),
        _card("Response length", "length_tokens_mean", before, after, Unit.PLAIN, "mean tokens of a rollout", _neither),
    ]


def _card(
    title: str, metric: str, before: Evaluation, after: Evaluation, unit: Unit, caption: str, tone: Callable[[float], str]
) -> Card:
    first, last = before.figures.get(metric), after.figures.get(metric)
    texts = ["missing" if value is None else figure(value, unit) for value in (first, last)]
    if first is None or last is None:
        return Card(
            title=title,
            metric=metric,
            before=texts[0],
            after=texts[1],
            change="",
            tone="flat",
            caption=f"missing: {metric} is not in every result.json",
            is_missing=True,
        )
    return Card(
        title=title,
        metric=metric,
        before=texts[0],
        after=texts[1],
        change=_change(first, last, unit),
        tone=tone(last - first) if texts[0] != texts[1] else "flat",
        caption=caption,
    )


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
