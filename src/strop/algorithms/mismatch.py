"""Weights for what an engine sampled with other probabilities than the trainer's, though both hold the same model.

The engine's kernels, precision or sharding differ from the trainer's, so tokens come from π_sampled and not from π_old.
Importance sampling corrects that; the cap bounds its variance, and what lies beyond it is kept at the cap or left out.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from torch import Tensor


class Mismatch(StrEnum):
    """What weighs a token's loss; w is π_old / π_sampled of the token, or the product over the row's trained tokens.

    Truncated importance sampling: Yao et al. (Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025).
    Masked, and both of whole rows: Liu, Li et al. (When Speed Kills Stability, 2025). IcePop (arXiv:2510.18855) also leaves
    out what lies below a lower bound; here small weights stay, since they count for little as they are.
    """

    OFF = "off"  # 1
    TRUNCATE_TOKEN = "truncate_token"  # min(w, cap)
    MASK_TOKEN = "mask_token"  # w, but 0 beyond the cap
    TRUNCATE_SEQUENCE = "truncate_sequence"
    MASK_SEQUENCE = "mask_sequence"

    @property
    def is_of_sequence(self) -> bool:
        return self in (Mismatch.TRUNCATE_SEQUENCE, Mismatch.MASK_SEQUENCE)

    @property
    def is_mask(self) -> bool:
        return self in (Mismatch.MASK_TOKEN, Mismatch.MASK_SEQUENCE)


def mismatch_weights(
    old_logprobs: Tensor, sampled_logprobs: Tensor, loss_mask: Tensor, *, mismatch: Mismatch, cap: float
) -> tuple[Tensor, Tensor]:
    """The weight of each token, and whether its ratio was over the cap; no gradient. Where masked: 1 and False.

    A token that is left out still counts in the update's averages: weights there are laid down before anything is scored.

    Args:
        old_logprobs: nats, (n, T), the sampled tokens as the trainer scores them with the weights that sampled.
        sampled_logprobs: nats, (n, T), the same tokens as the engine reported them.
        loss_mask: bool (n, T).
        mismatch: which weight.
        cap: C, positive.
    """
    log_weights = torch.where(loss_mask, old_logprobs - sampled_logprobs, 0.0).detach()
    if mismatch.is_of_sequence:
        log_weights = torch.where(loss_mask, log_weights.sum(-1, keepdim=True), 0.0)
    if mismatch is Mismatch.OFF:
        return torch.ones_like(log_weights), torch.zeros_like(loss_mask)
    log_cap = math.log(cap)
    is_over = loss_mask & (log_weights > log_cap)
    weights = torch.where(loss_mask, log_weights.clamp(max=log_cap), 0.0).exp()  # a product over a row may exceed any float
    return weights.masked_fill(is_over, 0.0) if mismatch.is_mask else weights, is_over
