"""Gated units with a backward pass of their own: the library's values and gradients."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3MLP

from strop.training.cpu.lean_layers import gated, use_lean_layers


def test_a_gate_by_hand():
    gate, up = torch.tensor([0.0, math.log(3.0)], requires_grad=True), torch.tensor([5.0, 2.0], requires_grad=True)
    product = gated(gate, up)
    product.sum().backward()
    x = math.log(3.0)  # sigmoid 3/4
    torch.testing.assert_close(product.detach(), torch.tensor([0.0, 1.5 * x]), rtol=0, atol=1e-6)
    torch.testing.assert_close(up.grad, torch.tensor([0.0, 0.75 * x]), rtol=0, atol=1e-6)
    torch.testing.assert_close(gate.grad, torch.tensor([2.5, 2 * 0.75 * (1 + x / 4)]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "config"), [(LlamaMLP, LlamaConfig), (Qwen3MLP, Qwen3Config)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_known_unit_gives_what_the_library_s_gives(kind, config, dtype):
    torch.manual_seed(0)
    unit = kind(config(hidden_size=32, intermediate_size=48)).to(dtype)
    inputs, to_outputs = 3 * torch.randn(4, 7, 32).to(dtype), torch.randn(4, 7, 32).to(dtype)
    results = []
    for is_lean in (False, True):
        if is_lean:
            use_lean_layers(unit)
        unit.zero_grad()
        leaf = inputs.clone().requires_grad_()
        outputs = unit(leaf)
        outputs.backward(to_outputs)
        results.append([outputs.detach(), leaf.grad, *(parameter.grad.clone() for parameter in unit.parameters())])
    tolerance = 1e-6 if dtype is torch.float32 else 0.01
    for library, ours in zip(*results, strict=True):
        assert ours.dtype is dtype
        assert (library.float() - ours.float()).norm() <= tolerance * library.float().norm()


def test_a_unit_with_another_activation_stays_the_library_s():
    unit = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=16, hidden_act="gelu"))
    inputs = torch.randn(3, 32)
    before = unit(inputs)
    use_lean_layers(unit)
    assert torch.equal(unit(inputs), before)


def test_far_from_zero_it_is_all_or_nothing():
    gate = torch.tensor([300.0, -300.0, 88.0, -88.0] * 4).bfloat16().requires_grad_()
    up = torch.full_like(gate, 2.0).requires_grad_()
    product = gated(gate, up)
    product.sum().backward()
    assert product[:4].tolist() == pytest.approx([600.0, 0.0, 176.0, 0.0], abs=1e-6)
    assert gate.grad[:4].tolist() == pytest.approx([2.0, 0.0, 2.0, 0.0], abs=1e-6)
    assert up.grad[:4].tolist() == pytest.approx([300.0, 0.0, 88.0, 0.0], abs=1e-6)
