"""What each token costs, before any averaging: elementwise functions of log-probs in nats, of any shape, 0 where masked."""

from __future__ import annotations

import torch
from torch import Tensor


def policy_gradient_token_loss(policy_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """-A log π of each token, to be minimised; same shape as its arguments. REINFORCE; with A = 1 it is the loss of SFT.

    Args:
        policy_logprobs: nats, any shape; carries the gradient.
        advantages: no gradient.
        loss_mask: bool, True on tokens that are trained on.
    """
    return -torch.where(loss_mask, policy_logprobs, 0.0) * torch.where(loss_mask, advantages, 0.0)


def grpo_token_loss(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """Clipped GRPO surrogate of each token, negated to be minimised; same shape as its arguments, 0 where masked.

    The clipped term of DeepSeekMath's objective (arXiv:2402.03300), rStar2-Agent (arXiv 2508.20722) Eq. 6; clip-higher from
    DAPO (arXiv:2503.14476). How tokens are averaged is not decided here: `TokenBatch.loss_weights` holds each token's share of
    the update.

    Args:
        policy_logprobs: nats, any shape; carries the gradient.
        old_logprobs: nats; no gradient.
        advantages: no gradient. Constant along a trajectory unless the method assigns credit by token.
        loss_mask: bool, True on tokens the policy chose.
        clip_low, clip_high: how far the probability ratio may fall below or rise above 1 before a gain stops counting.
    """
    ratio = probability_ratio(policy_logprobs, old_logprobs, loss_mask)
    masked_advantages = torch.where(loss_mask, advantages, 0.0)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * masked_advantages, clipped * masked_advantages)


def probability_ratio(policy_logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """π / π_old of each token; 1 where masked."""
    # Mask before exp: a where() after it would still send nan through the gradient of padded positions.
    return torch.where(loss_mask, policy_logprobs - old_logprobs, 0.0).exp()


def k3_token_kl(policy_logprobs: Tensor, reference_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """π_ref/π - log(π_ref/π) - 1 of each token, in nats: never negative, 0 where masked; unbiased on tokens sampled from π.

    DeepSeekMath (arXiv:2402.03300) Eq. 4, DeepSeek-R1 (arXiv 2501.12948) Eq. 2.
    """
    log_ratio = torch.where(loss_mask, reference_logprobs - policy_logprobs, 0.0)
    return log_ratio.exp() - log_ratio - 1


def ratio_statistics(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Tensor]:
    """Per-token figures of an update, 0 where masked; no gradient.

    `ratio`: π / π_old. `clip_fraction_low`, `clip_fraction_high`: 1 where the clip took the gradient away. `old_kl_nats`: k3
    estimate of KL(π_old || π), on tokens of π_old. `sampler_gap_nats`: |log π_old - the log-prob that the engine reported|.
    """
    with torch.no_grad():
        ratio = probability_ratio(policy_logprobs, old_logprobs, loss_mask)
        log_ratio = torch.where(loss_mask, policy_logprobs - old_logprobs, 0.0)
        return {
            "ratio": torch.where(loss_mask, ratio, 0.0),
            "clip_fraction_low": (loss_mask & (ratio < 1 - clip_low) & (advantages < 0)).to(ratio.dtype),
            "clip_fraction_high": (loss_mask & (ratio > 1 + clip_high) & (advantages > 0)).to(ratio.dtype),
            "old_kl_nats": ratio - log_ratio - 1,
            "sampler_gap_nats": torch.where(loss_mask, old_logprobs - sampled_logprobs, 0.0).abs(),
        }
