"""The runs of a sweep in a terminal, on a page and in a JSON file: results over seeds, curves against steps and time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from strop.evaluation.statistics import Estimate, mean_of_seeds
from strop.reports.html import render
from strop.reports.log import Metrics, read_run
from strop.reports.number_format import NONE, Table, cell, duration, figure, unit_of
from strop.reports.panels import PANELS
from strop.reports.plots import Curves, Point, drawings_of
from strop.reports.terminal import print_table, printable
from strop.run_directory import RunDirectory, parse_json

_TAIL_BYTES = 65_536  # of metrics.jsonl, read for the last step


class State(StrEnum):
    """The state of a run of a sweep."""

    WAITING = "waiting"
    UNFINISHED = "unfinished"  # started earlier; the next call resumes it
    RUNNING = "running"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One arm with one seed."""

    seed: int
    name: str  # of the run and its directory
    state: State
    failure: str  # the error of a failed run
    result: float | None
    steps: Mapping[int, Metrics]  # of the stage that is compared

    @property
    def time_s(self) -> float:
        """Time of the steps, without interrupted steps and shared stages."""
        return sum(metrics.get("time/step_s", 0.0) for metrics in self.steps.values())

    @property
    def tokens(self) -> float:
        """Tokens sampled in the steps; for SFT, tokens trained on including prompts."""
        return sum(
            metrics.get("rollout/tokens_per_s", 0.0) * metrics.get("time/rollout_s", 0.0)
            + metrics.get("sft/tokens_per_s", 0.0) * metrics.get("time/step_s", 0.0)
            for metrics in self.steps.values()
        )

    def summary(self, metric: str) -> str:
        """Return the result of a finished run, which is of `metric`, in a few words."""
        return "done" if self.result is None else f"{metric or 'last step'} {figure(self.result, unit_of(metric))}"

    def curve(self, metric: str) -> dict[int, tuple[float, float]]:
        """Return step -> (seconds of all steps up to it, value) for each step that logged `metric`."""
        points, elapsed_s = {}, 0.0
        for step, metrics in self.steps.items():
            elapsed_s += metrics.get("time/step_s", 0.0)
            if metric in metrics:
                points[step] = (elapsed_s, metrics[metric])
        return points


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepArm:
    """One arm with all its seeds."""

    name: str
    changes: tuple[str, ...]  # as `--set` takes them
    runs: tuple[SweepRun, ...]

    @property
    def results(self) -> dict[int, float]:
        """Results by seed, of the runs that have one."""
        return {run.seed: run.result for run in self.runs if run.result is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLog:
    """The content of the page of a sweep."""

    name: str
    description: str
    command: str
    recipe: str
    common: tuple[str, ...]  # changes of every arm
    stage: str
    result: str  # evaluation.metric; "" for a metric of the last step
    curves: tuple[str, ...]
    jobs: int  # parallel runs
    arms: tuple[SweepArm, ...]

    @property
    def runs(self) -> tuple[SweepRun, ...]:
        return tuple(run for arm in self.arms for run in arm.runs)

    @property
    def failures(self) -> tuple[SweepRun, ...]:
        return tuple(run for run in self.runs if run.state is State.FAILED)

    @property
    def num_done(self) -> int:
        return sum(run.state is State.DONE for run in self.runs)

    @property
    def drawn(self) -> tuple[str, ...]:
        """The metrics to draw."""
        if self.curves:
            return self.curves
        steps = [metrics for run in self.runs for metrics in run.steps.values()]
        return tuple(metric for metric in PANELS.sweep if any(metrics.get(metric) for metrics in steps))


def read_sweep_run(
    run: RunDirectory, *, seed: int, state: State, failure: str, stage: str, result: str, curves: Sequence[str]
) -> SweepRun:
    """Read the steps and the result that `run` has so far. Raises `RunError` when a file is damaged."""
    steps: Mapping[int, Metrics] = {}
    figures: Metrics = {}
    name, _, metric = result.partition(".")
    if run.manifest.exists():
        log = read_run(run)
        steps = next((each.steps for each in log.stages if each.name == stage), {})
        figures = next((each.figures for each in log.current_evaluations if each.stage == name), {})
        if not result and steps and state is State.DONE:  # the recipe has no evaluation
            figures = steps[max(steps)]
            metric = next((each for each in (*curves, *PANELS.sweep) if each in figures), "")
    return SweepRun(seed=seed, name=run.path.name, state=state, failure=failure, result=figures.get(metric), steps=steps)


def difference(arm: SweepArm, baseline: SweepArm) -> Estimate | None:
    """Return how far `arm` is above `baseline` over their common seeds, or None for fewer than two.

    Runs of one seed share their cold start and the tasks of their evaluation, so differences vary less than results.
    """
    theirs = baseline.results
    pairs = [value - theirs[seed] for seed, value in arm.results.items() if seed in theirs]
    return mean_of_seeds(pairs) if len(pairs) > 1 else None


def curves_of(log: SweepLog, *, by_time: bool = False) -> Curves:
    """Return metric -> arm -> one curve a seed, against steps; or against the mean seconds that the seeds took up to a step."""
    started = [arm for arm in log.arms if any(run.steps for run in arm.runs)]
    return {metric: {arm.name: _arm_curves(arm, metric, by_time=by_time) for arm in started} for metric in log.drawn}


def _arm_curves(arm: SweepArm, metric: str, *, by_time: bool) -> list[list[Point]]:
    """Return curves over the steps that all seeds logged: a mean over fewer would jump where one ends.

    Unfinished runs are left out if there are finished ones.
    """
    done = [run for run in arm.runs if run.state is State.DONE] or arm.runs
    curves = [curve for run in done if (curve := run.curve(metric))]
    common = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
    x = {step: sum(curve[step][0] for curve in curves) / len(curves) if by_time else float(step) for step in common}
    return [[(x[step], curve[step][1]) for step in common] for curve in curves if common]


def results_table(log: SweepLog) -> Table:
    """Return one row an arm: the result over its seeds, the difference from the first arm, time and tokens."""
    return Table.of(_row(log, arm) for arm in log.arms)


def _row(log: SweepLog, arm: SweepArm) -> dict[str, str]:
    baseline = log.arms[0]
    found = _arm_json(arm, baseline)
    above = NONE
    if over := found.get("above"):
        above = f"{shown(log, over['mean'])} [{_bounds(log, over, 'low', 'high', ', ')}]"
    done = [run for run in arm.runs if run.state is State.DONE]
    return {
        "arm": arm.name,
        log.result.partition(".")[2] or "last step": shown(log, found.get("mean")),
        "95% interval": _bounds(log, found, "low", "high"),
        "range": _bounds(log, found, "min", "max"),
        f"above {baseline.name}": above,
        "seeds": f"{found['num_seeds']} of {len(arm.runs)}",
        "time": duration(sum(run.time_s for run in done) / len(done)) if done else NONE,
        "tokens": f"{sum(run.tokens for run in done) / len(done):,.0f}" if done else NONE,
    }


def _bounds(log: SweepLog, found: Mapping[str, Any], low: str, high: str, between: str = " – ") -> str:
    return f"{shown(log, found[low])}{between}{shown(log, found[high])}" if low in found else NONE


def shown(log: SweepLog, value: float | None) -> str:
    """Return a result as a cell of a table."""
    return cell(value, unit_of(log.result))


def sweep_page(log: SweepLog) -> str:
    """Return a page that needs no other file. It links to the reports of the runs."""
    units = {metric: unit_of(metric) for metric in log.drawn}
    axes = (("Against steps", curves_of(log), "step"), ("Against wall-clock time", curves_of(log, by_time=True), "seconds"))
    sections = [{"title": title, "drawings": drawings_of(curves, units=units, x_label=x)} for title, curves, x in axes]
    results, num_seeds = results_table(log), len(log.arms[0].runs)
    return render("sweep.html.j2", log=log, num_seeds=num_seeds, results=results, sections=sections, shown=partial(shown, log))


def sweep_json(log: SweepLog) -> dict[str, Any]:
    """Return the numbers of the page. Curves: metric -> arm -> seed -> [step, seconds, value]."""
    return {
        **{key: getattr(log, key) for key in ("name", "description", "command", "recipe", "common", "stage", "result", "jobs")},
        "arms": {arm.name: _arm_json(arm, log.arms[0]) for arm in log.arms},
        "runs": [{"arm": arm.name, **_run_json(run)} for arm in log.arms for run in arm.runs],
        "curves": {metric: {arm.name: _curves_json(arm, metric) for arm in log.arms} for metric in log.drawn},
    }


def _arm_json(arm: SweepArm, baseline: SweepArm) -> dict[str, Any]:
    values = list(arm.results.values())
    found: dict[str, Any] = {"changes": list(arm.changes), "num_seeds": len(values)}
    if values:
        found |= {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}
    if len(values) > 1:
        over_seeds = mean_of_seeds(values)
        found |= {"low": over_seeds.low, "high": over_seeds.high}
    if arm is not baseline and (above := difference(arm, baseline)) is not None:
        found["above"] = {"arm": baseline.name, "mean": above.mean, "low": above.low, "high": above.high}
    return found


def _run_json(run: SweepRun) -> dict[str, Any]:
    found = {name: getattr(run, name) for name in ("name", "seed", "state", "failure", "result", "time_s")}
    return {**found, "num_steps": len(run.steps), "tokens": round(run.tokens)}


def _curves_json(arm: SweepArm, metric: str) -> dict[str, list[list[float]]]:
    return {
        str(run.seed): [[step, elapsed_s, value] for step, (elapsed_s, value) in curve.items()]
        for run in arm.runs
        if (curve := run.curve(metric))
    }


class SweepConsole(AbstractContextManager["SweepConsole", None]):
    """Prints the progress of a sweep. In a terminal the last line shows the active runs."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console() if console is None else console
        self._status: Status | None = None
        self._num_runs = self._num_ended = 0

    def __exit__(self, *raised: object) -> None:
        self.close()

    def started(self, *, num_runs: int, num_done: int) -> None:
        self._num_runs, self._num_ended = num_runs, num_done
        self._print(f"{num_runs} runs" + (f", {num_done} done before" if num_done else ""))

    def warn(self, text: str) -> None:
        self._print(f"! {text}", style="yellow")

    def run_started(self, name: str, *, state: State, shared: str) -> None:
        """`shared` names the run whose first stages this run copies; "" if there is none."""
        how = "resumes" if state is State.UNFINISHED and not shared else "starts"
        self._print(f"  · {name} {how}" + (f", from the first stages of {shared}" if shared else ""))

    def run_finished(self, name: str, summary: str, time_s: float) -> None:
        self._num_ended += 1
        self._print(f"  ✓ {name}: {summary} ({duration(time_s)}; {self._num_ended} of {self._num_runs})")

    def run_failed(self, name: str, failure: str, log: Path) -> None:
        self._num_ended += 1
        self._print(f"  ✗ {name}: {failure}. Log: {log}", style="red")

    def under_way(self, runs: Mapping[str, RunDirectory]) -> None:
        """Show the active runs; called once a second."""
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._status.update(escape("   ".join(f"{name}: {last_step(run)}" for name, run in runs.items())))

    def finished(self, log: SweepLog, page: Path) -> None:
        self.close()
        self._console.print()
        print_table(results_table(log), console=self._console, without=("range", "tokens"), wrapped=("arm",))
        for run in log.failures:
            self._print(f"failed: {run.name}: {run.failure}", style="red")
        self._print(f"comparison: {page}")

    def close(self) -> None:
        """Remove the status line. Safe to call twice."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def last_step(run: RunDirectory) -> str:
    """Return the stage and step of the last line of a run's metrics."""
    try:
        with run.metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            line = parse_json(file.read().split(b"\n")[-2])
        return f"{line['stage']} {line['step']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "starts"
