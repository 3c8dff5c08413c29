"""Gated linear units on a CPU, with a backward pass of their own.

Left to autograd, those of the model library keep what the activation gives beside both of its factors; these keep the factors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from strop.training.kernels import elementwise_kernels

_KNOWN = (LlamaMLP, Qwen2MLP, Qwen3MLP)  # all of them: down(act(gate(x)) * up(x))


def use_lean_gates(model: PreTrainedModel) -> None:
    """Let the gated units of `model` that are known here compute by `gated` on a CPU."""
    for module in model.modules():
        if type(module) in _KNOWN and module.config.hidden_act == "silu":
            module.forward = partial(_unit, module, type(module).forward)


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
