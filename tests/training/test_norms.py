"""Norms with a backward pass of their own: the library's values and gradients."""

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from strop.training.cpu.lean_layers import rms_norm, use_lean_layers


def test_a_norm_by_hand():
    inputs = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    weight = torch.tensor([2.0, -1.0], requires_grad=True)
    normed = rms_norm(inputs, weight, 0.5)  # 12.5 + 0.5 = 13
    normed.sum().backward()
    root = 13**0.5
    torch.testing.assert_close(normed.detach(), torch.tensor([[6 / root, -4 / root], [0.0, 0.0]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(weight.grad, torch.tensor([3 / root, 4 / root]), rtol=0, atol=1e-6)
    # d/dx_i of (2 x_0 - x_1) / r with r^2 = (x_0^2 + x_1^2) / 2 + 0.5: w_i / r - (2 x_0 - x_1) x_i / (2 r^3)
    expected = torch.tensor([[2 / root - 3 / root**3, -1 / root - 4 / root**3], [2 / 0.5**0.5, -1 / 0.5**0.5]])
    torch.testing.assert_close(inputs.grad, expected, rtol=0, atol=1e-6)


def test_gradients_are_those_of_finite_differences():
    inputs, weight = torch.randn(3, 2, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def weighted(inputs, weight):
        return (rms_norm(inputs, weight, 1e-3) * torch.arange(8.0)).sum()

    of_inputs, of_weight = torch.autograd.functional.jacobian(weighted, (inputs, weight))
    step = 1e-3  # sums are float32
    for place in ((0, 1, 3), (2, 0, 7)):
        moved = inputs.clone()
        moved[place] += step
        less = inputs.clone()
        less[place] -= step
        difference = (weighted(moved, weight) - weighted(less, weight)) / (2 * step)
        assert of_inputs[place].item() == pytest.approx(difference.item(), rel=2e-3, abs=2e-3)
    for place in (0, 5):
        moved = weight.clone()
        moved[place] += step
        difference = (weighted(inputs, moved) - weighted(inputs, weight)) / step
        assert of_weight[place].item() == pytest.approx(difference.item(), rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_known_norm_gives_what_the_library_s_gives(kind, dtype):
    inputs, to_normed = torch.randn(4, 7, 32).to(dtype), torch.randn(4, 7, 32).to(dtype)
    results = []
    for is_lean in (False, True):
        norm = kind(32, eps=1e-5).to(dtype)
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2.0, 32))
        if is_lean:
            use_lean_layers(norm)
        leaf = inputs.clone().requires_grad_()
        normed = norm(leaf)
        normed.backward(to_normed)
        results.append((normed.detach().float(), leaf.grad.float(), norm.weight.grad.float()))
    tolerance = 1e-6 if dtype is torch.float32 else 0.01
    for library, ours in zip(*results, strict=True):
        assert (library - ours).norm() <= tolerance * library.norm()


def test_a_frozen_weight_and_plain_inputs_leave_the_other_s_gradient_as_it_is():
    inputs, weight = torch.randn(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    both = torch.autograd.grad(rms_norm(inputs, weight, 1e-6).sum(), (inputs, weight))
    (of_inputs,) = torch.autograd.grad(rms_norm(inputs, weight.detach(), 1e-6).sum(), inputs)
    (of_weight,) = torch.autograd.grad(rms_norm(inputs.detach(), weight, 1e-6).sum(), weight)
    assert torch.equal(of_inputs, both[0])
    assert torch.equal(of_weight, both[1])


def test_a_norm_with_another_formula_stays_the_library_s():
    """Gemma's weight is added to one."""
    norm = GemmaRMSNorm(8)
    inputs = torch.randn(3, 8)
    before = norm(inputs)
    use_lean_layers(norm)
    assert torch.equal(norm(inputs), before)
