"""GRPO: advantages relative to a baseline, and a clipped ratio. DeepSeekMath (arXiv:2402.03300)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from strop.algorithms.method import (
    WHOLE_REWARD,
    Column,
    RewardedRows,
    Selection,
    check_group_size,
    describe_voids,
    drop_all,
    keep_all,
    leave_truncated_out,
    tie_of,
)
from strop.algorithms.policy_loss import PolicyLoss
from strop.types import Group

logger = logging.getLogger(__name__)


class Advantage(StrEnum):
    """What a trajectory's reward r is compared with, and whether the difference is scaled."""

    GROUP_NORMALIZED = "group_normalized"  # (r - mean) / std of the group; GRPO, CS336's "REINFORCE with baseline"
    MEAN_CENTERED = "mean_centered"  # r - mean of the group; Dr. GRPO
    LEAVE_ONE_OUT = "leave_one_out"  # r - mean of the others of the group; RLOO
    TREE = "tree"  # group_normalized, once over the rollout's tree and once over the group; Tree-GRPO
    NONE = "none"  # r
    BATCH_NORMALIZED = "batch_normalized"  # (r - mean) / std of every trajectory of the step; REINFORCE++
    GROUP_CENTERED_BATCH_NORMALIZED = "group_centered_batch_normalized"  # that of r - mean of the group; REINFORCE++-baseline
    GROUP_CENTERED_BATCH_SCALED = "group_centered_batch_scaled"  # (r - mean of the group) / std of every r of the step; TRL

    @property
    def needs_group(self) -> bool:
        """Whether a trajectory without others of its task is worth nothing."""
        return self not in (Advantage.NONE, Advantage.BATCH_NORMALIZED)


def group_normalized_advantages(rewards: Sequence[float], *, eps: float) -> list[float]:
    """(r - mean) / (std + eps) of one group, with the unbiased std; one float per reward.

    GRPO's advantage: DeepSeekMath (arXiv:2402.03300), rStar2-Agent (arXiv 2508.20722) Eq. 2 and 7. Neither says which std, nor
    has an eps; both are those of CS336 assignment 5 and of rStar2-Agent's released code. Everything is float64: in float32 the
    mean of sixteen rewards of 0.7 is not 0.7, and the rounding error over eps becomes an advantage of up to 0.1. Rewards that
    are all equal give exact zeros.

    Args:
        rewards: of the trajectories of one task that are compared with each other.
        eps: keeps the quotient finite, in units of reward.

    Raises:
        ValueError: there are fewer than two rewards.
    """
    _check_group(rewards)
    values = torch.tensor(rewards, dtype=torch.float64)
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    centered = values - values.mean()
    return [float(advantage) for advantage in centered / (values.std(correction=1) + eps)]


def mean_centered_advantages(rewards: Sequence[float]) -> list[float]:
    """r - mean of one group; one float per reward. Dr. GRPO (arXiv:2503.20783), in float64; exact zeros for equal rewards.

    Raises:
        ValueError: there are fewer than two rewards.
    """
    _check_group(rewards)
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    values = torch.tensor(rewards, dtype=torch.float64)
    return [float(advantage) for advantage in values - values.mean()]


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """r - mean of the other rewards of the group; one float per reward. RLOO (arXiv:2402.14740), in float64.

    It is n/(n - 1) times `mean_centered_advantages`, and unbiased where that is not: the baseline does not contain r. Exact
    zeros for equal rewards.

    Raises:
        ValueError: there are fewer than two rewards.
    """
    _check_group(rewards)
    num = len(rewards)
    return [centered * num / (num - 1) for centered in mean_centered_advantages(rewards)]


def batch_normalized_advantages(groups: Sequence[Sequence[float]], *, eps: float) -> list[list[float]]:
    """(r - mean) / (std + eps) over the rewards of all groups; one float per reward, in their groups.

    REINFORCE++ (arXiv:2501.03262), named next to GRPO in ARPO (arXiv 2507.19849) section 1.1. Each trajectory counts once, not
    once a token as where per-token KL is part of the reward. A batch of one reward has advantage 0.
    """
    rewards = [reward for group in groups for reward in group]
    if len(rewards) == 1:
        logger.warning("a batch of one trajectory has batch-normalized advantage 0: nothing is learnt from it")
        normalized = iter([0.0])
    else:
        normalized = iter(group_normalized_advantages(rewards, eps=eps) if rewards else [])
    return [[next(normalized) for _ in group] for group in groups]


def group_centered_batch_normalized_advantages(groups: Sequence[Sequence[float]], *, eps: float) -> list[list[float]]:
    """`batch_normalized_advantages` of r - mean of the group: REINFORCE++-baseline (arXiv:2501.03262).

    Raises:
        ValueError: a group has one reward.
    """
    return batch_normalized_advantages([mean_centered_advantages(group) if group else [] for group in groups], eps=eps)


