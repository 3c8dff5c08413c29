"""Matrix products on CPUs: by C of our own, by oneDNN, or by MKL, whichever is known to be the fastest."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engine.torch.cpu.compiled import AMX, AVX2, AVX512, AVX512_BF16, addresses, has_processor, proven, typed

_TYPICAL_ROWS = 64  # for which the packed layout is chosen; any other number may be multiplied with it
_PART_ROWS = 8192  # of a weight that are multiplied at once
_FEW = 2**24  # multiplications of a float32 product: a call of oneDNN takes 20 us more
_GRADIENT_ROWS_AT_ONCE = 2048  # of a weight's, while products in another precision are added to it
_ROW_UNIT, _COLUMN_UNIT = 16, 32  # of whose multiples a weight's sizes are in products.h

Operation: TypeAlias = Literal["none", "add", "mul", "silu"]
"""What a product goes through before it is rounded; the first two after "none" take another matrix."""


class Products:
    """The functions of products.h, for matrices of one precision on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._pack = typed(library.strop_pack, "iiip")
        self._unpack = typed(library.strop_unpack, "iiipp")
        self._product = typed(library.strop_product, 6 * "i" + 5 * "p")
        self._input_gradient = typed(library.strop_input_gradient, 4 * "i" + 3 * "p")
        self._weight_gradient = typed(library.strop_weight_gradient, 4 * "i" + 3 * "p")

    def pack(self, weight: Tensor) -> None:
        """Bring a contiguous (out, in) into the order of `product`, where it lies."""
        self._pack(torch.get_num_threads(), *weight.shape, weight.data_ptr())

    def unpack(self, weight: Tensor) -> Tensor:
        """A copy of what was packed."""
        out = torch.empty_like(weight)
        self._unpack(torch.get_num_threads(), *weight.shape, weight.data_ptr(), out.data_ptr())
        return out

    def product(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        is_packed: bool,
        operation: Operation = "none",
        other: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """inputs weightᵀ + bias of (N, in) and (out, in), after `operation`, with `other` (N, out); in `out`, if given."""
        inputs = inputs.contiguous()
        out = inputs.new_empty(len(inputs), len(weight)) if out is None else out
        sizes = len(inputs), *weight.shape, is_packed, ("none", "add", "mul", "silu").index(operation)
        self._product(torch.get_num_threads(), *sizes, *addresses(inputs, weight, bias, other, out))
        return out

    def input_gradient(self, of_outputs: Tensor, weight: Tensor) -> Tensor:
        """of_outputs weight: (N, out), (out, in) -> (N, in)."""
        of_outputs = of_outputs.contiguous()
        out = of_outputs.new_empty(len(of_outputs), weight.shape[1])
        self._input_gradient(torch.get_num_threads(), len(of_outputs), *weight.shape, *addresses(of_outputs, weight, out))
        return out

    def add_weight_gradient(self, of_outputs: Tensor, inputs: Tensor, total: Tensor) -> None:
        """Add of_outputsᵀ inputs, of (N, out) and (N, in), to the float32 `total` (out, in)."""
        of_outputs, inputs = of_outputs.contiguous(), inputs.contiguous()
        self._weight_gradient(torch.get_num_threads(), len(inputs), *total.shape, *addresses(of_outputs, inputs, total))


def products_for(weight: Tensor, dtype: torch.dtype | None = None) -> Products | None:
    """The compiled products, if this machine can have them for such a weight, and no library is known to be faster.

    Args:
        dtype: of the matrices that are multiplied, where it is not the weight's.
    """
    num_rows, num_columns = weight.shape
    fits = weight.device.type == "cpu" and weight.is_contiguous()
    return _compiled(dtype or weight.dtype) if fits and not num_rows % _ROW_UNIT and not num_columns % _COLUMN_UNIT else None


@cache
def _compiled(dtype: torch.dtype) -> Products | None:
    def by(source: str, instructions: frozenset[str], useful: frozenset[str] = frozenset()) -> Products | None:
        place = Path(__file__).with_name(source)
        return proven(place, instructions, Products, lambda products: _is_proven(products, dtype), useful=useful)

    if dtype is torch.bfloat16 and _uses_avx512() and not has_processor(AMX):
        return by("products.c", AVX512_BF16)
    if dtype is torch.float32 and not _is_mkl_best():
        return by("products_float32.c", AVX2, AVX512 if _uses_avx512() else frozenset())
    return None


@torch.inference_mode()
def _is_proven(products: Products, dtype: torch.dtype) -> bool:
    """Whether packing loses nothing, and products and gradients are those of float32, rounded."""
    generator = torch.Generator().manual_seed(0)
    tolerance = 0.01 if dtype is torch.bfloat16 else 1e-4
    is_right = True
    for num_rows in (80, 112):  # with 8 and with 16 lanes they have panels of one, two and three registers
        shapes = (num_rows, 96), (11, 96), (num_rows,), (11, num_rows)
        weight, inputs, bias, other = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        exact = inputs.float() @ weight.float().T + bias.float()
        packed = weight.clone()
        products.pack(packed)
        is_right &= torch.equal(products.unpack(packed), weight)
        after: dict[Operation, Tensor] = {"none": exact, "add": exact + other, "mul": exact * other, "silu": F.silu(exact)}
        for (operation, expected), is_packed in itertools.product(after.items(), (True, False)):
            which = packed if is_packed else weight
            found = products.product(inputs, which, bias, is_packed=is_packed, operation=operation, other=other)
            is_right &= torch.allclose(found.float(), expected, rtol=tolerance, atol=tolerance)
        of_inputs, of_weight = products.input_gradient(other, weight), torch.ones(weight.shape)
        products.add_weight_gradient(other, inputs, of_weight)
        is_right &= torch.allclose(of_inputs.float(), other.float() @ weight.float(), rtol=tolerance, atol=tolerance)
        is_right &= torch.allclose(of_weight, other.float().T @ inputs.float() + 1, rtol=1e-4, atol=1e-4)
    return is_right


class CompiledWeight:
    """A weight in the order of products.h, in the memory that it had."""

    def __init__(self, weight: Tensor, products: Products) -> None:
        products.pack(weight)
        self.memory, self._products = weight, products

    def dense(self) -> Tensor:
        """A copy in the order that it had."""
        return self._products.unpack(self.memory)

    def product(
        self, inputs: Tensor, bias: Tensor | None = None, *, operation: Operation = "none", other: Tensor | None = None
    ) -> Tensor:
        """inputs weightᵀ + bias, after `operation`."""
        return self._products.product(inputs, self.memory, bias, is_packed=True, operation=operation, other=other)


class OneDnnWeight:
    """A copy of a weight in the layout that oneDNN likes best here. Methods as of `CompiledWeight`."""

    memory = None  # of what was given: not its own

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)

    def dense(self) -> Tensor:
        return cast(Tensor, self._weight.to_dense())

    def product(
        self, inputs: Tensor, bias: Tensor | None = None, *, operation: Operation = "none", other: Tensor | None = None
    ) -> Tensor:
        if other is not None:
            return cast(Tensor, torch.ops.mkldnn._linear_pointwise.binary(inputs, other, self._weight, bias, operation))
        return multiply(inputs, self._weight, bias, activation="swish" if operation == "silu" else "none")


