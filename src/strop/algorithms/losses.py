"""What each token costs, before any averaging: elementwise functions of any shape, to be minimised, 0 where masked.

How tokens are averaged is not decided here: `TokenBatch.loss_weights` holds each token's share of the update. Everywhere:
`advantages` carry no gradient, and `loss_mask` is True on the tokens that are trained on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_gradient_token_loss(policy_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """-A log π of each token. REINFORCE, CS336 assignment 5 Eq. 32; with A = 1 it is the loss of SFT.

    Args:
        policy_logprobs: nats; carries the gradient.
    """
    return -torch.where(loss_mask, policy_logprobs, 0.0) * torch.where(loss_mask, advantages, 0.0)


def no_clip_token_loss(ratio: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """-(π / π_old) A of each token, 0 where A is: GRPO-No-Clip, CS336 assignment 5 Eq. 34.

    Args:
        ratio: π / π_old; carries the gradient.
    """
    return -_where_it_counts(ratio, advantages, loss_mask) * torch.where(loss_mask, advantages, 0.0)


def clip_token_loss(
    ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token; with `dual_clip` c, at most -c A where A < 0.

    The clipped term of PPO and of DeepSeekMath's GRPO (arXiv:2402.03300); rStar2-Agent (arXiv 2508.20722) Eq. 6; CS336
    assignment 5 Eq. 33. Clip-higher is DAPO's (arXiv:2503.14476), the dual clip that of Ye et al. (arXiv:1912.09729).

    Args:
        ratio: r = π / π_old, of tokens or of rows; carries the gradient.
        clip_low, clip_high: how far the ratio may fall below or rise above 1 before a gain stops counting.
        dual_clip: where a bad token has become this many times likelier, its loss stops growing; more than 1. None: it grows.
    """
    ratio = _where_it_counts(ratio, advantages, loss_mask)
    advantages = torch.where(loss_mask, advantages, 0.0)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -gain


def cispo_token_loss(
    policy_logprobs: Tensor, ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π of each token; `sg` stops the gradient, so that no token loses its own.

    CISPO, MiniMax-M1 (arXiv:2506.13585). Its authors clip from above alone: `clip_low` of 1 or more.

    Args:
        policy_logprobs: nats; carries the gradient.
        ratio: r = π / π_old; its gradient is not used.
        clip_low, clip_high: the range of the weight, below and above 1.
    """
    weight = torch.where(loss_mask, ratio.detach(), 1.0).clamp(1 - clip_low, 1 + clip_high)
    return weight * policy_gradient_token_loss(policy_logprobs, advantages, loss_mask)


def _where_it_counts(ratio: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """`ratio`, and 1 without gradient where a token is masked or has no advantage: infinity times 0 is no number."""
    return torch.where(loss_mask & (advantages != 0), ratio, 1.0)
