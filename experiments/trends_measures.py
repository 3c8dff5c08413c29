"""What the runs of experiments/trends.py amount to: figures and costs of a run, and paired differences between arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from strop.evaluation.statistics import Estimate, mean_of_seeds
from strop.runs import RunDirectory, read_json, read_lines

Curve = list[tuple[float, float]]


def evaluated(runs: Mapping[int, RunDirectory], figure: str, *, stage: str = "after") -> dict[int, float]:
    """`figure` of the evaluation `stage`, by seed; without seeds that have none, as tool errors where nothing was called."""
    results = {seed: read_json(run.stage(stage).evaluation) for seed, run in runs.items()}
    return {seed: float(result[figure]) for seed, result in results.items() if figure in result}


def curve_of(run: RunDirectory, metric: str, *, stage: str = "rl") -> Curve:
    """(step, value) of each step of `stage` that has `metric`."""
    return [
        (float(line["step"]), float(line[metric]))
        for line in read_lines(run.metrics)
        if line["stage"] == stage and metric in line
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a step's rollouts took. `flat_`: the same paths, had each been played from the prompt by itself."""

    calls: int = 0
    generated_tokens: int = 0  # sampled by the policy
    prefilled_tokens: int = 0  # of prompts and observations, and of what was no longer cached
    flat_calls: int = 0
    flat_generated_tokens: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


def cost_of(trajectory: Mapping[str, Any]) -> Cost:
    """Of a rollout as it stands on disk. Turns before `forked_at` are its parent's, and counted there."""
    cost, place = Cost(), 0
    for turn in trajectory["turns"]:
        completion = turn["completion"]
        calls = sum(call["outcome"] != "not_run" for call in turn["calls"])
        generated = len(completion["ids"])
        is_own = place >= trajectory["forked_at"]
        context = len(trajectory["prompt_ids"]) + place
        cost += Cost(
            calls=calls if is_own else 0,
            generated_tokens=generated if is_own else 0,
            prefilled_tokens=context - completion["cached_tokens"] if is_own else 0,
            flat_calls=calls,
            flat_generated_tokens=generated,
        )
        place += generated + len(turn["observation_ids"])
    return cost


def costs_by_step(run: RunDirectory, *, stage: str = "rl") -> list[Cost]:
    """What was spent by the end of each step, from 0 before the first; rollouts that were displaced cost, too."""
    steps = [int(step) for step, _ in curve_of(run, "rollout/accuracy", stage=stage)]
    each = (sum((cost_of(line["rollout"]["trajectory"]) for line in lines), Cost()) for lines in _rollouts(run, stage, steps))
    return list(accumulate(each, initial=Cost()))


def _rollouts(run: RunDirectory, stage: str, steps: Iterable[int]) -> Iterable[list[dict[str, Any]]]:
    return (read_lines(run.stage(stage).rollouts(step)) for step in steps)


def accuracy_by_calls(run: RunDirectory, costs: Sequence[Cost]) -> Curve:
    """(tool calls made, held-out accuracy of the policy then), from the cold start on."""
    before = float(read_json(run.stage("before").evaluation)["accuracy"])
    return [(0.0, before), *((float(costs[int(step)].calls), value) for step, value in curve_of(run, "validation/accuracy"))]


def mean_up_to(curve: Curve, end: float) -> float:
    """The mean of a curve, straight between its points, over [its start, `end`], which lies on it."""
    area = 0.0
    for (left, low), (right, high) in pairwise(curve):
        if right <= end:
            area += (right - left) * (low + high) / 2
        elif left < end:
            area += (end - left) * (low + at(curve, end)) / 2
    return area / (end - curve[0][0])


def at(curve: Curve, x: float) -> float:
    """The value of a curve at `x`, straight between its points."""
    return float(np.interp(x, [point[0] for point in curve], [point[1] for point in curve]))


def paired(first: Mapping[int, float], second: Mapping[int, float], *, is_more_expected: bool) -> dict[str, Any]:
    """second - first by seed, with its intervals and what they say; a seed where either has no figure is left out.

    Args:
        is_more_expected: the hypothesis says that `second` is more than `first`; else that it is less.
    """
    by_seed = {seed: second[seed] - first[seed] for seed in sorted(first.keys() & second.keys())}
    values = list(by_seed.values())
    answer: dict[str, Any] = {"by_seed": by_seed, "expected": "more" if is_more_expected else "less"}
    if not values:
        return answer | {"verdict": "no figures"}
    answer["mean"] = sum(values) / len(values)
    if len(values) < 2:
        return answer | {"verdict": "pilot: one seed decides nothing"}
    drawn, student = bootstrap(values), mean_of_seeds(values)
    answer |= {"low": drawn.low, "high": drawn.high, "student_low": student.low, "student_high": student.high}
    answer["spread"] = float(np.std(values, ddof=1))
    return answer | {"verdict": _verdict(drawn, is_more_expected=is_more_expected)}


def bootstrap(values: Sequence[float], *, num_resamples: int = 10_000) -> Estimate:
    """The mean of seeds, and the 95 % interval of the means of as many seeds drawn with replacement."""
    drawn = np.random.default_rng(0).choice(np.array(values), size=(num_resamples, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(mean=float(np.mean(values)), low=float(low), high=float(high))


def _verdict(difference: Estimate, *, is_more_expected: bool) -> str:
    if difference.low > 0:
        return "as expected" if is_more_expected else "opposite"
    if difference.high < 0:
        return "opposite" if is_more_expected else "as expected"
    return "not shown"
