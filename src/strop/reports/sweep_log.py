"""The runs of a sweep -> what its page says about them, as typed values: figures over seeds, curves against steps and time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from strop.evaluation.statistics import Estimate, mean_of_seeds
from strop.reports.compare import Curves
from strop.reports.log import Metrics, read_run
from strop.reports.plots import Point
from strop.reports.scales import Unit
from strop.runs import RunDirectory

USUAL_CURVES = (
    "validation/accuracy",
    "rollout/accuracy",
    "rollout/reward_mean",
    "rollout/tool_error_rate",
    "rollout/length_tokens_mean",
    "policy/entropy_nats",
    "update/grad_norm",
    "policy/clip_fraction_low",
    "policy/clip_fraction_high",
    "sft/loss",
)
"""Drawn where a sweep names none: those of them that a run logged and that are not 0 throughout."""


class State(StrEnum):
    """Where a run of a sweep stands."""

    WAITING = "waiting"
    UNFINISHED = "unfinished"  # begun, and to be gone on with
    RUNNING = "running"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One arm with one seed."""

    seed: int
    name: str  # of the run and its directory
    state: State
    failure: str  # why it ended, where it failed
    result: float | None
    low: float | None  # of the evaluation's own interval, which is over its tasks
    high: float | None
    steps: Mapping[int, Metrics]  # of the stage that is compared

    @property
    def time_s(self) -> float:
        """Of the steps, without what was interrupted or done for several arms at once."""
        return sum(metrics.get("time/step_s", 0.0) for metrics in self.steps.values())

    @property
    def tokens(self) -> float:
        """Sampled in the steps; of supervised ones, trained on with their prompts."""
        return sum(
            metrics.get("rollout/tokens_per_s", 0.0) * metrics.get("time/rollout_s", 0.0)
            + metrics.get("sft/tokens_per_s", 0.0) * metrics.get("time/step_s", 0.0)
            for metrics in self.steps.values()
        )

    def curve(self, metric: str) -> dict[int, tuple[float, float]]:
        """Step -> (seconds of all steps up to it, value), where it was logged."""
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
        """By seed, of the runs that have one."""
        return {run.seed: run.result for run in self.runs if run.result is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLog:
    """Everything a page says about a sweep."""

    name: str
    description: str
    command: str
    recipe: str
    common: tuple[str, ...]  # changes of every arm
    stage: str
    result: str  # evaluation.figure, or a metric of the stage's last step
    curves: tuple[str, ...]
    jobs: int  # the most runs that were under way at once
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
        values = {metric: {m.get(metric, 0.0) for run in self.runs for m in run.steps.values()} for metric in USUAL_CURVES}
        return tuple(metric for metric, seen in values.items() if seen - {0.0})


def read_sweep_run(
    run: RunDirectory, *, seed: int, state: State, failure: str, stage: str, result: str, curves: Sequence[str]
) -> SweepRun:
    """What is known now of the run in `run`; nothing where it did not begin. Raises `RunError` when a file is damaged."""
    steps: Mapping[int, Metrics] = {}
    figures: Metrics = {}
    name, _, figure = result.partition(".")
    if run.manifest.exists():
        log = read_run(run)
        steps = next((each.steps for each in log.stages if each.name == stage), {})
        figures = next((each.figures for each in log.current_evaluations if each.stage == name), {})
        if not result and steps and state is State.DONE:  # no evaluation: what the last step said
            figure = next((metric for metric in (*curves, *USUAL_CURVES) if metric in steps[max(steps)]), "")
            figures = steps[max(steps)]
    return SweepRun(
        seed=seed,
        name=run.path.name,
        state=state,
        failure=failure,
        result=figures.get(figure),
        low=figures.get(f"{figure}_low"),
        high=figures.get(f"{figure}_high"),
        steps=steps,
    )


def difference(arm: SweepArm, baseline: SweepArm) -> Estimate | None:
    """How far `arm` is above `baseline`, over the seeds that both have; None with fewer than two of them.

    Runs of one seed share their cold start and the tasks of their evaluation, so differences vary less than results.
    """
    theirs = baseline.results
    pairs = [value - theirs[seed] for seed, value in arm.results.items() if seed in theirs]
    return mean_of_seeds(pairs) if len(pairs) > 1 else None


def curves_by_step(log: SweepLog) -> Curves:
    """metric -> arm -> one curve a seed, against steps."""
    return _curves(log, lambda step, times: step)


def curves_by_time(log: SweepLog) -> Curves:
    """The same against seconds. Seeds meet at their steps: a point stands at their mean time up to the step."""
    return _curves(log, lambda step, times: sum(times) / len(times))


def _curves(log: SweepLog, x_of: Callable[[int, Sequence[float]], float]) -> Curves:
    """At the steps that all seeds of an arm logged, since a mean over fewer of them would jump where one ends.

    Unfinished runs are left out beside finished ones. An arm whose seeds have no step in common has no curve.
    """
    begun = [arm for arm in log.arms if any(run.steps for run in arm.runs)]
    return {metric: {arm.name: _arm_curves(arm, metric, x_of) for arm in begun} for metric in log.drawn}


def _arm_curves(arm: SweepArm, metric: str, x_of: Callable[[int, Sequence[float]], float]) -> list[list[Point]]:
    curves = [curve for run in _comparable(arm.runs) if (curve := run.curve(metric))]
    common = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
    x = {step: x_of(step, [curve[step][0] for curve in curves]) for step in common}
    return [[(x[step], curve[step][1]) for step in common] for curve in curves if common]


def _comparable(runs: Iterable[SweepRun]) -> list[SweepRun]:
    done = [run for run in runs if run.state is State.DONE]
    return done or list(runs)


def unit_of(metric: str) -> Unit:
    """How a metric, or a figure of an evaluation, is written."""
    is_share = metric.endswith(("accuracy", "error_rate", "error_rate_correct", "fraction", "pass_at_k"))
    return Unit.PERCENT if is_share or "clip_fraction" in metric else Unit.PLAIN
