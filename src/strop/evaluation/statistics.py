"""What repeated attempts at a set of tasks say about accuracy (avg@k with an interval, pass@k, maj@k), and repeated runs.

Every figure of attempts is a mean over tasks, each task with the same weight, so that avg@k equals pass@1 also where void
attempts left some tasks with fewer than k. Void attempts are left out by the caller (design law 3); a task without any attempt
has no figure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_EXACT_FLIPS = 13  # problems that differ, up to which every one of the 2^n signs is tried
_BLOCK = 4_000_000  # draws held in memory at once: 32 MB
_STUDENT_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)  # of 1, 2, ... 10 degrees


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks and the interval it may lie in."""

    mean: float
    low: float
    high: float


def average_at_k(scores: Sequence[Sequence[float]], *, seed: int, level: float = 0.95, num_resamples: int = 10_000) -> Estimate:
    """avg@k, pass@1 in rStar2-Agent section 5: the mean score of an attempt, with a bootstrap interval clustered by task.

    Attempts at one task share its difficulty, so whole tasks are drawn with replacement and the percentiles of the resampled
    means are the interval. Where all tasks have one mean (every score is 0, say) all resamples agree and would promise
    certainty. Where it is a share, the exact binomial bound on tasks that are otherwise stands in, as if those were 0 or 1:
    1 - ((1 - level) / 2) ** (1 / num_tasks).

    Args:
        scores: per task, the score of each attempt; the numbers of attempts may differ.
        seed: of the resampling; one seed, one interval.
        level: the share of intervals that are to hold the truth.
        num_resamples: how many sets of tasks are drawn.

    Raises:
        ValueError: there is no task, or a task has no attempt.
    """
    means = _task_means(scores)
    mean = float(means.mean())
    if np.all(means == means[0]) and 0 <= means[0] <= 1:
        reach = unseen_share(len(means), level=level)
        return Estimate(mean=mean, low=mean - reach * mean, high=mean + reach * (1 - mean))
    low, high = np.quantile(_resampled_means(means, seed, num_resamples), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(mean=mean, low=float(low), high=float(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """How far two conditions lie apart on the same tasks: the mean of (second - first), its interval, and the chance of it."""

    difference: Estimate
    p_value: float
    num_better: int  # tasks where the second is higher
    num_worse: int
    standard_error: float | None  # of the mean difference; None where nothing tells it

    def detectable(self, *, level: float = 0.95, power: float = 0.8) -> float | None:
        """The smallest true difference that a comparison with this standard error finds with a chance of `power`.

        (z of (1 + level) / 2 + z of power) times the standard error, from the normal distribution: 2.80 times for 0.95 and 0.8.
        What is smaller may well be there unseen. Where few tasks differ it is a little more: of n tasks with 0 or 1 each, the
        exact test finds nothing below 6 / n.
        """
        if self.standard_error is None:
            return None
        normal = NormalDist()
        return (normal.inv_cdf((1 + level) / 2) + normal.inv_cdf(power)) * self.standard_error


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    *,
    seed: int,
    level: float = 0.95,
    num_resamples: int = 10_000,
    is_share: bool = True,
) -> PairedDifference:
    """Compare two conditions task by task: the difficulty of a task is in both, and leaves the difference.

    The interval is that of a bootstrap over tasks. The p-value is two-sided, of the permutation test that swaps the two
    conditions within tasks (for 0 or 1 a task it is the exact McNemar test): over all swaps where at most 13 tasks differ, else
    over `num_resamples` random ones and the one observed, so that it is never 0.

    Args:
        first, second: the mean of each task, in the same order.
        seed: of resampling and swaps.
        is_share: the values lie between 0 and 1. Where all tasks differ alike (by 0, say), the interval then has the exact
            binomial bound on the share of tasks that would do otherwise, by -1 or 1, and the standard error is what such would
            make; of other values the interval is a point, and nothing tells the standard error.

    Raises:
        ValueError: there is no task, or the two have different numbers of them.
    """
    if not first:
        raise ValueError("the difference over no tasks is undefined")
    differences = np.subtract(np.asarray(second, dtype=np.float64), np.asarray(first, dtype=np.float64))
    mean = float(differences.mean())
    if differences.min() < differences.max():
        low, high = np.quantile(_resampled_means(differences, seed, num_resamples), [(1 - level) / 2, (1 + level) / 2])
        standard_error: float | None = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    else:
        reach = unseen_share(len(differences), level=level) if is_share else 0.0
        low, high = mean - reach * (1 + mean), mean + reach * (1 - mean)
        standard_error = math.sqrt(reach / len(differences)) if is_share else None
    return PairedDifference(
        difference=Estimate(mean=mean, low=float(low), high=float(high)),
        p_value=_swap_test(differences[differences != 0], seed, num_resamples),
        num_better=int((differences > 0).sum()),
        num_worse=int((differences < 0).sum()),
        standard_error=standard_error,
    )


def unseen_share(num: int, *, level: float = 0.95) -> float:
    """The exact binomial bound on the share of tasks that are otherwise, where none of `num` is."""
    return 1 - math.pow((1 - level) / 2, 1 / num)


def _swap_test(differences: np.ndarray, seed: int, num_resamples: int) -> float:
    """The share of swaps whose sum is as far from 0 as the one observed; `differences` are those that are not 0."""
    observed = abs(float(differences.sum())) * (1 - 1e-12)  # a swap that gives the same sum must not miss it by rounding
    num = len(differences)
    if num <= _EXACT_FLIPS:
        signs = 1 - 2 * ((np.arange(2**num)[:, None] >> np.arange(num)) & 1)
        return float((np.abs(signs @ differences) >= observed).mean())
    generator = np.random.default_rng(seed)
    rows = max(1, _BLOCK // num)
    num_as_far = 0
    for start in range(0, num_resamples, rows):
        signs = generator.integers(0, 2, size=(min(rows, num_resamples - start), num), dtype=np.int8) * 2 - 1
        num_as_far += int((np.abs(signs @ differences) >= observed).sum())
    return (num_as_far + 1) / (num_resamples + 1)


def mean_of_seeds(values: Sequence[float]) -> Estimate:
    """The mean of runs that differ in their seed alone, with Student's 95 % interval: mean ± t s / √n, s unbiased.

    Few seeds make a wide interval: t is 12.7 of two, 4.30 of three, 2.78 of five. It knows no bounds: an accuracy's may go
    beyond 1.

    Raises:
        ValueError: there are fewer than two values, so nothing says how far seeds differ.
    """
    num = len(values)
    if num < 2:
        raise ValueError(f"an interval over seeds needs two of them, not {num}")
    mean = math.fsum(values) / num
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (num - 1))
    reach = _student_quantile(num - 1) * spread / math.sqrt(num)
    return Estimate(mean=mean, low=mean - reach, high=mean + reach)


def _student_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t: from the tables for few degrees of freedom, else by Fisher's expansion."""
    if degrees <= len(_STUDENT_975):
        return _STUDENT_975[degrees - 1]
    z = 1.959963985
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def pass_at_k(is_correct: Sequence[Sequence[bool]], *, k: int) -> float:
    """The chance that at least one of `k` attempts is right: unbiased, from n >= k attempts a task.

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
    """maj@k (cons@k in DeepSeek-R1): how often the answer that most attempts at a task agree on is right.

    Answers are compared as strings, so bring them to one form first. An empty answer has no vote; a task without any vote is
    wrong. Answers that tie share the task, which is what breaking ties at random gives on average.

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


def _resampled_means(means: np.ndarray, seed: int, num_resamples: int) -> np.ndarray:
    """(num_resamples,): the mean of as many tasks as there are, drawn with replacement, in blocks that fit in memory."""
    generator = np.random.default_rng(seed)
    rows = max(1, _BLOCK // len(means))
    blocks = [
        means[generator.integers(len(means), size=(min(rows, num_resamples - start), len(means)))].mean(axis=1)
        for start in range(0, num_resamples, rows)
    ]
    return np.concatenate(blocks)
