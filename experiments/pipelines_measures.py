"""What the runs of experiments/pipelines.py amount to: figures, and paired differences between evaluations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faithful_measures import curve_of

from cs336 import Scores, paired_difference
from strop.evaluation.results import read_eval
from strop.evaluation.statistics import mean_of_seeds
from strop.run_directory import RunDirectory, read_json

Runs = Mapping[str, Mapping[int, RunDirectory]]
"""Arm -> seed -> its run."""
LARGE_LOSS = 0.05
"""Of what is expected not to be less: whether the interval reaches so far below 0 is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An evaluation of an arm's runs."""

    arm: str
    stage: str

    def __str__(self) -> str:
        return f"{self.arm}.{self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A sentence of the hypotheses: of `figure`, `second` has more than `first`, less, or at least not less.

    Attributes:
        figure: "accuracy", or a part of the reward.
        is_deciding: whether the part of the experiment stands or falls with it.
    """

    figure: str
    first: Side
    second: Side
    expected: str = "more"  # "more", "less", "not less"
    is_deciding: bool = False

    @property
    def name(self) -> str:
        return f"{self.figure}: {self.second} - {self.first}"


def scores(run: RunDirectory, stage: str, figure: str) -> Scores:
    """Problem -> the mean of `figure` over its attempts, as the evaluation `stage` found it; void attempts are left out."""
    found = {}
    for number, problem in enumerate(read_eval(run.stage(stage).path).problems):
        every = problem["correct"] if figure == "accuracy" else problem["parts"][figure]
        values = [each for each in every if each is not None]
        if values:
            found[number] = sum(values) / len(values)
    return found


def judged(runs: Runs, each: Difference) -> dict[str, Any]:
    """The difference by seed, its mean with two 95 % intervals, and whether the hypothesis holds.

    The bootstrap draws seeds and then problems of each. One seed has an interval of its problems, and no verdict.
    """
    first, second = runs[each.first.arm], runs[each.second.arm]
    seeds = sorted(first.keys() & second.keys())
    pairs = [
        (scores(first[seed], each.first.stage, each.figure), scores(second[seed], each.second.stage, each.figure))
        for seed in seeds
    ]
    by_seed = [paired_difference([pair], num_resamples=1).mean for pair in pairs]
    drawn = paired_difference(pairs)
    answer: dict[str, Any] = {
        "name": each.name,
        "figure": each.figure,
        "first": str(each.first),
        "second": str(each.second),
        "expected": each.expected,
        "is_deciding": each.is_deciding,
        "mean": drawn.mean,
        "low": drawn.low,
        "high": drawn.high,
        "by_seed": dict(zip(map(str, seeds), by_seed, strict=True)),
    }
    if len(seeds) < 2:
        return answer | {"verdict": "pilot: one seed decides nothing"}
    student = mean_of_seeds(by_seed)
    answer |= {"student_low": student.low, "student_high": student.high}
    return answer | {"verdict": verdict(each.expected, low=drawn.low, high=drawn.high, by_seed=by_seed)}


def verdict(expected: str, *, low: float, high: float, by_seed: Sequence[float]) -> str:
    """What the interval and the seeds say of an expectation: as expected, opposite, or not shown."""
    if expected == "not less":
        as_expected = "as expected" if low > -LARGE_LOSS else f"as expected, but a loss of {LARGE_LOSS:g} is not excluded"
        return "opposite" if high < 0 else as_expected
    sign = 1 if expected == "more" else -1
    ends, each = sorted((sign * low, sign * high)), [sign * value for value in by_seed]
    if ends[0] > 0 and min(each) > 0:
        return "as expected"
    return "opposite" if ends[1] < 0 and max(each) < 0 else "not shown"


def bars(differences: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The deciding differences by name, each with its value, what was asked of it, and whether it holds; None of a pilot."""
    asked = {
        "more": "95 % interval and every seed above 0",
        "less": "95 % interval and every seed below 0",
        "not less": "95 % interval not wholly below 0",
    }
    return {
        each["name"]: {
            "value": each["mean"],
            "low": each["low"],
            "high": each["high"],
            "bar": asked[each["expected"]],
            "holds": None if each["verdict"].startswith("pilot") else each["verdict"].startswith("as expected"),
        }
        for each in differences
        if each["is_deciding"]
    }


def by_grade(by_seed: Mapping[int, RunDirectory], stage: str) -> dict[str, dict[str, float]]:
    """Grade -> seed -> accuracy on the rows of that grade, which their names begin with, as in grade-3/..."""
    answer: dict[str, dict[str, float]] = {}
    for seed, run in by_seed.items():
        of_grade: defaultdict[str, list[int]] = defaultdict(list)
        for problem in read_eval(run.stage(stage).path).problems:
            of_grade[problem["id"].partition("/")[0]] += problem["correct"]
        for grade, verdicts in sorted(of_grade.items()):
            if verdicts:  # else every attempt was void
                answer.setdefault(grade, {})[str(seed)] = sum(verdicts) / len(verdicts)
    return answer


def spent(runs: Runs, stage: str) -> dict[str, dict[str, dict[str, float]]]:
    """Arm -> seed -> seconds that the RL stage `stage` took, rollouts that it learnt from, and tokens of their responses."""
    answer: dict[str, dict[str, dict[str, float]]] = {}
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            lengths = dict(curve_of(run, "rollout/length_tokens_mean", stage=stage))
            used = dict(curve_of(run, "groups/rollouts_used", stage=stage))
            answer.setdefault(arm, {})[str(seed)] = {
                "time_s": float(read_json(run.stage(stage).done)["time_s"]),
                "rollouts": sum(used.values()),
                "response_tokens": sum(length * used.get(step, 0.0) for step, length in lengths.items()),
            }
    return answer


def told(runs: Runs, stages: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Arm -> evaluation -> seed -> its figures, and the mean of each part of the reward."""
    answer: dict[str, dict[str, dict[str, Any]]] = {}
    for arm, by_seed in runs.items():
        for stage in stages:
            for seed, run in by_seed.items():
                result = read_eval(run.stage(stage).path).result
                figures = {key: result[key] for key in _SHOWN if key in result}
                figures |= {f"part_{part}": found["mean"] for part, found in result["parts"].items()}
                answer.setdefault(arm, {}).setdefault(stage, {})[str(seed)] = figures
    return answer


_SHOWN = (
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "num_tasks",
    "k",
    "tool_calls_mean",
    "tool_error_rate",
    "tool_error_rate_correct",
    "length_tokens_mean",
    "truncated_fraction",
    "void_fraction",
    "tokens",
    "time_s",
)
