"""The reward of both sides of `training_step.py`. Needs the standard library alone."""

from __future__ import annotations

from collections.abc import Sequence


def share_of_even_ids(ids: Sequence[int]) -> float:
    """Costs nothing, and is different for nearly every completion, so that no group is tied."""
    return sum(each % 2 == 0 for each in ids) / len(ids)
