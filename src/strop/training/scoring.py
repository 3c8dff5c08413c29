"""Fills one number for each trained token of a batch, without gradient, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from strop.training.batch import TokenBatch, shares
from strop.training.config import TrainerConfig
from strop.training.world import World


@torch.no_grad()
def score_rows(batch: TokenBatch, config: TrainerConfig, world: World, score: Callable[[TokenBatch], Tensor]) -> Tensor:
    """float32 (N, T) on the CPU: of this rank's share of the rows what `score` says of them, 0 elsewhere.

    Args:
        score: (n, T') for a micro-batch on the device; of its rows alone, so that who else is in it changes rounding only.
    """
    scores = torch.zeros(batch.ids.shape)
    for part in shares(batch, config.max_tokens_per_microbatch, config.packing, world):
        of_part = score(part.batch.to(torch.device(config.device)))
        if part.batch.num_loss_tokens:
            scores[part.rows, : of_part.shape[1]] = of_part.cpu()
    return scores
