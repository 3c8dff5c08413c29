"""Gradients that are added up in float32 where they arise, so that those of a vocabulary are never held twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MASTER = "strop_master"


def add_up_in(parameter: nn.Parameter, master: nn.Parameter) -> None:
    """Let functions that know of it add the gradient of `parameter` to that of its float32 `master`."""
    setattr(parameter, _MASTER, master)


def gradient_sum(parameter: Tensor) -> Tensor | None:
    """The float32 tensor that the gradient of `parameter` is to be added to; None: autograd is to have it."""
    master = getattr(parameter, _MASTER, None)
    if master is None or not parameter.requires_grad:
        return None
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    total: Tensor = master.grad
    return total


def embed(embedding: nn.Module, ids: Tensor) -> Tensor:
    """`embedding(ids)`: int64 (n, T) -> (n, T, H). Its gradient takes the rows of `ids`, not a vocabulary."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or not torch.is_grad_enabled():
        embedded: Tensor = embedding(ids)
        return embedded
    if gradient_sum(embedding.weight) is None:
        return F.embedding(ids, embedding.weight, embedding.padding_idx)
    rows: Tensor = _Rows.apply(embedding.weight, ids, embedding.padding_idx)  # type: ignore[no-untyped-call]
    return rows


def zeros_together(like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros of these shapes, of one dtype on one device, in one block of memory.

    Tensors that live long, each made among others that do not, would leave holes in the heap that nothing fits into.
    """
    block = torch.zeros(sum(each.numel() for each in like), dtype=like[0].dtype, device=like[0].device)
    parts = torch.split(block, [each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.padding = padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor) -> tuple[None, ...]:
        weight, ids = ctx.saved_tensors
        total = gradient_sum(weight)
        assert total is not None
        flat, gradients = ids.flatten(), of_rows.flatten(0, -2).to(total.dtype)
        if ctx.padding is not None:
            gradients = gradients.masked_fill((flat == ctx.padding)[:, None], 0.0)
        total.index_add_(0, flat, gradients)
        return None, None, None