def group_centered_batch_scaled_advantages(groups: Sequence[Sequence[float]], *, eps: float) -> list[list[float]]:
    """(r - mean of the group) / (std + eps), with the unbiased std of all rewards: `scale_rewards = "batch"` of TRL.

    It is the local mean and global std of Liu et al. (arXiv:2508.08221). Exact zeros in groups of equal rewards.

    Raises:
        ValueError: a group has one reward.
    """
    rewards = [reward for group in groups for reward in group]
    if not rewards:
        return [[] for _ in groups]
    std = float(torch.tensor(rewards, dtype=torch.float64).std(correction=1))
    centered = [mean_centered_advantages(group) if group else [] for group in groups]
    return [[value and value / (std + eps) for value in group] for group in centered]  # 0 / 0 where all rewards are equal


def tree_advantages(groups: Sequence[Sequence[float]], trees: Sequence[Sequence[int]], *, eps: float) -> list[list[float]]:
    """The normalized advantage in its tree plus that in its group; one float per reward, in their groups.

    Tree-GRPO (arXiv:2509.21240), A_intra-tree + A_inter-tree, each (r - mean) / (std + eps) as in its released code. In a tree
    of one rollout the first is 0: there is nothing to compare. That code takes the reward itself there.

    Args:
        groups: rewards.
        trees: of each reward, which tree of its group.
    """
    found = []
    for rewards, of_group in zip(groups, trees, strict=True):
        advantages = group_normalized_advantages(rewards, eps=eps) if rewards else []
        for tree in set(of_group):
            rows = [row for row, other in enumerate(of_group) if other == tree]
            if len(rows) > 1:
                inside = group_normalized_advantages([rewards[row] for row in rows], eps=eps)
                for row, advantage in zip(rows, inside, strict=True):
                    advantages[row] += advantage
        found.append(advantages)
    return found


def outcome_advantages(selections: Sequence[Selection], advantage: Advantage, *, eps: float) -> list[list[Tensor]]:
    """One advantage per kept trajectory, the same on each of its tokens; the group is what was kept (rStar2-Agent Eq. 7).

    Args:
        selections: every group of a step.
        advantage: which.
        eps: added to a std.

    Returns:
        Per selection and kept trajectory a float32 tensor of shape (len(trajectory.ids),); [] where nothing was kept.
    """
    scalars = scalar_advantages(selections, advantage, eps=eps)
    return [
        [
            torch.full((len(scored.trajectory.ids),), scalar, dtype=torch.float32)
            for scored, scalar in zip(selection.kept, of_group, strict=True)
        ]
        for selection, of_group in zip(selections, scalars, strict=True)
    ]


def scalar_advantages(selections: Sequence[Selection], advantage: Advantage, *, eps: float) -> list[list[float]]:
    """As `outcome_advantages`, one number for each kept trajectory."""
    rewards = [[scored.reward for scored in selection.kept] for selection in selections]
    match advantage:
        case Advantage.BATCH_NORMALIZED:
            return batch_normalized_advantages(rewards, eps=eps)
        case Advantage.GROUP_CENTERED_BATCH_NORMALIZED:
            return group_centered_batch_normalized_advantages(rewards, eps=eps)
        case Advantage.GROUP_CENTERED_BATCH_SCALED:
            return group_centered_batch_scaled_advantages(rewards, eps=eps)
        case Advantage.TREE:  # branches have the attempt of the rollout that began at the prompt
            trees = [[scored.trajectory.key.attempt for scored in selection.kept] for selection in selections]
            return tree_advantages(rewards, trees, eps=eps)
        case Advantage.NONE:
            return [[float(reward) for reward in group] for group in rewards]
        case Advantage.GROUP_NORMALIZED:
            return [group_normalized_advantages(group, eps=eps) if group else [] for group in rewards]
        case Advantage.MEAN_CENTERED:
            return [mean_centered_advantages(group) if group else [] for group in rewards]
        case Advantage.LEAVE_ONE_OUT:
            return [leave_one_out_advantages(group) if group else [] for group in rewards]


