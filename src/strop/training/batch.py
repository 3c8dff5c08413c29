"""Trajectories laid out as token columns, with each token's share of the update.

One row per trajectory, in canonical order; `T` is the longest row. Column `t` of every per-token tensor speaks of the token
`ids[:, t]`, which the model predicts from `ids[:, :t]`; so column 0 is never trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from strop.algorithms.protocol import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """All rows of one update. Shapes: (N, T), `lengths` (N,)."""

    ids: Tensor  # int64; padding is 0, beyond `lengths`
    lengths: Tensor  # int64
    loss_mask: Tensor  # bool, True on tokens the policy sampled; False on column 0 and on padding
    loss_weights: Tensor  # float32, each token's share of the update (law 4); 0 where masked
    advantages: Tensor  # float32, 0 where masked
    sampled_logprobs: Tensor  # float32, nats, 0 where nothing was sampled
    columns: Mapping[Column, Tensor]  # float32; those that were asked for
    temperature: float  # at which the tokens were sampled, and are scored (law 5)
