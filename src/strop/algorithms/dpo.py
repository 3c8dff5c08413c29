"""DPO: learning from pairs which of two responses is preferred (arXiv:2305.18290). All in nats, one value a pair.

The loss of a pair is `dpo_loss(implicit_margins(...))`; a pair is ranked rightly where its margin is positive. Its gradient is
that of a policy gradient whose advantages are `response_advantages`.
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


def implicit_rewards(logprobs: Tensor, reference_logprobs: Tensor, *, beta: float) -> Tensor:
    """β log(π/π_ref) of whole responses: the reward by which the policy would be the best one, up to a number of the prompt.

    Section 4 of the paper.

    Args:
        logprobs: under the policy, any shape; carries the gradient.
        reference_logprobs: the same under the reference; no gradient.
        beta: how much the policy's drift from the reference is held to weigh.
    """
    return beta * (logprobs - reference_logprobs)


def implicit_margins(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """The implicit reward of the preferred response less that of the other, (n,).

    Args:
        chosen, rejected: log-probs of whole responses under the policy, (n,); carry the gradient.
        reference_chosen, reference_rejected: the same under the reference; no gradient.
        beta: of `implicit_rewards`.
    """
    return implicit_rewards(chosen, reference_chosen, beta=beta) - implicit_rewards(rejected, reference_rejected, beta=beta)


def dpo_loss(margins: Tensor) -> Tensor:
    """-log σ(margin) of each pair, Eq. 7 of the paper; log 2 where policy and reference agree."""
    return -F.logsigmoid(margins)


def response_advantages(margins: Tensor, *, beta: float) -> Tensor:
    """What each token of the preferred response deserves: β σ(-margin), (n,); each token of the other minus that.

    The paper's gradient, section 4: that of `dpo_loss` by the log-prob of a response is minus its advantage, so a policy
    gradient with these, held fixed, has the gradient of DPO.
    """
    return beta * torch.sigmoid(-margins)


def ranked_rightly(margins: Tensor) -> Tensor:
    """1 where the preferred response has the larger implicit reward, a half at a tie, 0 elsewhere; (n,)."""
    return (margins > 0).to(margins.dtype) + 0.5 * (margins == 0).to(margins.dtype)
