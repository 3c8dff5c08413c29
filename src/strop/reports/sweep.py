"""A sweep as a table, a page and a JSON value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.evaluation.statistics import mean_of_seeds
from strop.reports.compare import Curves, Table, compare_plots
from strop.reports.html import render
from strop.reports.panels import Drawing
from strop.reports.scales import duration, figure
from strop.reports.sweep_log import State, SweepArm, SweepLog, SweepRun, curves_by_step, curves_by_time, difference, unit_of

FORMAT_VERSION = 1
_NOTHING = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    title: str
    drawings: list[Drawing]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A run of the list, and where its report lies."""

    name: str
    link: str
    cells: tuple[str, ...]


def results_table(log: SweepLog) -> Table:
    """One row an arm: the result over its seeds, how far it is from the first arm, what it took."""
    baseline = log.arms[0]
    name = log.result.partition(".")[2] or "last step"
    columns = ("arm", name, "95% interval", "range", f"above {baseline.name}", "seeds", "time", "tokens")
    return Table(columns=columns, rows=tuple(_row(log, arm, baseline) for arm in log.arms))


def _row(log: SweepLog, arm: SweepArm, baseline: SweepArm) -> tuple[str, ...]:
    values = list(arm.results.values())
    mean = interval = reach = _NOTHING
    if values:
        mean = _shown(log, sum(values) / len(values))
        reach = f"{_shown(log, min(values))} – {_shown(log, max(values))}"
    if len(values) > 1:
        over_seeds = mean_of_seeds(values)
        interval = f"{_shown(log, over_seeds.low)} – {_shown(log, over_seeds.high)}"
    done = [run for run in arm.runs if run.state is State.DONE]
    above = difference(arm, baseline) if arm is not baseline else None
    return (
        arm.name,
        mean,
        interval,
        reach,
        _NOTHING if above is None else f"{_shown(log, above.mean)} [{_shown(log, above.low)}, {_shown(log, above.high)}]",
        f"{len(values)} of {len(arm.runs)}",
        duration(sum(run.time_s for run in done) / len(done)) if done else _NOTHING,
        f"{sum(run.tokens for run in done) / len(done):,.0f}" if done else _NOTHING,
    )


def _shown(log: SweepLog, value: float) -> str:
    return figure(value, unit_of(log.result))


def run_summary(run: SweepRun, result: str) -> str:
    """What a finished run came to, in few words."""
    if run.result is None:
        return "done"
    name = result.partition(".")[2]
    return f"{name or 'last step'} {figure(run.result, unit_of(name))}"


def sweep_page(log: SweepLog) -> str:
    """A page that needs no other file; it links to the reports of the runs beside it."""
    num_runs, num_seeds = len(log.runs), len(log.arms[0].runs)
    unfinished = "" if log.num_done == num_runs else f" {log.num_done} of {num_runs} runs are finished."
    measured = f" of {log.result.partition('.')[0]}" if log.result else ""
    lead = (
        f"{len(log.arms)} arms of {log.recipe}, {num_seeds} {'seed' if num_seeds == 1 else 'seeds'} each.{unfinished} Results"
        f" are those{measured}; curves, time and tokens those of {log.stage}."
    )
    sections = [
        _section("Against steps", curves_by_step(log), "step"),
        _section("Against wall-clock time", curves_by_time(log), "seconds"),
    ]
    values = {
        "log": log,
        "lead": lead,
        "results": results_table(log),
        "reading": _reading(log, num_seeds),
        "sections": sections,
        "run_columns": ("run", "state", "result", "its own 95% interval", "steps", "time", "tokens"),
        "runs": [_run_row(log, run) for run in log.runs],
    }
    return render("sweep.html.j2", values)


def _section(title: str, curves: Curves, x_label: str) -> _Section:
    plots = compare_plots(curves, units={metric: unit_of(metric) for metric in curves}, x_label=x_label)
    num_seeds = max((len(seeds) for arms in curves.values() for seeds in arms.values()), default=0)
    note = "Line: mean of the seeds. Band: their range." if num_seeds > 1 else ""
    return _Section(title=title, drawings=[Drawing(plot=plot, note=note) for plot in plots.values() if plot.series])


def _reading(log: SweepLog, num_seeds: int) -> str:
    contended = f" Up to {log.jobs} runs shared this machine, so times are longer than alone." if log.jobs > 1 else ""
    time = f" Time and tokens are means over finished runs; time is that of the steps of {log.stage} alone.{contended}"
    if num_seeds == 1:
        return "One seed has no interval: a difference between arms may be chance. Give several seeds before you choose." + time
    return (
        f"Intervals are Student's, over seeds. “Above {log.arms[0].name}” is the mean difference of runs of one seed, which"
        " start from the same weights and are evaluated on the same tasks; arms differ where its interval is on one side of 0."
        " Many arms make many comparisons: one of twenty is on one side by chance." + time
    )


def _run_row(log: SweepLog, run: SweepRun) -> _Row:
    interval = _NOTHING
    if run.low is not None and run.high is not None:
        interval = f"{_shown(log, run.low)} – {_shown(log, run.high)}"
    return _Row(
        name=run.name,
        link=f"{run.name}/report.html" if run.state is State.DONE else "",
        cells=(
            run.state.value,
            _NOTHING if run.result is None else _shown(log, run.result),
            interval,
            f"{len(run.steps)}",
            duration(run.time_s) if run.steps else _NOTHING,
            f"{run.tokens:,.0f}" if run.steps else _NOTHING,
        ),
    )


def sweep_json(log: SweepLog) -> dict[str, Any]:
    """The figures behind the page. Curves: metric -> arm -> seed -> [step, seconds, value]."""
    return {
        "format": FORMAT_VERSION,
        "name": log.name,
        "description": log.description,
        "command": log.command,
        "recipe": log.recipe,
        "common": list(log.common),
        "stage": log.stage,
        "result": log.result,
        "jobs": log.jobs,
        "arms": {arm.name: _arm_json(arm, log.arms[0]) for arm in log.arms},
        "runs": [{"arm": arm.name, **_run_json(run)} for arm in log.arms for run in arm.runs],
        "curves": {metric: {arm.name: _curves_json(arm, metric) for arm in log.arms} for metric in log.drawn},
    }


def _arm_json(arm: SweepArm, baseline: SweepArm) -> dict[str, Any]:
    values = list(arm.results.values())
    figures: dict[str, Any] = {"changes": list(arm.changes), "num_seeds": len(values)}
    if values:
        figures |= {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}
    if len(values) > 1:
        over_seeds = mean_of_seeds(values)
        figures |= {"low": over_seeds.low, "high": over_seeds.high}
    above = difference(arm, baseline) if arm is not baseline else None
    if above is not None:
        figures["above"] = {"arm": baseline.name, "mean": above.mean, "low": above.low, "high": above.high}
    return figures


def _run_json(run: SweepRun) -> Mapping[str, Any]:
    return {
        "name": run.name,
        "seed": run.seed,
        "state": run.state.value,
        "failure": run.failure,
        "result": run.result,
        "low": run.low,
        "high": run.high,
        "num_steps": len(run.steps),
        "time_s": run.time_s,
        "tokens": round(run.tokens),
    }


def _curves_json(arm: SweepArm, metric: str) -> dict[str, list[list[float]]]:
    return {
        str(run.seed): [[step, elapsed_s, value] for step, (elapsed_s, value) in curve.items()]
        for run in arm.runs
        if (curve := run.curve(metric))
    }