def pack(weight: Tensor) -> CompiledWeight | OneDnnWeight | None:
    """Return the weight in a layout that decode steps multiply faster, if this machine has one. What was given is gone."""
    if products := products_for(weight):
        return CompiledWeight(weight, products)
    is_packable = weight.dtype is torch.bfloat16 and _can_pack(weight.dtype, weight.device)
    return OneDnnWeight(weight) if is_packable else None


def multiply_shared(inputs: Tensor, weight: Tensor) -> Tensor:
    """inputs weightᵀ of (N, in) and (out, in), of a weight that others need as it is.

    A library rearranges it, which takes a second copy of it: here, of one part at a time.
    """
    if products := products_for(weight):
        return products.product(inputs, weight, is_packed=False)
    return torch.cat([F.linear(inputs, part) for part in torch.split(weight, _PART_ROWS)], 1)


def multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none") -> Tensor:
    """Return activation(inputs weightᵀ + bias) by oneDNN: (..., in), (out, in) -> (..., out). The weight may be packed."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, activation, [], ""))


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
        packed = OneDnnWeight(weight)
        return torch.equal(packed.dense(), weight) and torch.equal(packed.product(inputs), weight.t())
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def beats_mkl(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether MKL multiplies these slower than oneDNN and C do: in float32, on processors that are not Intel's.

    There MKL does not use AVX-512: on an AMD EPYC, products of 1104 rows with weights of SmolLM2-135M reach 210 to 220 GFLOP/s
    by MKL, 480 to 500 by oneDNN and 450 to 510 by C; with AVX2 only 210 to 230, 230 to 250 and 260 to 270. No processor of
    Intel was measured.
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


def _uses_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs weightᵀ + bias, by C or else oneDNN: (..., in), (out, in), (out,) -> (..., out)."""
    if (products := products_for(weight)) is None:
        return multiply(inputs, weight, bias)
    return products.product(inputs.flatten(0, -2), weight, bias, is_packed=False).view(*inputs.shape[:-1], len(weight))


def is_faster(inputs: Tensor, weight: Tensor) -> bool:
    """Whether `product` and its gradients are faster for such matrices than those of torch."""
    if weight.dtype is torch.float32:
        return beats_mkl(inputs, weight)
    is_alike = inputs.dtype is weight.dtype and inputs.device == weight.device
    return is_alike and products_for(weight) is not None


def input_gradient(of_outputs: Tensor, weight: Tensor) -> Tensor:
    """of_outputs weight, the gradient of what a linear layer got: (N, out), (out, in) -> (N, in)."""
    if products := products_for(weight):
        return products.input_gradient(of_outputs, weight)
    by = multiply if beats_mkl(of_outputs, weight.t()) else F.linear
    return by(of_outputs, weight.t())


def add_weight_gradient(total: Tensor, of_outputs: Tensor, inputs: Tensor) -> None:
    """Add of_outputsᵀ inputs, the gradient of a linear layer's weight, to the float32 `total`: (N, out), (N, in), (out, in)."""
    if products := products_for(total, inputs.dtype):
        products.add_weight_gradient(of_outputs, inputs, total)
    elif inputs.dtype is total.dtype:
        total.addmm_(of_outputs.t(), inputs)
    else:
        for rows in range(0, len(total), _GRADIENT_ROWS_AT_ONCE):
            block = slice(rows, rows + _GRADIENT_ROWS_AT_ONCE)
            total[block] += of_outputs[:, block].t() @ inputs
