"""Compares two evaluations problem by problem, on the problems that both have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from strop.errors import RunError
from strop.evaluation.results import RESULT, EvalFiles, place_of
from strop.evaluation.statistics import PairedDifference, paired_difference

Problems: TypeAlias = Mapping[tuple[str, int], Mapping[str, Any]]
"""By question, and how often it stood before: a generator may ask one twice."""

_LISTS = {"accuracy": "correct", "truncated": "truncated"}
_AMOUNTS = {name: name for name in ("length_tokens", "tool_calls", "tool_errors")}
_SETTINGS = ("model", "k", "temperature", "max_tokens", "max_turns", "prompt", "tools", "engine", "dtype")
_FREE_OF_JUDGEMENT = frozenset(
    (
        *("weights", "weight", "verify_deadline_s"),
        *("url", "key_env", "timeout_s", "retries", "backoff_s", "rate_per_s", "max_running", "cache"),  # of a service
        *("device", "max_tokens_per_batch", "max_wait_s", "max_batch"),  # of a reward model
    )
)
"""Keys of a reward, and of its parts, that leave its verdict as it is; weights do where a part says what is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricComparison:
    """One figure of both on the shared problems, and their difference (second - first)."""

    metric: str
    first: float
    second: float
    is_share: bool
    paired: PairedDifference


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two evaluations of one benchmark."""

    benchmark: str
    num_shared: int
    num_only_first: int
    num_only_second: int
    settings: Mapping[str, tuple[Any, Any]]  # those that differ
    stale: tuple[str, ...]  # for each that is, where and why
    metrics: tuple[MetricComparison, ...]

    def as_json(self) -> dict[str, Any]:
        metrics = [{**asdict(each), "detectable": each.paired.detectable()} for each in self.metrics]
        return {**asdict(self), "metrics": metrics}


def compare(first: EvalFiles, second: EvalFiles, *, seed: int = 0) -> Comparison:
    """Accuracy, every part of the reward that both have, lengths, calls, errors and truncation, each tested in pairs.

    A stale evaluation is compared as any other, and told of.

    Raises:
        RunError: one keeps no problems, they share none, they were judged in different ways, or one question has two answers.
    """
    of_first, of_second = _by_question(first), _by_question(second)
    shared = [key for key in of_first if key in of_second]
    names = [str(each.result.get("benchmark", "unnamed")) for each in (first, second)]
    where = f"{first.directory} and {second.directory}"
    if not shared:
        why = (
            f"the first is of {names[0]!r}, the second of {names[1]!r}"
            if names[0] != names[1]
            else f"both are of {names[0]!r}, but asked {len(of_first)} and {len(of_second)} different questions (split, seed or"
            " data differ)"
        )
        raise RunError(f"{where} share no problem: {why}. Compare evaluations of the same problems.")
    _check_judges(first, second, where)
    for key in shared:
        answers = of_first[key]["answer"], of_second[key]["answer"]
        if answers[0] != answers[1]:
            raise RunError(
                f"{where} differ in task: the answer to {key[0][:80]!r} is {answers[0]!r} in the first and {answers[1]!r} in"
                " the second. Evaluate both on one version of the data."
            )
    pairs = [(of_first[key], of_second[key]) for key in shared]
    return Comparison(
        benchmark=names[0],
        num_shared=len(shared),
        num_only_first=len(of_first) - len(shared),
        num_only_second=len(of_second) - len(shared),
        settings=_differing(first.result, second.result),
        stale=tuple(_told_stale(each) for each in (first, second) if each.why_stale),
        metrics=tuple(_metric(name, pairs, seed) for name in _metric_names(pairs)),
    )


def _by_question(files: EvalFiles) -> Problems:
    """Those that have an attempt."""
    if not files.problems:
        raise RunError(
            f"{files.directory}: keeps no problems (an evaluation of an earlier version, or a harness that tells totals alone),"
            " so nothing can be paired. Evaluate again."
        )
    seen: Counter[str] = Counter()
    found = {}
    for problem in files.problems:
        key = str(problem["question"]), seen[problem["question"]]
        seen[problem["question"]] += 1
        if problem["correct"] or problem.get("length_tokens"):
            found[key] = problem
    return found


def _check_judges(first: EvalFiles, second: EvalFiles, where: str) -> None:
    judges = [_judge(each.result) for each in (first, second)]
    if judges[0] == judges[1]:
        return
    keys = [key for key in {**judges[0], **judges[1]} if judges[0].get(key) != judges[1].get(key)]
    told = ", ".join(f"{key} = {judges[0].get(key)!r} and {judges[1].get(key)!r}" for key in keys[:3])
    raise RunError(f"{where} were judged in different ways: {told}. Evaluate both under one reward.")


def _judge(result: Mapping[str, Any]) -> dict[str, Any]:
    reward = result.get("reward") or {"harness": result.get("harness")}
    is_sum_that_judges = reward.get("kind") == "sum" and "accuracy" not in reward.get("parts", {})
    return _judging(reward, "reward", _FREE_OF_JUDGEMENT - ({"weight"} if is_sum_that_judges else set()))


def _judging(tree: Mapping[str, Any], place: str, free: Set[str]) -> dict[str, Any]:
    """By dotted key, what decides over a verdict. Parts, and facts in a part's `where`, may be called as they like."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if key in free and place != "reward.parts" and not place.endswith(".where"):
            continue
        if isinstance(value, Mapping):
            found |= _judging(value, f"{place}.{key}", free)
        else:
            found[f"{place}.{key}"] = value
    return found


def _told_stale(files: EvalFiles) -> str:
    stage = place_of(files.directory / RESULT)
    return (
        f"{stage}: stale, so its figures are not those of what the recipe makes now: {files.why_stale}. `strop train` with"
        f" --from {stage.name} makes it anew."
    )


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (first.get(key), second.get(key)) for key in _SETTINGS if first.get(key) != second.get(key)}


def _metric_names(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """Those that some problem has in both: a part of the reward, and so a verdict, may be for some problems alone."""
    parts = dict.fromkeys(name for first, _ in pairs for name in first.get("parts", {}) if name != "accuracy")
    return [name for name in (*_LISTS, *_AMOUNTS, *parts) if _having(pairs, name)]


def _metric(name: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], seed: int) -> MetricComparison:
    first, second = ([_mean(_values(pair[at], name)) for pair in _having(pairs, name)] for at in (0, 1))
    is_share = name not in _AMOUNTS and all(0 <= value <= 1 for value in (*first, *second))
    return MetricComparison(
        metric=name,
        first=_mean(first),
        second=_mean(second),
        is_share=is_share,
        paired=paired_difference(first, second, seed=seed, is_share=is_share),
    )


def _having(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], name: str
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return [pair for pair in pairs if all(_values(problem, name) for problem in pair)]


def _values(problem: Mapping[str, Any], name: str) -> Sequence[float]:
    """Of the attempts that were given one."""
    column = _LISTS.get(name) or _AMOUNTS.get(name)
    values: Sequence[float | None] = problem.get(column, []) if column else problem.get("parts", {}).get(name, [])
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)  # the same in any order of the attempts
