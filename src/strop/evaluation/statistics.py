"""Statistics of repeated attempts at a set of tasks (avg@k with an interval, pass@k, maj@k), and of repeated runs.

Every figure of attempts is a mean over tasks with equal weights, so avg@k equals pass@1 also where void attempts left some
tasks with fewer than k. The caller leaves out void attempts; a task without any attempt has no figure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

_LEVEL, _POWER = 0.95, 0.8  # coverage of intervals; chance to find a true difference
_NUM_RESAMPLES = 10_000
_BLOCK = 4_000_000  # draws in memory at once: 32 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


def average_at_k(scores: Sequence[Sequence[float]], *, seed: int) -> Estimate:
    """Return avg@k (pass@1 in rStar2-Agent, section 5): the mean score of an attempt, with a bootstrap interval over tasks.

    Attempts at one task share its difficulty, so whole tasks are resampled, and the percentiles of the resampled means are the
    interval. Where all tasks have the same mean, all resamples agree; if that mean is a share, the interval then uses the exact
    binomial bound on the share of tasks that differ, as if those were 0 or 1: 1 - 0.025 ** (1 / num_tasks).

    Args:
        scores: per task, the score of each attempt; the numbers of attempts may differ.
        seed: of the resampling. The same seed gives the same interval.

    Raises:
        ValueError: there is no task, or a task has no attempt.
    """
    means = _task_means(scores)
    mean = float(means.mean())
    if np.all(means == means[0]) and 0 <= means[0] <= 1:
        return bounded_share(mean, len(means))
    low, high = bootstrap_interval([means], np.mean, seed=seed)
    return Estimate(mean=mean, low=low, high=high)


def bounded_share(mean: float, num: int) -> Estimate:
    """Return the interval of a share that is the same for each of `num` tasks: up to `unseen_share` of others may differ."""
    reach = unseen_share(num)
    return Estimate(mean=mean, low=mean - reach * mean, high=mean + reach * (1 - mean))


def bootstrap_interval(columns: Sequence[np.ndarray], statistic: Callable[..., Any], *, seed: int) -> tuple[float, float]:
    """Return the percentile bootstrap interval of `statistic(*columns, axis=-1)` over rows drawn with replacement."""
    if all(np.all(column == column[0]) for column in columns):  # also where there is one row, which SciPy refuses
        value = float(statistic(*columns, axis=-1))
        return value, value
    from scipy import stats  # loads for a second, so not where a recipe is checked

    found = stats.bootstrap(
        columns,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=_NUM_RESAMPLES,
        batch=max(1, _BLOCK // len(columns[0])),
        confidence_level=_LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The mean of (second - first) over the same tasks, with its interval and p-value."""

    difference: Estimate
    p_value: float
    num_better: int  # tasks where the second is higher
    num_worse: int
    standard_error: float | None  # of the mean difference; None if unknown

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that a comparison with this standard error finds with probability 0.8.

        This is 2.80 times the standard error, from the normal distribution. Where few tasks differ it is a little more: of n
        tasks with 0 or 1 each, the exact test finds nothing below 6 / n.
        """
        if self.standard_error is None:
            return None
        normal = NormalDist()
        return (normal.inv_cdf((1 + _LEVEL) / 2) + normal.inv_cdf(_POWER)) * self.standard_error


def paired_difference(first: Sequence[float], second: Sequence[float], *, seed: int, is_share: bool = True) -> PairedDifference:
    """Compare two conditions task by task, which cancels the difficulty of each task.

    The interval is a bootstrap over tasks. The two-sided p-value is that of the permutation test that swaps the conditions
    within tasks (with 0 or 1 for each task: the exact McNemar test). It tries all swaps if there are at most 10 000, else
    that many random ones, and is never 0.

    Args:
        first, second: the mean of each task, in the same order.
        seed: of resampling and swaps.
        is_share: the values lie between 0 and 1. If all tasks differ by the same amount, the interval is then the exact
            binomial bound on the share of tasks that would differ otherwise, by -1 or 1, and the standard error follows from
            it. For other values the interval is then a point, and the standard error is unknown.

    Raises:
        ValueError: there is no task, or the two have different numbers of tasks.
    """
    if not first:
        raise ValueError("the difference over no tasks is undefined")
    differences = np.subtract(np.asarray(second, dtype=np.float64), np.asarray(first, dtype=np.float64))
    mean = float(differences.mean())
    if differences.min() < differences.max():
        low, high = bootstrap_interval([differences], np.mean, seed=seed)
        standard_error: float | None = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    else:
        reach = unseen_share(len(differences)) if is_share else 0.0
        low, high = mean - reach * (1 + mean), mean + reach * (1 - mean)
        standard_error = math.sqrt(reach / len(differences)) if is_share else None
    return PairedDifference(
        difference=Estimate(mean=mean, low=low, high=high),
        p_value=_swap_test(differences[differences != 0], seed),
        num_better=int((differences > 0).sum()),
        num_worse=int((differences < 0).sum()),
        standard_error=standard_error,
    )


def unseen_share(num: int) -> float:
    """Return the exact binomial bound on the share of tasks that differ, where none of `num` does."""
    return 1 - math.pow((1 - _LEVEL) / 2, 1 / num)


def _swap_test(differences: np.ndarray, seed: int) -> float:
    """Return how often randomly swapped tasks have a sum as far from 0 as `differences`, none of which is 0."""
    if len(differences) < 2:
        return 1.0  # swapping one task or none leaves the distance from 0 as it is
    from scipy import stats  # see above

    found = stats.permutation_test(
        [differences],
        lambda values, axis: np.abs(values.sum(axis=axis)),
        permutation_type="samples",
        vectorized=True,
        alternative="greater",
        n_resamples=_NUM_RESAMPLES,
        batch=max(1, _BLOCK // len(differences)),
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def mean_of_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean of runs that differ only in their seed, with Student's 95% interval: mean ± t s / √n, s unbiased.

    Few seeds give a wide interval: t is 12.7 for two, 4.30 for three, 2.78 for five. The interval is not clipped, so that of
    an accuracy may exceed 1.

    Raises:
        ValueError: there are fewer than two values.
    """
    from scipy import special

    num = len(values)
    if num < 2:
        raise ValueError(f"an interval over seeds needs at least two values, not {num}")
    mean = math.fsum(values) / num
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (num - 1))
    reach = float(special.stdtrit(num - 1, 0.975)) * spread / math.sqrt(num)
    return Estimate(mean=mean, low=mean - reach, high=mean + reach)


