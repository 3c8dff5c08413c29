"""How well scores separate good responses from bad ones, and how far they only follow length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceQuality:
    """Of a reward model on validation preferences. None where a value is undefined (only one class, equal lengths)."""

    num: int  # pairs, or single responses
    accuracy: float  # pairs in the right order, ties half; single responses on the right side of 0
    auc: float | None  # how often any good response is scored above any bad one, over all prompts; ties count half
    length_correlation: float | None  # Pearson's, of score and length in tokens, of the response only
    length_correlation_in_pairs: float | None  # of their differences within a pair, independent of the prompt
    length_correlation_in_labels: float | None  # of single responses: each minus its label's mean

    def as_json(self) -> dict[str, int | float | None]:
        return asdict(self)


def pair_quality(
    chosen: Sequence[float], rejected: Sequence[float], chosen_lengths: Sequence[int], rejected_lengths: Sequence[int]
) -> PreferenceQuality:
    """The quality on pairs; each argument has one number per pair."""
    margins = np.array(chosen) - np.array(rejected)
    lengths = np.array(chosen_lengths) - np.array(rejected_lengths)
    # Both directions of each difference, so that the order within pairs has no effect.
    both_margins, both_lengths = np.concatenate([margins, -margins]), np.concatenate([lengths, -lengths])
    return PreferenceQuality(
        num=len(margins),
        accuracy=float(np.mean((margins > 0) + 0.5 * (margins == 0))),
        auc=area_under_curve(chosen, rejected),
        length_correlation=correlation([*chosen, *rejected], [*chosen_lengths, *rejected_lengths]),
        length_correlation_in_pairs=correlation(both_margins.tolist(), both_lengths.tolist()),
        length_correlation_in_labels=None,
    )


def label_quality(scores: Sequence[float], is_good: Sequence[bool], lengths: Sequence[int]) -> PreferenceQuality:
    """The quality on single responses.

    If bad ones are longer, a good model scores long ones low without regard to length, so the correlation within labels shows
    what length itself contributes.
    """
    good = [score for score, label in zip(scores, is_good, strict=True) if label]
    bad = [score for score, label in zip(scores, is_good, strict=True) if not label]
    right = [0.5 if score == 0 else float((score > 0) == label) for score, label in zip(scores, is_good, strict=True)]
    return PreferenceQuality(
        num=len(scores),
        accuracy=float(np.mean(right)),
        auc=area_under_curve(good, bad),
        length_correlation=correlation(scores, lengths),
        length_correlation_in_pairs=None,
        length_correlation_in_labels=correlation(_less_the_mean_of(is_good, scores), _less_the_mean_of(is_good, lengths)),
    )


def area_under_curve(good: Sequence[float], bad: Sequence[float]) -> float | None:
    """The share of all (good, bad) pairs in which the good one is larger, ties half; None if either is empty."""
    if not good or not bad:
        return None
    ordered = np.sort(np.array(bad))
    below, up_to = np.searchsorted(ordered, good, side="left"), np.searchsorted(ordered, good, side="right")
    return float((below + up_to).sum() / (2 * len(good) * len(bad)))


def correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Pearson's; None if one of them is constant."""
    if any(min(values, default=0.0) == max(values, default=0.0) for values in (one, other)):
        return None  # compare the values: rounding could leave 1e-17 after subtracting the mean
    left, right = _centred(one), _centred(other)
    norm = float(np.sqrt((left**2).sum() * (right**2).sum()))
    return float((left * right).sum() / norm) if norm > 0 else None


def _less_the_mean_of(labels: Sequence[bool], values: Sequence[float]) -> list[float]:
    """Each minus the mean of its label; exactly 0 if all values of the label are equal, despite rounding."""
    means = dict[bool, float]()
    for label in set(labels):
        of_label = [value for value, each in zip(values, labels, strict=True) if each == label]
        means[label] = of_label[0] if min(of_label) == max(of_label) else float(np.mean(of_label))
    return [value - means[label] for value, label in zip(values, labels, strict=True)]


def _centred(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.array(values, dtype=np.float64)
    centred: NDArray[np.float64] = array - array.mean()
    return centred
