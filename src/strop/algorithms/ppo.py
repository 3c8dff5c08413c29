"""What a critic adds to a policy gradient: rewards by token, the advantages that follow from them, and the critic's own loss.

PPO as DeepSeek-R1 (arXiv 2501.12948) compares GRPO with it, appendix A.3. All tensors are (n, T); what happens between two
trained tokens (an observation, forced tokens) is part of the environment, so time steps are the trained tokens of a row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from strop.algorithms.grpo import Advantage, outcome_advantages
from strop.algorithms.method import Column, Estimate, RewardedRows, Selection, ValueInputs, drop_all, keep_all
from strop.algorithms.policy_loss import PolicyLoss
from strop.types import Group


def penalized_rewards(
    rewards: Tensor, policy_logprobs: Tensor, reference_logprobs: Tensor, loss_mask: Tensor, *, kl_coefficient: float
) -> Tensor:
    """r_t = -β (log π - log π_ref) of each token, with the trajectory's reward added at the row's last trained token.

    InstructGPT (arXiv:2203.02155); PPO in DeepSeek-R1 (arXiv 2501.12948) appendix A.3, as against GRPO's KL in the loss. It
    penalises the KL of the whole row, so long rows more than short ones.

    Args:
        rewards: of each trajectory, (n,).
        policy_logprobs: nats, (n, T), of the policy that sampled; no gradient is kept.
        reference_logprobs: nats, (n, T).
        loss_mask: bool (n, T).
        kl_coefficient: β.

    Returns:
        (n, T), 0 where masked; all zeros in a row without a trained token.
    """
    penalties = -kl_coefficient * torch.where(loss_mask, policy_logprobs - reference_logprobs, 0.0).detach()
    num_after = loss_mask.flip(-1).cumsum(-1).flip(-1)  # trained tokens from here on
    is_last = loss_mask & (num_after == 1)
    return torch.where(loss_mask, penalties, 0.0) + torch.where(is_last, rewards[:, None], 0.0)


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A_t = Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} - V_t, and the returns A_t + V_t that the critic learns.

    GAE (arXiv:1506.02438) Eq. 16. V after a row's last trained token is 0: the trajectory is over. With γ = λ = 1 the advantage
    is the sum of the rewards to come less V_t; DeepSeek-R1's appendix A.3 finds λ = 1 needed and 0.95 far worse.

    Args:
        rewards: (n, T), as of `penalized_rewards`.
        values: (n, T), in units of reward: what the critic expects before token t, from ids[:, :t].
        loss_mask: bool (n, T).
        gamma, lam: γ and λ, in [0, 1].

    Returns:
        Two tensors (n, T), 0 where masked, without gradient.
    """
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values))
    next_advantage = values.new_zeros(len(values))
    for column in reversed(range(values.shape[1])):
        is_step = loss_mask[:, column]
        delta = rewards[:, column] + gamma * next_value - values[:, column]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, column] = torch.where(is_step, advantage, 0.0)
        next_value = torch.where(is_step, values[:, column], next_value)
        next_advantage = torch.where(is_step, advantage, next_advantage)
    return advantages, advantages + torch.where(loss_mask, values, 0.0)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - var(R - V) / var(R) over tokens, (m,): 1 of a perfect critic, 0 of one that knows the mean alone.

    NaN where all returns are equal: there is nothing to explain.
    """
    values, returns = values.double(), returns.double()
    variance = returns.var(correction=0)
    return float("nan") if variance == 0 else float(1.0 - (returns - values).var(correction=0) / variance)


def value_token_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, value_clip: float | None = None
) -> Tensor:
    """max((V - R)², (clip(V, V_old ± value_clip) - R)²) / 2 of each token, 0 where masked; without a clip (V - R)² / 2.

    The value clip of the PPO implementation (arXiv:2005.12729): moving further than that from the old value gains nothing.

    Args:
        values: carries the gradient.
        old_values: before the first update of the step; no gradient.
        returns: as of `generalized_advantages`; no gradient.
        loss_mask: bool.
        value_clip: in units of reward; None: no clip.
    """
    values = torch.where(loss_mask, values, 0.0)
    returns = torch.where(loss_mask, returns, 0.0)
    errors = (values - returns).square()
    if value_clip is not None:
        old_values = torch.where(loss_mask, old_values, 0.0)
        clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
        errors = torch.maximum(errors, (clipped - returns).square())
    return errors / 2


class PPO(PolicyLoss):
    """Learns from every rollout, tied or not: its baseline is the critic. Implements `CriticMethod` too."""

    class Config(PolicyLoss.Config):
        """Keys of `kind = "ppo"`."""

        # symmetric: arXiv:1707.06347 section 6.1
        clip_high: float = Field(0.2, ge=0, description="How far the ratio may rise above 1.")
        gamma: float = Field(1.0, ge=0, le=1, description="Discount per trained token.")
        # DeepSeek-R1 appendix A.3: 0.95 does far worse
        lam: float = Field(1.0, ge=0, le=1, description="λ of generalized advantage estimation.")
        # arXiv:2005.12729
        value_clip: float | None = Field(
            0.2, gt=0, description="How far a value may move from its old value, in units of reward."
        )

        @model_validator(mode="after")
        def _has_its_kl_in_the_reward(self) -> Self:
            self._refuse("kl_estimator", "PPO has its KL in the reward, where the log ratio itself stands", 'kind = "grpo"')
            return self

    config: Config

    @property
    def kl_in_loss(self) -> float:
        """0: it is in the reward."""
        return 0.0

    @property
    def needs(self) -> frozenset[Column]:
        return super().needs | self.estimates_need

    @property
    def critic(self) -> Self:
        return self

    @property
    def estimates_need(self) -> frozenset[Column]:
        if self.config.kl_coefficient == 0:
            return frozenset({Column.VALUES})
        return frozenset({Column.VALUES, Column.OLD_LOGPROBS, Column.REFERENCE_LOGPROBS})

    def select(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """Keeps all that were not voided."""
        if not group.trajectories:
            return drop_all(group, f"all of {group_size} rollouts were voided")
        return keep_all(group, "kept: PPO learns from every rollout")

    def advantages(self, selections: Sequence[Selection]) -> list[list[Tensor]]:
        """The reward at each token of its trajectory, as if the critic expected nothing."""
        return outcome_advantages(selections, Advantage.NONE, eps=0.0)

    def token_advantages(self, updates: Sequence[RewardedRows]) -> list[Estimate]:
        """GAE over rewards with their KL penalty."""
        return [self._estimate(rows) for rows in updates]

    def value_loss(self, values: Tensor, inputs: ValueInputs) -> Tensor:
        return value_token_loss(values, inputs.old_values, inputs.returns, inputs.loss_mask, value_clip=self.config.value_clip)

    @torch.no_grad()
    def value_statistics(self, values: Tensor, inputs: ValueInputs) -> dict[str, Tensor]:
        """`value`, `return`, and `clip_fraction`: 1 where the value clip took the gradient away."""
        mask = inputs.loss_mask
        statistics = {
            "value": torch.where(mask, values, 0.0),
            "return": torch.where(mask, inputs.returns, 0.0),
        }
        if self.config.value_clip is not None:
            move = torch.where(mask, values - inputs.old_values, 0.0)
            clipped = inputs.old_values + move.clamp(-self.config.value_clip, self.config.value_clip)
            is_nearer = (values - inputs.returns).abs() < (clipped - inputs.returns).abs()
            is_clipped = mask & (move.abs() > self.config.value_clip) & is_nearer
            statistics["clip_fraction"] = is_clipped.to(values.dtype)
        return statistics

    def _estimate(self, rows: RewardedRows) -> Estimate:
        values, mask = rows.columns[Column.VALUES], rows.loss_mask
        # Without a penalty there may be no reference; then any log-probs do, as long as they cancel.
        policy = rows.columns[Column.OLD_LOGPROBS] if self.config.kl_coefficient > 0 else torch.zeros_like(values)
        reference = rows.columns[Column.REFERENCE_LOGPROBS] if self.config.kl_coefficient > 0 else policy
        rewards = penalized_rewards(rows.rewards, policy, reference, mask, kl_coefficient=self.config.kl_coefficient)
        advantages, returns = generalized_advantages(rewards, values, mask, gamma=self.config.gamma, lam=self.config.lam)
        return Estimate(advantages=advantages, returns=returns)
