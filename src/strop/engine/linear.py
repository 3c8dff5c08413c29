"""Matrices of a decoder, kept as the machine multiplies them best."""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

_PART_ROWS = 8192  # of a shared weight that are multiplied at once
_TYPICAL_ROWS = 64  # for which the packed layout is chosen; any other number may be multiplied with it


class Matrix:
    """One weight (out, in). It can be sealed: packed for the machine, after which nobody can write to it. Shared ones cannot.

    A bfloat16 product on a CPU rearranges its weight first, every time, unless the weight is packed beforehand: with 64 rows
    of SmolLM2-135M that is a fifth of the time, with 8 more than a third. Packing loses nothing: `dense` gives every bit back.
    """

    def __init__(
        self, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device, shared: Tensor | None = None
    ) -> None:
        """A matrix of zeros, or one that is `shared`, which others read and write, too."""
        self._shape, self._dtype, self._device, self._is_shared = shape, dtype, device, shared is not None
        self._plain: Tensor | None = self._zeros() if shared is None else shared
        self._packed: Tensor | None = None

    @property
    def is_sealed(self) -> bool:
        return self._packed is not None

    @property
    def num_writes(self) -> int:
        """Grows with every in-place change that torch knows of."""
        return 0 if self._plain is None or self._is_shared else self._plain._version

    @property
    def address(self) -> int:
        """Where it lies; another one after each `seal` that packs."""
        return id(self._packed) if self._plain is None else self._plain.data_ptr()

    def dense(self) -> Tensor:
        """The weight itself, or of a sealed one a copy."""
        return self._plain if self._plain is not None else self._packed.to_dense()  # type: ignore[union-attr]

    def seal(self) -> None:
        """Pack, where this machine can."""
        if self._plain is not None and not self._is_shared and _can_pack(self._dtype, self._device):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._plain, _TYPICAL_ROWS)
            self._plain = None

    def unseal(self) -> None:
        """Make it writable again. What it held is gone."""
        if self._packed is not None:
            self._packed = None
            self._plain = self._zeros()

    def product(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """inputs weightᵀ (+ bias), of (N, in)."""
        if self._packed is not None:
            return cast(Tensor, torch.ops.mkldnn._linear_pointwise(inputs, self._packed, bias, "none", [], ""))
        if self._is_shared and self._device.type == "cpu":
            # A product that packs its weight on the way holds a second copy of it: here, of one part at a time.
            product = inputs.new_empty(len(inputs), self._shape[0])
            for place, part in zip(torch.split(product, _PART_ROWS, 1), torch.split(self.dense(), _PART_ROWS), strict=True):
                place.copy_(F.linear(inputs, part))
            return product
        return F.linear(inputs, self.dense(), bias)

    def onto(self, residual: Tensor, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """residual + inputs weightᵀ (+ bias)."""
        if self._packed is not None:
            return self._combined(inputs, residual, bias, "add")
        total = torch.addmm(residual, inputs, self.dense().t())
        return total if bias is None else total + bias

    def silu(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """silu(inputs weightᵀ (+ bias))."""
        if self._packed is not None:
            activated: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, bias, "swish", [], "")
            return activated
        return F.silu(self.product(inputs, bias))

    def times(self, factor: Tensor, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """factor * (inputs weightᵀ (+ bias)). `factor` may be overwritten."""
        if self._packed is not None:
            return self._combined(inputs, factor, bias, "mul")
        return factor.mul_(self.product(inputs, bias))

    def _zeros(self) -> Tensor:
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device)

    def _combined(self, inputs: Tensor, other: Tensor, bias: Tensor | None, operation: str) -> Tensor:
        combined: Tensor = torch.ops.mkldnn._linear_pointwise.binary(inputs, other, self._packed, bias, operation)
        return combined


@cache
def _can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch and this processor multiply packed weights, tried out with one."""
    if dtype is not torch.bfloat16 or device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight = torch.arange(32 * 16, dtype=torch.float32).view(32, 16).to(dtype)
    inputs = torch.eye(16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        product = torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")
        return torch.equal(packed.to_dense(), weight) and torch.equal(product, weight.t())
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
