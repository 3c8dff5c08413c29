"""Products in float32 by oneDNN, with gradients, against products in float64."""

import pytest
import torch
import torch.nn.functional as F

from strop.engine.torch.cpu import products
from strop.engine.torch.cpu.products import beats_mkl
from strop.training import logprobs
from strop.training.cpu.lean_layers import linear

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not products._can_pack(torch.float32, CPU), reason="this build of torch has no products by oneDNN"
)


@pytest.fixture(autouse=True)
def any_processor(monkeypatch):
    products._compiled.cache_clear()
    monkeypatch.setattr(products, "_is_mkl_best", lambda: False)
    yield
    products._compiled.cache_clear()


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
@pytest.mark.parametrize("shape", [(40, 96), (3, 7, 96)])
@pytest.mark.parametrize("num_outputs", [32, 30])  # those that C multiplies, and others
def test_a_linear_layer_has_the_gradients_of_float64(monkeypatch, num_outputs, capability, shape):
    monkeypatch.setattr(products, "_FEW", 0)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    given = [drawn(*shape), drawn(num_outputs, 96, seed=1), drawn(num_outputs, seed=2)]
    single, double = ([each.to(dtype).requires_grad_() for each in given] for dtype in (torch.float32, torch.float64))
    outputs, exact = linear(*single), F.linear(*double)
    assert outputs.shape == exact.shape
    to_outputs = drawn(*exact.shape, seed=3)
    found = torch.autograd.grad(outputs, single, to_outputs)
    expected = torch.autograd.grad(exact, double, to_outputs.double())
    for one, other in zip((outputs, *found), (exact, *expected), strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-4)


def test_a_frozen_layer_gets_no_gradient():
    inputs, weight = drawn(40, 96).requires_grad_(), drawn(32, 96, seed=1)
    linear(inputs, weight, None).sum().backward()
    assert inputs.grad is not None
    assert weight.grad is None


def test_mkl_stays_for_small_products_other_precisions_and_processors_of_intel(monkeypatch):
    large, weight = torch.empty(1024, 256), torch.empty(128, 256)
    assert beats_mkl(large, weight)
    assert not beats_mkl(large[:8], weight)
    assert not beats_mkl(large.bfloat16(), weight.bfloat16())
    monkeypatch.setattr(products, "_is_mkl_best", lambda: True)
    assert not beats_mkl(large, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_log_probs_and_gradients_of_a_head_are_those_of_mkl(monkeypatch, dtype):
    hidden, weight = drawn(40, 32).to(dtype), drawn(9_008, 32, seed=1).to(dtype) / 8
    targets, to_logprobs = torch.arange(40) * 200, drawn(40, seed=2)

    def figures():
        given = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        found, entropies = logprobs.head_logprobs(*given, None, targets, temperature=0.7, max_logits=9_008 * 16)
        return found, entropies, *torch.autograd.grad((found * to_logprobs).sum() + entropies.sum(), given)

    ours = figures()
    monkeypatch.setattr(products, "beats_mkl", lambda *_: False)
    for module in (products, logprobs):
        monkeypatch.setattr(module, "products_for", lambda *_: None)
    rounding = 1e-5 if dtype is torch.float32 else 0.02
    for one, other in zip(ours, figures(), strict=True):
        assert torch.allclose(one, other, rtol=rounding, atol=rounding)
