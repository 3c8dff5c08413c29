"""Matrix products by oneDNN, which torch uses in bfloat16. In float32 it uses MKL; this says where oneDNN is faster."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

_TYPICAL_ROWS = 64  # for which the packed layout is chosen; any other number may be multiplied with it
_PART_ROWS = 8192  # of a weight that are multiplied at once
_SMALL = 2**18  # elements of a float32 weight: a decode step's product with a packed one takes 20 us more to call
_FEW = 2**24  # multiplications of a float32 product: a call of oneDNN takes 20 us more


def multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none") -> Tensor:
    """Return activation(inputs weightᵀ + bias): (..., in), (out, in) -> (..., out). The weight may be packed."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, activation, [], ""))


def multiply_into(
    outputs: Tensor, inputs: Tensor, weight: Tensor, *, by: Callable[[Tensor, Tensor], Tensor] = multiply
) -> None:
    """Write inputs weightᵀ into `outputs`: (N, in), (out, in) -> (N, out).

    A product rearranges a weight that is not packed, which takes a second copy of it: here, of one part at a time.
    """
    for place, part in zip(torch.split(outputs, _PART_ROWS, 1), torch.split(weight, _PART_ROWS), strict=True):
        place.copy_(by(inputs, part))


def pack(weight: Tensor) -> Tensor:
    """Return the weight in the layout of this machine's products; `to_dense` gives every bit back."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS))


def pays_to_pack(num_elements: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether decode steps multiply a packed weight of so many elements faster; in float32 see `beats_mkl`."""
    if dtype is torch.float32 and (num_elements < _SMALL or _is_mkl_best()):
        return False
    return _can_pack(dtype, device)


@cache
def _can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch and this processor multiply packed weights, tried out with one."""
    if dtype not in (torch.bfloat16, torch.float32) or device.type != "cpu":
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight = torch.arange(32 * 16, dtype=torch.float32).view(32, 16).to(dtype)
    inputs = torch.eye(16, dtype=dtype)
    try:
        packed = pack(weight)
        return torch.equal(packed.to_dense(), weight) and torch.equal(multiply(inputs, packed), weight.t())
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def beats_mkl(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN multiplies these faster than MKL: in float32, on processors that are not Intel's.

    There MKL does not use AVX-512: on an AMD EPYC, products of 1088 rows with weights of SmolLM2-135M reach 210 GFLOP/s by MKL
    and 340 to 500 by oneDNN; with AVX2 only 210 and 185 to 255. No processor of Intel was measured.
    """
    if inputs.dtype is not torch.float32 or weight.dtype is not torch.float32 or inputs.device.type != "cpu":
        return False
    return inputs.numel() * len(weight) >= _FEW and not _is_mkl_best() and _can_pack(torch.float32, inputs.device)


@cache
def _is_mkl_best() -> bool:
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return True
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs weightᵀ + bias by oneDNN, with gradients: (..., in), (out, in), (out,) -> (..., out)."""
    outputs: Tensor = _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return outputs


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        return multiply(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, of_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        of_rows, of_weight = of_outputs.flatten(0, -2), None
        if needs_weight:  # with AVX2 only, MKL is the faster one
            rows = inputs.flatten(0, -2)
            has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
            of_weight = multiply(of_rows.t(), rows.t()) if has_avx512 else of_rows.t() @ rows
        return multiply(of_outputs, weight.t()) if needs_inputs else None, of_weight, of_rows.sum(0) if needs_bias else None