def pass_at_k(is_correct: Sequence[Sequence[bool]], *, k: int) -> float:
    """Return the probability that at least one of `k` attempts is right, estimated without bias from n >= k attempts a task.

    Mean over tasks of 1 - C(n - c, k) / C(n, k), c of n attempts being right; Chen et al. (arXiv:2107.03374), equation 1.

    Raises:
        ValueError: there is no task, or a task has fewer than `k` attempts.
    """
    if not is_correct:
        raise ValueError("pass@k of no tasks is undefined")
    if k < 1:
        raise ValueError(f"pass@k needs k >= 1, not {k}")
    chances = []
    for task, attempts in enumerate(is_correct):
        if len(attempts) < k:
            raise ValueError(f"pass@{k} needs {k} attempts at each task, but task {task} has {len(attempts)}")
        num_wrong = len(attempts) - sum(attempts)
        chances.append(1 - math.comb(num_wrong, k) / math.comb(len(attempts), k))
    return sum(chances) / len(chances)


def majority_at_k(answers: Sequence[Sequence[str]], is_correct: Sequence[Sequence[bool]]) -> float:
    """Return maj@k (cons@k in DeepSeek-R1): how often the most frequent answer to a task is right.

    Answers are compared as strings, so normalize them first. An empty answer has no vote; a task without any vote is wrong.
    Answers that tie share the task: the expectation of breaking ties at random.

    Args:
        answers: per task, the answer of each attempt; "" where there is none.
        is_correct: of the same shape, the verdict on each.

    Raises:
        ValueError: there is no task, or the shapes differ.
    """
    if not answers:
        raise ValueError("maj@k of no tasks is undefined")
    pairs = zip(answers, is_correct, strict=True)
    return sum(_majority_verdict(given, verdicts) for given, verdicts in pairs) / len(answers)


def _majority_verdict(answers: Sequence[str], verdicts: Sequence[bool]) -> float:
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, verdict in zip(answers, verdicts, strict=True):
        if answer:
            votes[answer].append(verdict)
    if not votes:
        return 0.0
    most = max(len(verdicts) for verdicts in votes.values())
    winners = [sum(verdicts) / most for verdicts in votes.values() if len(verdicts) == most]
    return sum(winners) / len(winners)


def _task_means(scores: Sequence[Sequence[float]]) -> np.ndarray:
    if not scores:
        raise ValueError("the mean over no tasks is undefined")
    for task, attempts in enumerate(scores):
        if not attempts:
            raise ValueError(f"task {task} has no attempt; leave out tasks whose attempts are all void")
    return np.array([math.fsum(attempts) / len(attempts) for attempts in scores], dtype=np.float64)
