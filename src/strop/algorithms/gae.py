"""What a critic adds to a policy gradient: rewards by token, the advantages that follow from them, and the critic's own loss.

PPO as DeepSeek-R1 (arXiv 2501.12948) compares GRPO with it, appendix A.3. All tensors are (n, T); what happens between two
trained tokens (an observation, forced tokens) is part of the environment, so time steps are the trained tokens of a row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
def whitened(advantages: Sequence[Tensor], loss_masks: Sequence[Tensor], *, eps: float = 1e-8) -> list[Tensor]:
    """(A - mean) / (std + eps) over the trained tokens of all parts, with the unbiased std, in float64; 0 where masked.

    No paper of the four does so; released implementations of PPO do. Equal advantages, or a single one, become exact zeros.

    Args:
        advantages: of each part, (n, T); parts may differ in shape.
        loss_masks: bool, of the same shapes.
    """
    tokens = torch.cat([part[mask] for part, mask in zip(advantages, loss_masks, strict=True)]).double()
    if len(tokens) < 2 or bool((tokens == tokens[0]).all()):
        return [torch.zeros_like(part) for part in advantages]
    mean, scale = tokens.mean(), tokens.std(correction=1) + eps
    return [
        torch.where(mask, ((part.double() - mean) / scale).to(part.dtype), 0.0)
        for part, mask in zip(advantages, loss_masks, strict=True)
    ]


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
