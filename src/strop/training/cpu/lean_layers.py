"""RMS norms, gated linear units and linear layers with backward passes of their own, for a CPU.

Autograd keeps float32 copies of the inputs of a norm, and three tensors of a gated unit. These functions keep the inputs of a
norm and a scale per token, and the two factors of a gated unit.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.engine.torch.cpu.products import add_weight_gradient, input_gradient, is_faster, product
from strop.training.cpu.kernels import WIDTH_UNIT, Kernels, compiled
from strop.training.weights import gradient_sum, master_of

if TYPE_CHECKING:
    import transformers

# weight * (x / rms(x)), the second factor rounded first
_NORMS = {"LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
# down(act(gate(x)) * up(x))
_UNITS = {"LlamaMLP", "Qwen2MLP", "Qwen3MLP"}


def use_lean_layers(model: transformers.PreTrainedModel) -> None:
    """Let the norms, gated units and linear layers of `model` that are known here compute by functions of strop on a CPU."""
    for module in model.modules():
        if type(module).__name__ in _NORMS:
            module.forward = partial(_norm, module, type(module).forward)
        elif type(module).__name__ in _UNITS and module.config.hidden_act == "silu":
            module.forward = partial(_unit, module, type(module).forward)
        elif type(module) is nn.Linear:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def elementwise_kernels(*inputs: Tensor) -> Kernels | None:
    """The compiled norms and gates, if they are made for such inputs, all of one width, and this machine can have them."""
    dtype, width = inputs[0].dtype, inputs[0].shape[-1]
    are_alike = all(each.dtype is dtype and each.device.type == "cpu" and each.shape[-1] == width for each in inputs)
    return compiled(dtype) if are_alike and width % WIDTH_UNIT.get(dtype, 1) == 0 else None


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, (..., H) -> (..., H); all but the last product in float32."""
    normed: Tensor = _RmsNorm.apply(inputs, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def _norm(module: nn.Module, of_library: Any, inputs: Tensor) -> Tensor:
    if inputs.device.type != "cpu":
        given: Tensor = of_library(module, inputs)
        return given
    return rms_norm(inputs, module.weight, module.variance_epsilon)  # type: ignore[arg-type]


class _RmsNorm(torch.autograd.Function):
    """With u = x / rms(x) and g the gradient of weight * u: dx = (weight g - u mean(u weight g)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        if (kernels := elementwise_kernels(inputs, weight)) is not None:
            normed, scale = kernels.norm(inputs, weight, eps)
            ctx.save_for_backward(inputs, weight, scale)
            return normed
        full = _in_float32(inputs)
        scale = torch.linalg.vecdot(full, full).div_(inputs.shape[-1]).add_(eps).rsqrt_()[..., None]
        ctx.save_for_backward(inputs, weight, scale)
        return weight * full.mul_(scale).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, to_normed: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        inputs, weight, scale = ctx.saved_tensors
        needs_inputs, needs_weight, _ = ctx.needs_input_grad
        if (kernels := elementwise_kernels(inputs, weight, to_normed)) is not None:
            of_both = kernels.norm_backward(inputs, weight, scale, to_normed)
            return of_both[0] if needs_inputs else None, of_both[1].to(weight.dtype) if needs_weight else None, None
        units = _in_float32(inputs).mul_(scale)
        of_weight = None
        if needs_weight:
            products = to_normed * units.to(inputs.dtype)
            of_weight = products.flatten(0, -2).sum(0, dtype=torch.float32).to(weight.dtype)
        if not needs_inputs:
            return None, of_weight, None
        of_units = (to_normed * weight).float()
        dots = torch.linalg.vecdot(of_units, units).div_(-inputs.shape[-1])[..., None]
        return of_units.addcmul_(units, dots).mul_(scale).to(inputs.dtype), of_weight, None


def _in_float32(inputs: Tensor) -> Tensor:
    """A copy."""
    return inputs.to(torch.float32, copy=True)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of two tensors of one shape."""
    product: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


def _unit(module: Any, of_library: Any, inputs: Tensor) -> Tensor:
    if inputs.device.type != "cpu":
        given: Tensor = of_library(module, inputs)
        return given
    of_gate: Tensor = module.down_proj(gated(module.gate_proj(inputs), module.up_proj(inputs)))
    return of_gate


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs weightᵀ + bias by `product`, with its gradients: (..., in), (out, in), (out,) -> (..., out)."""
    outputs: Tensor = _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return outputs


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    by = linear if is_faster(inputs, module.weight) else F.linear
    return by(inputs, module.weight, module.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        ctx.master = master_of(weight)
        return product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, of_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        of_rows, of_inputs, of_weight = of_outputs.flatten(0, -2), None, None
        if needs_weight:
            total = gradient_sum(weight, ctx.master)
            add_weight_gradient(total, of_rows, inputs.flatten(0, -2))
            of_weight = total.to(weight.dtype) if ctx.master is None else None
        if needs_inputs:
            of_inputs = input_gradient(of_rows, weight).view(*of_outputs.shape[:-1], weight.shape[1])
        return of_inputs, of_weight, of_rows.sum(0) if needs_bias else None


class _Gated(torch.autograd.Function):
    """With s = sigmoid(x): d(x s)/dx = s (1 + x (1 - s))."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        kernels = elementwise_kernels(gate, up)
        return F.silu(gate) * up if kernels is None else kernels.gate(gate, up)

    @staticmethod
    def backward(ctx: Any, to_gated: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if (kernels := elementwise_kernels(gate, up, to_gated)) is not None:
            return kernels.gate_backward(gate, up, to_gated)
        of_silu: Tensor = torch.ops.aten.silu_backward(to_gated * up, gate)
        return of_silu, to_gated * F.silu(gate)
