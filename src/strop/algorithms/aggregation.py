"""How the losses of tokens become the loss of an update: each token's share, computed once over the whole update (law 4)."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor


class Aggregation(StrEnum):
    """The share of a token. T: tokens trained on in the update; T_q: in its group; |o|: in its row; N rows, Q groups.

    Rows and groups without a single token to train on have no part in N and Q.
    """

    TOKEN_MEAN = "token_mean"  # 1/T; rStar2-Agent's released code
    GROUP_TOKEN_MEAN = "group_token_mean"  # 1/(Q T_q); rStar2-Agent (arXiv 2508.20722) Eq. 6, DAPO (arXiv:2503.14476)
    SEQUENCE_MEAN = "sequence_mean"  # 1/(N |o|); GRPO, rStar2-Agent Eq. 1; CS336 assignment 5
    CONSTANT = "constant"  # 1/(N C); Dr. GRPO (arXiv:2503.20783)


def token_weights(loss_mask: Tensor, group_of_row: Tensor, aggregation: Aggregation, *, constant: int | None = None) -> Tensor:
    """Each token's share of the update: loss = sum(weights * token loss). 0 where masked.

    Args:
        loss_mask: bool (N, T), the whole update.
        group_of_row: int64 (N,), equal for rows of one task.
        aggregation: which mean.
        constant: C of `Aggregation.CONSTANT`, in tokens; must be None for the others.

    Returns:
        float32 (N, T).

    Raises:
        ValueError: `constant` is missing, not positive, or set where it has no meaning.
    """
    if (constant is not None) != (aggregation is Aggregation.CONSTANT):
        raise ValueError(f"constant is {constant}, but aggregation is {aggregation}: one is needed exactly where the other is")
    if constant is not None and constant <= 0:
        raise ValueError(f"constant is {constant}: it divides the loss, so it must be positive")
    tokens_of_row = loss_mask.sum(1)
    if not bool(tokens_of_row.any()):
        return torch.zeros(loss_mask.shape, dtype=torch.float32)
    num_rows = int((tokens_of_row > 0).sum())
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            divisor = tokens_of_row.sum().expand_as(tokens_of_row)
        case Aggregation.GROUP_TOKEN_MEAN:
            group = torch.unique(group_of_row, return_inverse=True)[1]
            tokens_of_group = torch.zeros(int(group.max()) + 1, dtype=torch.int64).index_add_(0, group, tokens_of_row)
            divisor = int((tokens_of_group > 0).sum()) * tokens_of_group[group]
        case Aggregation.SEQUENCE_MEAN:
            divisor = num_rows * tokens_of_row
        case Aggregation.CONSTANT:
            assert constant is not None
            divisor = torch.full_like(tokens_of_row, num_rows * constant)
    weight_of_row = 1.0 / divisor.clamp(min=1).double()  # a row without tokens is masked throughout
    return (loss_mask * weight_of_row[:, None]).float()
