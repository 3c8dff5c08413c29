"""What is left of a reward after its group's baseline."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from strop.algorithms.protocol import Selection

logger = logging.getLogger(__name__)


def group_normalized_advantages(rewards: Sequence[float], *, eps: float, allow_group_of_one: bool = False) -> list[float]:
    """(r - mean) / (std + eps) of one group, with the unbiased std; one float per reward.

    GRPO's advantage: DeepSeekMath (arXiv:2402.03300), rStar2-Agent (arXiv 2508.20722) Eq. 2 and 7. Neither says which std, nor
    has an eps; both are those of CS336 assignment 5 and of rStar2-Agent's released code. Everything is float64: in float32 the
    mean of sixteen rewards of 0.7 is not 0.7, and the rounding error over eps becomes an advantage of up to 0.1. Rewards that
    are all equal give exact zeros.

    Args:
        rewards: of the trajectories of one task that are compared with each other.
        eps: keeps the quotient finite, in units of reward.
        allow_group_of_one: a single reward is its own advantage (mean 0, std 1, as in verl); its unbiased std does not exist.

    Raises:
        ValueError: no reward, or one reward without `allow_group_of_one`.
    """
    if _is_single(rewards, allow_group_of_one):
        return [float(rewards[0])]
    values = torch.tensor(rewards, dtype=torch.float64)
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    centered = values - values.mean()
    return [float(advantage) for advantage in centered / (values.std(correction=1) + eps)]


def mean_centered_advantages(rewards: Sequence[float], *, allow_group_of_one: bool = False) -> list[float]:
    """r - mean of one group; one float per reward. Dr. GRPO (arXiv:2503.20783), in float64; exact zeros for equal rewards.

    Raises:
        ValueError: no reward, or one reward without `allow_group_of_one` (its advantage is 0 whatever it is).
    """
    if _is_single(rewards, allow_group_of_one):
        logger.warning("a group of one trajectory has mean-centered advantage 0: nothing is learnt from it")
        return [0.0]
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    values = torch.tensor(rewards, dtype=torch.float64)
    return [float(advantage) for advantage in values - values.mean()]


def outcome_advantages(
    selections: Sequence[Selection], *, normalize_std: bool, eps: float, allow_group_of_one: bool
) -> list[list[Tensor]]:
    """One advantage per kept trajectory, the same on each of its tokens; the group is what was kept (rStar2-Agent Eq. 7).

    Returns:
        Per selection and kept trajectory a float32 tensor of shape (len(trajectory.ids),); [] where nothing was kept.
    """
    result = []
    for selection in selections:
        kept = selection.kept
        rewards = [scored.reward for scored in kept]
        if not kept:
            scalars = []
        elif normalize_std:
            scalars = group_normalized_advantages(rewards, eps=eps, allow_group_of_one=allow_group_of_one)
        else:
            scalars = mean_centered_advantages(rewards, allow_group_of_one=allow_group_of_one)
        pairs = zip(kept, scalars, strict=True)
        result.append([torch.full((len(scored.trajectory.ids),), scalar, dtype=torch.float32) for scored, scalar in pairs])
    return result


def _is_single(rewards: Sequence[float], allow_group_of_one: bool) -> bool:
    if len(rewards) == 0:
        raise ValueError("a group without trajectories has no advantages")
    if len(rewards) == 1 and not allow_group_of_one:
        raise ValueError(
            "a group of one trajectory has no baseline to compare it with. Use a group size of at least 2, or set"
            " allow_group_of_one = true."
        )
    return len(rewards) == 1
