"""What the runs of experiments/faithful.py amount to: figures and costs of a run, and paired differences between arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from scipy.special import stdtrit

from strop.evaluation.statistics import Estimate, mean_of_seeds
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.types import ToolOutcome

NUM_PAIRS = 3  # without which nothing counts as shown
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
    """What a step's rollouts took. `flat_`: the paths of its groups, had each been played from the prompt by itself."""

    calls: int = 0  # that reached a tool
    generated_tokens: float = 0  # sampled by the policy
    prefilled_tokens: int = 0  # of prompts and observations, and of what was no longer cached
    flat_calls: int = 0
    flat_generated_tokens: int = 0
    flat_prefilled_tokens: int = 0  # each path's prompt; each observation with the id before it, as the engine is fed it

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


def cost_of(trajectory: Mapping[str, Any], *, is_in_group: bool) -> Cost:
    """Tokens of a finished rollout as it stands on disk, and its path played flat. Turns before `forked_at` are its parent's,
    and counted there; one that was displaced is in no group, and nobody who plays flat has it."""
    cost, place, num_cached = Cost(), 0, 0
    for turn in trajectory["turns"]:
        completion = turn["completion"]
        generated = len(completion["ids"])
        context = len(trajectory["prompt_ids"]) + place
        if place >= trajectory["forked_at"]:
            cost += Cost(generated_tokens=generated, prefilled_tokens=context - completion["cached_tokens"])
        if is_in_group:
            calls = sum(ToolOutcome(call["outcome"]).is_dispatched for call in turn["calls"])
            cost += Cost(flat_calls=calls, flat_generated_tokens=generated, flat_prefilled_tokens=context - num_cached)
        num_cached = context + generated - 1
        place += generated + len(turn["observation_ids"])
    return cost


def cost_of_step(
    trajectories: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]], *, in_groups: Iterable[Mapping[str, int]]
) -> Cost:
    """All that was spent in a step, by branches that were displaced, too.

    Calls are those that the ledger saw begin, whatever became of their rollout; one that a fault of ours made run again is one
    call. A completion that was under way when its branch was displaced is charged as much as the step's mean completion,
    which is in the mean more than it had sampled, so that the doubt does not favour branching.

    Args:
        trajectories: those that finished.
        ledger: the step's events.
        in_groups: keys of the rollouts that are in a group.
    """
    members = {_as_tuple(key) for key in in_groups}
    finished = {_as_tuple(each["key"]) for each in trajectories}
    cost = sum((cost_of(each, is_in_group=_as_tuple(each["key"]) in members) for each in trajectories), Cost())
    lengths = [length for each in trajectories for length in _own_lengths(each)]
    calls = {(line["seed"], line["turn"], line["index"]) for line in ledger if line["event"] == "tool_opened"}
    cost += Cost(calls=len(calls))
    displaced = {_as_tuple(line["key"]): line for line in ledger if line["event"] == "displaced"}
    for key in displaced.keys() - finished:
        spent = displaced[key]
        under_way = sum(lengths) / len(lengths) if spent["is_sampling"] else 0
        cost += Cost(generated_tokens=spent["generated_tokens"] + under_way, prefilled_tokens=spent["prefilled_tokens"])
    return cost


def _own_lengths(trajectory: Mapping[str, Any]) -> list[int]:
    """Tokens of each completion that is not its parent's."""
    lengths, place = [], 0
    for turn in trajectory["turns"]:
        if place >= trajectory["forked_at"]:
            lengths.append(len(turn["completion"]["ids"]))
        place += len(turn["completion"]["ids"]) + len(turn["observation_ids"])
    return lengths


def _as_tuple(key: Mapping[str, int]) -> tuple[int, int, int]:
    return key["task_index"], key["attempt"], key["branch"]


def costs_by_step(run: RunDirectory, *, stage: str = "rl") -> list[Cost]:
    """What was spent by the end of each step, from 0 before the first."""
    steps = [int(step) for step, _ in curve_of(run, "rollout/accuracy", stage=stage)]
    return list(accumulate((_cost_on_disk(run, stage, step) for step in steps), initial=Cost()))


def _cost_on_disk(run: RunDirectory, stage: str, step: int) -> Cost:
    path = run.stage(stage).rollouts(step)
    groups = read_json(run.stage(stage).selection(step))["groups"]
    return cost_of_step(
        [line["rollout"]["trajectory"] for line in read_lines(path)],
        read_lines(path.with_suffix(".ledger.jsonl")),
        in_groups=[rollout["key"] for group in groups for rollout in group["rollouts"]],
    )


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


def on_common_grid(curves: Sequence[Curve], *, num_points: int = 41) -> list[Curve]:
    """The curves of several seeds, which all begin at 0, at equal distances up to where the first of them ends."""
    grid = np.linspace(0.0, min(curve[-1][0] for curve in curves), num_points).tolist()
    return [[(x, at(curve, x)) for x in grid] for curve in curves]


def paired(first: Mapping[int, float], second: Mapping[int, float], *, is_more_expected: bool) -> dict[str, Any]:
    """second - first by seed, with Student's 95 % interval and what it says; a seed where either has no figure is left out.

    `detectable` is the true difference that as many pairs with this spread would have shown with a power of 80 %.

    Args:
        is_more_expected: the hypothesis says that `second` is more than `first`; else that it is less.
    """
    by_seed = {seed: second[seed] - first[seed] for seed in sorted(first.keys() & second.keys())}
    values = list(by_seed.values())
    answer: dict[str, Any] = {"by_seed": by_seed, "num_pairs": len(values), "expected": "more" if is_more_expected else "less"}
    if values:
        answer["mean"] = sum(values) / len(values)
    if len(values) < NUM_PAIRS:
        return answer | {"verdict": f"not shown: {len(values)} of {NUM_PAIRS} pairs"}
    interval, spread = mean_of_seeds(values), float(np.std(values, ddof=1))
    reach = sum(float(stdtrit(len(values) - 1, share)) for share in (0.975, 0.8))
    answer |= {"low": interval.low, "high": interval.high, "spread": spread, "detectable": reach * spread / len(values) ** 0.5}
    return answer | {"verdict": _verdict(interval, is_more_expected=is_more_expected)}


def _verdict(difference: Estimate, *, is_more_expected: bool) -> str:
    if difference.low > 0:
        return "as expected" if is_more_expected else "opposite"
    if difference.high < 0:
        return "opposite" if is_more_expected else "as expected"
    return "not shown"
