"""What is left of a reward after its baseline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from strop.algorithms.protocol import Selection

logger = logging.getLogger(__name__)


class Advantage(StrEnum):
    """What a trajectory's reward r is compared with, and whether the difference is scaled."""

    GROUP_NORMALIZED = "group_normalized"  # (r - mean) / std of the group; GRPO, CS336's "REINFORCE with baseline"
    MEAN_CENTERED = "mean_centered"  # r - mean of the group; Dr. GRPO
    LEAVE_ONE_OUT = "leave_one_out"  # r - mean of the others of the group; RLOO
    NONE = "none"  # r
    BATCH_NORMALIZED = "batch_normalized"  # (r - mean) / std of every trajectory of the step; REINFORCE++

    @property
    def needs_group(self) -> bool:
        """Whether a trajectory without others of its task is worth nothing."""
        return self not in (Advantage.NONE, Advantage.BATCH_NORMALIZED)


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


def leave_one_out_advantages(rewards: Sequence[float], *, allow_group_of_one: bool = False) -> list[float]:
    """r - mean of the other rewards of the group; one float per reward. RLOO (arXiv:2402.14740), in float64.

    It is n/(n - 1) times `mean_centered_advantages`, and unbiased where that is not: the baseline does not contain r. Exact
    zeros for equal rewards.

    Args:
        allow_group_of_one: a single reward is its own advantage: there is no other to subtract.

    Raises:
        ValueError: no reward, or one reward without `allow_group_of_one`.
    """
    if _is_single(rewards, allow_group_of_one):
        return [float(rewards[0])]
    num = len(rewards)
    return [centered * num / (num - 1) for centered in mean_centered_advantages(rewards)]


def batch_normalized_advantages(groups: Sequence[Sequence[float]], *, eps: float) -> list[list[float]]:
    """(r - mean) / (std + eps) over the rewards of all groups; one float per reward, in their groups.

    REINFORCE++ (arXiv:2501.03262), named beside GRPO in ARPO (arXiv 2507.19849) section 1.1. Each trajectory counts once, not
    once a token as where per-token KL is part of the reward. A batch of one reward has advantage 0.
    """
    rewards = [reward for group in groups for reward in group]
    if len(rewards) == 1:
        logger.warning("a batch of one trajectory has batch-normalized advantage 0: nothing is learnt from it")
        normalized = iter([0.0])
    else:
        normalized = iter(group_normalized_advantages(rewards, eps=eps) if rewards else [])
    return [[next(normalized) for _ in group] for group in groups]


def outcome_advantages(
    selections: Sequence[Selection], advantage: Advantage, *, eps: float, allow_group_of_one: bool
) -> list[list[Tensor]]:
    """One advantage per kept trajectory, the same on each of its tokens; the group is what was kept (rStar2-Agent Eq. 7).

    Args:
        selections: every group of a step.
        advantage: which.
        eps: added to a std.
        allow_group_of_one: as in the functions of this file.

    Returns:
        Per selection and kept trajectory a float32 tensor of shape (len(trajectory.ids),); [] where nothing was kept.
    """
    scalars = scalar_advantages(selections, advantage, eps=eps, allow_group_of_one=allow_group_of_one)
    return [
        [
            torch.full((len(scored.trajectory.ids),), scalar, dtype=torch.float32)
            for scored, scalar in zip(selection.kept, of_group, strict=True)
        ]
        for selection, of_group in zip(selections, scalars, strict=True)
    ]


def scalar_advantages(
    selections: Sequence[Selection], advantage: Advantage, *, eps: float, allow_group_of_one: bool
) -> list[list[float]]:
    """As `outcome_advantages`, one number for each kept trajectory."""
    rewards = [[scored.reward for scored in selection.kept] for selection in selections]
    if advantage is Advantage.BATCH_NORMALIZED:
        return batch_normalized_advantages(rewards, eps=eps)
    return [_of_group(group, advantage, eps, allow_group_of_one) if group else [] for group in rewards]


def _of_group(rewards: Sequence[float], advantage: Advantage, eps: float, allow_group_of_one: bool) -> list[float]:
    match advantage:
        case Advantage.GROUP_NORMALIZED:
            return group_normalized_advantages(rewards, eps=eps, allow_group_of_one=allow_group_of_one)
        case Advantage.MEAN_CENTERED:
            return mean_centered_advantages(rewards, allow_group_of_one=allow_group_of_one)
        case Advantage.LEAVE_ONE_OUT:
            return leave_one_out_advantages(rewards, allow_group_of_one=allow_group_of_one)
        case Advantage.NONE:
            return [float(reward) for reward in rewards]
        case Advantage.BATCH_NORMALIZED:
            raise ValueError(f"{advantage.value} compares more than one group")


def _is_single(rewards: Sequence[float], allow_group_of_one: bool) -> bool:
    if len(rewards) == 0:
        raise ValueError("a group without trajectories has no advantages")
    if len(rewards) == 1 and not allow_group_of_one:
        raise ValueError(
            "a group of one trajectory has no baseline to compare it with. Use a group size of at least 2, or set"
            " allow_group_of_one = true."
        )
    return len(rewards) == 1
