"""Root-mean-square norms on a CPU, with a backward pass of their own.

Left to autograd, those of the model library keep float32 copies of what enters them; these keep what enters and a scale.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from strop.training.kernels import elementwise_kernels

_KNOWN = (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)  # all of them: weight * (x / rms(x)), the second factor rounded first


def use_lean_norms(model: PreTrainedModel) -> None:
    """Let the norms of `model` that are known here compute by `rms_norm` on a CPU."""
    for module in model.modules():
        if type(module) in _KNOWN:
            module.forward = partial(_norm, module, type(module).forward)


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
