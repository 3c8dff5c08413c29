"""What the experiments on whole pipelines draw: metrics across stages, and evaluations one beside the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from faithful_measures import Curve, curve_of
from pipelines_measures import Runs

from strop.evaluation.results import read_eval
from strop.reports.number_format import Unit
from strop.reports.plots import Boundary, Plot, compare_plots
from strop.run_directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Metrics of stages that follow each other, their steps numbered on from one to the next; a line an arm.

    Attributes:
        name: of the file, behind the part's; empty for the part's own.
        metrics: key in metrics.jsonl -> what it is called.
        is_together: all metrics of an arm, each as a share of its own range; else there is one.
    """

    name: str
    title: str
    metrics: Mapping[str, str]
    stages: tuple[str, ...]
    is_share: bool = False
    is_together: bool = False

    def plot(self, runs: Runs) -> Plot:
        lines = {
            f"{arm}: {called}" if self.is_together else arm: [self._curve(run, metric) for run in by_seed.values()]
            for arm, by_seed in runs.items()
            for metric, called in self.metrics.items()
        }
        some_run = next(iter(next(iter(runs.values())).values()))
        marks = zip(begins(some_run, self.stages), self.stages[1:], strict=True)
        plot = _plot(self.title, lines, is_share=self.is_share, x_label="step")
        return replace(plot, boundaries=tuple(Boundary(x=x + 0.5, label=stage) for x, stage in marks))

    def _curve(self, run: RunDirectory, metric: str) -> Curve:
        curve = across(run, self.stages, metric)
        return as_share_of_range(curve) if self.is_together else curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Rungs:
    """One figure of several evaluations of an arm, from left to right; `title` says which is which."""

    name: str
    title: str
    evaluations: tuple[str, ...]
    figure: str = "accuracy"

    def plot(self, runs: Runs) -> Plot:
        lines = {
            arm: [
                [
                    (float(index), float(read_eval(run.stage(each).path).result[self.figure]))
                    for index, each in enumerate(self.evaluations)
                ]
                for run in by_seed.values()
            ]
            for arm, by_seed in runs.items()
        }
        return _plot(self.title, lines, is_share=True, x_label="evaluation")


def _plot(title: str, lines: Mapping[str, Sequence[Curve]], *, is_share: bool, x_label: str) -> Plot:
    """The mean of the seeds and their range, a line an arm."""
    return compare_plots({title: lines}, units={title: Unit.PERCENT} if is_share else None, x_label=x_label)[title]


def across(run: RunDirectory, stages: Sequence[str], metric: str) -> Curve:
    """`metric` of several stages on one axis: steps are numbered on from stage to stage."""
    return [
        (begin + step, value)
        for stage, begin in zip(stages, (0.0, *begins(run, stages)), strict=True)
        for step, value in curve_of(run, metric, stage=stage)
    ]


def begins(run: RunDirectory, stages: Sequence[str]) -> list[float]:
    """The last step before each of `stages` but the first, on the axis of `across`."""
    ends: list[float] = []
    for stage in stages[:-1]:
        num_steps = max((step for step, _ in curve_of(run, "time/step_s", stage=stage)), default=0.0)
        ends.append((ends[-1] if ends else 0.0) + num_steps)
    return ends


def as_share_of_range(curve: Curve) -> Curve:
    """Its lowest value as 0, its highest as 1."""
    values = [value for _, value in curve]
    low, high = min(values, default=0.0), max(values, default=1.0)
    return [(x, (value - low) / (high - low) if high > low else 0.0) for x, value in curve]
