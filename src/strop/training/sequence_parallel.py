"""Ulysses sequence parallelism (arXiv 2309.14509): ranks that divide the tokens of a micro-batch.

A layer treats every token by itself, but for attention. So each rank computes its part of the tokens, and attention all tokens
with its part of the heads; an all-to-all before and after it swaps tokens for heads. Log-probs are single numbers, of which all
ranks get those of all: then each has the whole loss, whatever it is, and the gradient of its own tokens. Sums over ranks are
those of `ShardedWeights`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SequenceGroup:
    """The ranks of `group`, which compute each micro-batch together, as one of them sees them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def to_heads(self, heads: Tensor) -> Tensor:
        """All heads of this rank's tokens (1, H, t, D) -> this rank's heads of all tokens (1, H / S, S t, D)."""
        _, _, num_tokens, width = heads.shape
        swapped = self._swap(heads.reshape(self.size, -1, num_tokens, width))
        return swapped.transpose(0, 1).reshape(1, -1, self.size * num_tokens, width)

    def to_tokens(self, heads: Tensor) -> Tensor:
        """This rank's heads of all tokens (1, S t, H / S, D) -> all heads of this rank's tokens (1, t, H, D)."""
        _, num_tokens, num_heads, width = heads.shape
        swapped = self._swap(heads.reshape(self.size, -1, num_heads, width))
        return swapped.transpose(0, 1).reshape(1, num_tokens // self.size, self.size * num_heads, width)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, from which all of them compute the same; each gets the gradient of its own `values`."""
        total: Tensor = _Sum.apply(values, self._group)  # type: ignore[no-untyped-call]
        return total

    def _swap(self, parts: Tensor) -> Tensor:
        """Give part r of (S, ...) to rank r, and get as many from all."""
        swapped: Tensor = _Swap.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return swapped


class _Swap(torch.autograd.Function):
    """All-to-all, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, to_swapped: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(to_swapped, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    swapped = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(swapped, parts.contiguous(), group=group)
    return swapped


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, to_total: Tensor) -> tuple[Tensor, None]:
        return to_total, None
