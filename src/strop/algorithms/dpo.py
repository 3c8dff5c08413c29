"""DPO: learning from pairs which of two responses is preferred (arXiv:2305.18290). All in nats, one value a pair.

The loss of a pair is `dpo_loss(implicit_margins(...))`; a pair is ranked rightly where its margin is positive.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """log π of each row's tokens together: (n, T) -> (n,). Where both rows of a pair share a prompt, its tokens may count.

    Args:
        logprobs: nats.
        mask: bool, True on tokens that count. CS336 assignment 5 counts the full sequence: in the margin the prompt cancels.
    """
    return torch.where(mask, logprobs, 0.0).sum(-1)


def implicit_margins(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """β log(π/π_ref) of the preferred response less that of the other: the difference of their implicit rewards, (n,).

    Args:
        chosen, rejected: log-probs of whole responses under the policy, (n,); carry the gradient.
        reference_chosen, reference_rejected: the same under the reference; no gradient.
        beta: how much the policy's drift from the reference is held to weigh.
    """
    return beta * ((chosen - reference_chosen) - (rejected - reference_rejected))


def dpo_loss(margins: Tensor) -> Tensor:
    """-log σ(margin) of each pair, Eq. 7 of the paper; log 2 where policy and reference agree."""
    return -F.logsigmoid(margins)
