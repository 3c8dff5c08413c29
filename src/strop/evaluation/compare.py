"""Compares two evaluations on the problems that both have."""

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
"""By question and its occurrence: a generator may ask one twice."""

Pair: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any]]
"""One problem in both evaluations."""

_SHARES = {"accuracy": "correct", "truncated": "truncated"}
_AMOUNTS = ("length_tokens", "tool_calls", "tool_errors")
_SETTINGS = (
    *("model", "k", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("max_tokens", "max_turns", "prompt", "tools", "engine", "dtype"),
)
_NO_EFFECT = frozenset(("weights", "weight", "verify_deadline_s", "device", "max_batch"))  # the last two: of a reward model
_NO_EFFECT |= {"url", "key_env", "timeout_s", "retries", "max_running", "cache"}  # of a service
"""Keys of a reward and of its parts that do not change a verdict. Weights change it if no part says what is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricComparison:
    """One metric of both on the shared problems, and their difference (second - first)."""

    metric: str
    first: float
    second: float
    is_share: bool
    paired: PairedDifference

    @property
    def detectable(self) -> float | None:
        """The smallest true difference found with probability 0.8; None if unknown, or if no possible one is found."""
        found = self.paired.detectable
        return None if found is None or (self.is_share and found > 1) else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two evaluations of one benchmark."""

    benchmark: str
    num_shared: int
    num_only_first: int
    num_only_second: int
    settings: Mapping[str, tuple[Any, Any]]  # those that differ
    stale: tuple[str, ...]  # for each stale evaluation, where and why
    metrics: tuple[MetricComparison, ...]

    def as_json(self) -> dict[str, Any]:
        metrics = [{**asdict(each), "detectable": each.detectable} for each in self.metrics]
        return {**asdict(self), "metrics": metrics}


def compare(first: EvalFiles, second: EvalFiles, *, seed: int = 0) -> Comparison:
    """Compare accuracy, every part of the reward that both have, lengths, calls, errors and truncation in pairs.

    Stale evaluations are compared too, and listed in `stale`.

    Raises:
        RunError: one has no problems, they share none, their rewards differ, or one question has two answers.
    """
    of_first, of_second = _by_question(first), _by_question(second)
    shared = [key for key in of_first if key in of_second]
    names = [str(each.result.get("benchmark", "unnamed")) for each in (first, second)]
    settings = {key: (first.result.get(key), second.result.get(key)) for key in _SETTINGS}
    where = f"{first.directory} and {second.directory}"
    if not shared:
        raise RunError(
            f"{where} share no problem: the first asks {len(of_first)} questions of {names[0]!r}, the second {len(of_second)}"
            f" of {names[1]!r}. Compare evaluations of the same benchmark, split and seed."
        )
    _check_judges(first, second, where)
    for key in shared:
        answers = of_first[key]["answer"], of_second[key]["answer"]
        if answers[0] != answers[1]:
            raise RunError(
                f"{where}: the answer to {key[0][:80]!r} is {answers[0]!r} in the first and {answers[1]!r} in the second."
                " Evaluate both on one version of the data."
            )
    pairs = [(of_first[key], of_second[key]) for key in shared]
    return Comparison(
        benchmark=names[0],
        num_shared=len(shared),
        num_only_first=len(of_first) - len(shared),
        num_only_second=len(of_second) - len(shared),
        settings={key: (one, other) for key, (one, other) in settings.items() if one != other},
        stale=tuple(_stale_text(each) for each in (first, second) if each.why_stale),
        metrics=tuple(_metric(name, pairs, seed) for name in _metric_names(pairs)),
    )


def _by_question(files: EvalFiles) -> Problems:
    """Return the problems with an attempt."""
    if not files.problems:
        raise RunError(
            f"{files.directory}: has no problems.jsonl (some harnesses report only totals), so nothing can be paired. Compare"
            " evaluations that have one."
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
    one, other = _judge(first.result), _judge(second.result)
    if keys := [key for key in {**one, **other} if one.get(key) != other.get(key)]:
        differing = ", ".join(f"{key} = {one.get(key)!r} and {other.get(key)!r}" for key in keys[:3])
        raise RunError(f"{where} have different rewards: {differing}. Evaluate both with one reward.")


def _judge(result: Mapping[str, Any]) -> dict[str, Any]:
    reward = result.get("reward") or {"harness": result.get("harness")}
    is_sum_that_judges = reward.get("kind") == "sum" and "accuracy" not in reward.get("parts", {})
    return _judging(reward, "reward", _NO_EFFECT - ({"weight"} if is_sum_that_judges else set()))


def _judging(tree: Mapping[str, Any], place: str, free: Set[str]) -> dict[str, Any]:
    """Return the keys that affect a verdict, by dotted path. Names of parts and of facts in `where` are free."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if key in free and place != "reward.parts" and not place.endswith(".where"):
            continue
        if isinstance(value, Mapping):
            found |= _judging(value, f"{place}.{key}", free)
        else:
            found[f"{place}.{key}"] = value
    return found


def _stale_text(files: EvalFiles) -> str:
    stage = place_of(files.directory / RESULT)
    return (
        f"{stage}: stale, so its results do not match the recipe: {files.why_stale}. Rerun it: `strop train` with --from"
        f" {stage.name}."
    )


def _metric_names(pairs: Sequence[Pair]) -> list[str]:
    """Return the metrics that some problem has in both: a part of the reward may apply to only some problems."""
    parts = dict.fromkeys(name for first, _ in pairs for name in first.get("parts", {}) if name != "accuracy")
    return [name for name in (*_SHARES, *_AMOUNTS, *parts) if _having(pairs, name)]


def _metric(name: str, pairs: Sequence[Pair], seed: int) -> MetricComparison:
    first, second = ([_mean(_values(pair[at], name)) for pair in _having(pairs, name)] for at in (0, 1))
    is_share = name not in _AMOUNTS and all(0 <= value <= 1 for value in (*first, *second))
    return MetricComparison(
        metric=name,
        first=_mean(first),
        second=_mean(second),
        is_share=is_share,
        paired=paired_difference(first, second, seed=seed, is_share=is_share),
    )


def _having(pairs: Sequence[Pair], name: str) -> list[Pair]:
    return [pair for pair in pairs if all(_values(problem, name) for problem in pair)]


def _values(problem: Mapping[str, Any], name: str) -> Sequence[float]:
    """Return the values of the attempts that have one."""
    columns = problem if name in _SHARES or name in _AMOUNTS else problem.get("parts", {})
    values: Sequence[float | None] = columns.get(_SHARES.get(name, name), [])
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)  # the same in any order of the attempts
