"""How much likelier the policy makes what was sampled: probability ratios of tokens and of whole rows."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor


class RatioLevel(StrEnum):
    """Whose probability is compared. Rows are whole in every micro-batch, so a row can be reduced where it stands."""

    TOKEN = "token"  # GRPO in every released code; rStar2-Agent (arXiv 2508.20722) Eq. 6
    SEQUENCE = "sequence"  # the row's geometric mean; GSPO (arXiv:2507.18071), and DeepSeek-R1 (arXiv 2501.12948) Eq. 1 and 2


def log_ratio(logprobs: Tensor, other_logprobs: Tensor, loss_mask: Tensor, level: RatioLevel = RatioLevel.TOKEN) -> Tensor:
    """log(p / other p) of each token in nats, or its mean over the row's trained tokens at each of them; 0 where masked.

    DeepSeek-R1 writes the ratio of whole outputs; the |o|-th root of it, as in GSPO, is taken here, because the product over
    thousands of tokens leaves the range of a float. On a row of one token the two levels are equal.

    Args:
        logprobs, other_logprobs: nats, (n, T); gradient flows through both.
        loss_mask: bool (n, T).
    """
    # Mask before anything else: a where() after exp() would still send nan through the gradient of padded positions.
    difference = torch.where(loss_mask, logprobs - other_logprobs, 0.0)
    if level is RatioLevel.TOKEN:
        return difference
    num_tokens = loss_mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(loss_mask, difference.sum(-1, keepdim=True) / num_tokens, 0.0)


def probability_ratio(
    policy_logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor, level: RatioLevel = RatioLevel.TOKEN
) -> Tensor:
    """π / π_old of each token, or the geometric mean of its row; 1 where masked.

    Beyond 88 nats it is infinite. Where nothing depends on it, since it is clipped or there is no advantage, its gradient is 0.
    """
    ratio: Tensor = _Exp.apply(log_ratio(policy_logprobs, old_logprobs, loss_mask, level))  # type: ignore[no-untyped-call]
    return ratio


class _Exp(torch.autograd.Function):
    """exp, whose gradient is 0 where that of its result is: 0 times infinity is no number."""

    @staticmethod
    def forward(ctx: Any, exponent: Tensor) -> Tensor:
        power = exponent.exp()
        ctx.save_for_backward(power)
        return power

    @staticmethod
    def backward(ctx: Any, of_power: Tensor) -> Tensor:
        (power,) = ctx.saved_tensors
        return torch.where(of_power == 0, 0.0, of_power * power)
