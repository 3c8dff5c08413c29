"""Means and sums over the tokens of a mask. Values outside the mask may be NaN or infinite."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over `dim` of the elements where `mask` is 1; NaN if there are none.

    Args:
        tensor: any shape.
        mask: of the same shape, or one that broadcasts to it; bool or 0 and 1.
        dim: None for all dimensions, which gives a scalar.
    """
    mask = mask.bool().expand_as(tensor)
    return _sum(torch.where(mask, tensor, 0), dim) / _sum(mask, dim)


def masked_normalize(tensor: Tensor, mask: Tensor, normalize_constant: float, dim: int | None = None) -> Tensor:
    """Sum over `dim` of the elements where `mask` is 1, divided by a constant; 0 if there are none. Arguments as above."""
    return _sum(torch.where(mask.bool().expand_as(tensor), tensor, 0), dim) / normalize_constant


def _sum(tensor: Tensor, dim: int | None) -> Tensor:
    return tensor.sum() if dim is None else tensor.sum(dim)