def _check_group(rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise ValueError(f"a group of {len(rewards)} has nothing to compare: use a group_size of 2, or advantage = 'none'")


class GroupMethod(PolicyLoss):
    """What a reward is compared with, and which rollouts and groups have no part in it."""

    class Config(PolicyLoss.Config):
        """Keys that methods share which compare the rollouts of one task."""

        advantage: Advantage = Field(Advantage.GROUP_NORMALIZED, description="How rewards of a group become advantages.")
        # reward: REINFORCE++ (arXiv:2501.03262), RLOO (arXiv:2402.14740)
        kl_in: Literal["loss", "reward"] = Field(
            "loss",
            description="Where the KL penalty stands. loss: at each token; reward: the summed log-ratio of a rollout, times"
            " kl_coefficient, is taken off its reward before rewards are compared, so that tied groups are ranked by it alone"
            " unless drop_tied leaves them out.",
        )
        eps: float = Field(1e-6, ge=0, description="Added to the standard deviation of rewards.")
        drop_tied: bool = Field(False, description="Leave out tied groups, so that the remaining tokens weigh more.")
        # DAPO (arXiv:2503.14476) section 3.2 leaves out groups whose answers are all right or all wrong.
        tied_by: str = Field(
            WHOLE_REWARD, min_length=1, description="What is equal in a tied group: the reward, or the named part of it."
        )
        # Dynamic sampling, DAPO section 3.2
        refill_rounds: int = Field(
            0, ge=0, description="How often a step may sample further tasks in place of groups that were left out."
        )
        # Harmful: rStar2-Agent (arXiv:2508.20722) section 4.3.1
        overlong_filter: bool = Field(False, description="Leave out rollouts that were cut off.")

        @model_validator(mode="after")
        def _has_no_key_without_effect(self) -> Self:
            if self.kl_coefficient == 0:
                self._refuse("kl_in", "method.kl_coefficient is 0", "kl_coefficient = 0.001")
            if self.kl_in == "reward":
                self._refuse("kl_estimator", "method.kl_in is 'reward', where the log-ratio itself stands", 'kl_in = "loss"')
            if self.refill_rounds and not self.drop_tied:
                raise ValueError(
                    f"method.refill_rounds is {self.refill_rounds}, which plays further tasks in place of groups"
                    " that are left out,"
                    " but method.drop_tied is false: tied groups stay. Set drop_tied = true (dynamic sampling), or remove it."
                )
            if self.tied_by != WHOLE_REWARD and not self.drop_tied:
                raise ValueError(
                    f"method.tied_by is {self.tied_by!r}, which says what groups are left out, but method.drop_tied"
                    " is false: none"
                    " is. Set drop_tied = true, or remove tied_by."
                )
            return self

    config: Config

    @property
    def kl_in_loss(self) -> float:
        return 0.0 if self.config.kl_in == "reward" else super().kl_in_loss

    @property
    def estimates_need(self) -> frozenset[Column]:
        return frozenset() if self.config.kl_in == "loss" else frozenset({Column.OLD_LOGPROBS, Column.REFERENCE_LOGPROBS})

    def penalties(self, rows: RewardedRows) -> Tensor | None:
        """β Σ log(π_old / π_ref) over the sampled tokens of a row, as TRL's RLOO and verl's `use_kl_in_reward` sum it."""
        if self.config.kl_in == "loss":
            return None
        gap = rows.columns[Column.OLD_LOGPROBS] - rows.columns[Column.REFERENCE_LOGPROBS]
        return self.config.kl_coefficient * torch.where(rows.loss_mask, gap, 0.0).sum(-1)

    @property
    def refill_rounds(self) -> int:
        return self.config.refill_rounds

    def select(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """As `choose`, without the rollouts that were cut off if `overlong_filter` is on."""
        if self.config.overlong_filter:
            return leave_truncated_out(group, lambda ended: self.choose(ended, group_size=group_size, seed=seed))
        return self.choose(group, group_size=group_size, seed=seed)

    def choose(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """Keeps all; none of a group that voids left with less than it needs, or that is tied while ties are dropped."""
        if len(group.trajectories) < (min(2, group_size) if self.config.advantage.needs_group else 1):
            return drop_all(group, describe_voids(group, group_size))
        if self.config.drop_tied and group_size > 1 and (tie := tie_of(group.trajectories, by=self.config.tied_by)):
            return drop_all(group, tie)
        return keep_all(group, f"kept: {type(self).__name__} learns from every rollout")

    def advantages(self, selections: Sequence[Selection]) -> list[list[Tensor]]:
        """Mean and std are those of the rollouts that were kept."""
        return outcome_advantages(selections, self.config.advantage, eps=self.config.eps)


class GRPO(GroupMethod):
    """Learns from every rollout of a group, or from none of them."""

    class Config(GroupMethod.Config):
        """Keys of `kind = "grpo"`."""

    config: Config

    def num_rollouts(self, group_size: int) -> int:
        """As many as are kept. Raises `ConfigError` for a group of one, unless its advantage needs no group."""
        if self.config.advantage.needs_group:
            check_group_size(group_size)
        return group_size
