"""Gradients that are added up in float32 where they arise, and weights that are rounded only while a layer computes."""

import pytest
import torch
from scored_tokens import token_logprobs
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.engine.torch.cpu import products
from strop.training.cpu.lean_layers import use_lean_layers
from strop.training.logprobs import head_logprobs
from strop.training.models import checkpoint_activations
from strop.training.weights import MasterWeights, add_up_in, embed, master_of, zeros_together

VOCABULARY, WIDTH = 11, 4


def table(padding: int | None = None) -> tuple[nn.Embedding, nn.Parameter]:
    """An embedding in bfloat16 and its master."""
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
    master = nn.Parameter(embedding.weight.detach().clone())
    embedding.weight.data = embedding.weight.data.bfloat16()
    add_up_in(embedding.weight, master)
    return embedding, master


@pytest.mark.parametrize("padding", [None, 3])
def test_an_embedding_s_gradient_is_the_sum_over_its_rows_and_none_of_the_padding_id_s(padding):
    embedding, master = table(padding)
    ids = torch.tensor([[3, 5, 5], [0, 3, 10]])
    factors = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    (embed(embedding, ids) * factors).sum().backward()
    expected = torch.zeros(VOCABULARY, WIDTH)
    for row, column in ((row, column) for row in range(2) for column in range(3)):
        if ids[row, column] != padding:
            expected[ids[row, column]] += factors[row, column].float()
    torch.testing.assert_close(master.grad, expected, rtol=0, atol=1e-6)
    assert embedding.weight.grad is None


def test_sums_of_many_small_gradients_are_not_rounded():
    """In bfloat16, 1 + 2**-9 is 1: a thousand of them would be lost."""
    embedding, master = table()
    ids = torch.full((1, 1001), 7)
    factors = torch.full((1, 1001, 1), 2.0**-9).bfloat16()
    factors[0, 0] = 1.0
    (embed(embedding, ids) * factors).sum().backward()
    assert master.grad[7].tolist() == [1.0 + 1000 * 2.0**-9] * WIDTH


def test_a_head_s_gradient_is_added_to_what_is_there():
    generator = torch.Generator().manual_seed(2)
    hidden, targets = torch.randn(6, WIDTH, generator=generator).bfloat16(), torch.tensor([1, 0, 9, 9, 4, 2])
    embedding, master = table()
    plain = embedding.weight.detach().clone().float().requires_grad_()
    master.grad = torch.ones(VOCABULARY, WIDTH)
    for weight in (embedding.weight, plain):
        logprobs, _ = head_logprobs(hidden.to(weight.dtype), weight, None, targets, temperature=1.0, max_logits=3 * VOCABULARY)
        logprobs.sum().backward()
    torch.testing.assert_close(master.grad - 1.0, plain.grad, rtol=0, atol=0.03)  # products are in bfloat16
    assert embedding.weight.grad is None


def test_positions_that_a_head_is_filled_up_with_change_nothing():
    generator = torch.Generator().manual_seed(4)
    hidden, matrix = torch.randn(300, WIDTH, generator=generator), torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.randint(0, VOCABULARY, (300,), generator=generator)
    ours, plain = (hidden.clone().requires_grad_() for _ in range(2))
    weights = [matrix.clone().requires_grad_() for _ in range(2)]
    logprobs, entropies = head_logprobs(ours, weights[0], None, targets, temperature=1.0, max_logits=64 * VOCABULARY)
    expected = (plain @ weights[1].T).log_softmax(-1)
    assert logprobs.shape == entropies.shape == (300,)
    torch.testing.assert_close(logprobs, expected.gather(1, targets[:, None]).squeeze(1), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(1), rtol=0, atol=1e-5)
    (logprobs + entropies).sum().backward()
    (expected.gather(1, targets[:, None]).sum() - (expected.exp() * expected).sum()).backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=1e-5, atol=1e-4)


def test_a_frozen_or_plain_embedding_is_left_to_autograd():
    embedding, master = table()
    embedding.weight.requires_grad_(False)
    assert master_of(embedding.weight) is None
    assert not embed(embedding, torch.tensor([[1]])).requires_grad
    plain = nn.Embedding(VOCABULARY, WIDTH)
    embed(plain, torch.tensor([[2, 2]])).sum().backward()
    assert plain.weight.grad[2].tolist() == [2.0] * WIDTH
    assert master.grad is None


def test_a_tied_matrix_gets_the_gradients_of_both_its_uses(model_directory):
    """Those of a float32 model with the same rounded weights, to bfloat16's precision."""
    model, plain = (AutoModelForCausalLM.from_pretrained(model_directory).eval() for _ in range(2))
    masters = MasterWeights(model, torch.bfloat16)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16().float()
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(3))
    where = torch.ones_like(ids, dtype=torch.bool)
    where[:, 0] = False
    for each in (model, plain):
        token_logprobs(each, ids, where, temperature=1.0)[0].sum().backward()
    ours, expected = masters.named()["model.embed_tokens.weight"].grad, plain.get_input_embeddings().weight.grad
    assert (ours - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("is_again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gradients_of_two_backward_passes_are_those_of_autograd(model_directory, monkeypatch, dtype, is_again):
    monkeypatch.setattr(products, "_FEW", 0)  # small ones are left to torch otherwise
    model, plain = (AutoModelForCausalLM.from_pretrained(model_directory).eval() for _ in range(2))
    use_lean_layers(model)
    if is_again:
        checkpoint_activations(model, None if dtype is torch.float32 else dtype)
    masters = MasterWeights(model, dtype, rounds_layers=not is_again).named()
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(dtype).float()
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(3))
    where = torch.ones_like(ids, dtype=torch.bool)
    where[:, 0] = False
    for each in (model, plain) * 2:
        token_logprobs(each, ids, where, temperature=1.0)[0].sum().backward()
    expected = dict(plain.named_parameters())
    assert masters.keys() == expected.keys()
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    for name, master in masters.items():
        assert (master.grad - expected[name].grad).norm() < tolerance * expected[name].grad.norm(), name


def test_tensors_made_together_share_one_block_and_no_element():
    first, second = zeros_together([torch.empty(2, 3), torch.empty(5)])
    assert (first.shape, second.shape) == ((2, 3), (5,))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    first += 1
    assert second.tolist() == [0.0] * 5


def test_layers_that_are_computed_again_have_no_rounded_weights_but_while_they_compute(model_directory):
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    checkpoint_activations(model, torch.bfloat16)
    masters = MasterWeights(model, torch.bfloat16, rounds_layers=False).named()
    layer = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    seen = []
    layer.mlp.register_forward_pre_hook(lambda module, inputs: seen.append(module.down_proj.weight.dtype))
    ids = torch.arange(8)[None]
    where = ids > 0
    token_logprobs(model, ids, where, temperature=1.0)[0].sum().backward()
    assert seen == [torch.bfloat16] * 2  # forward, and again
    parameters = dict(model.named_parameters())
    in_layers = {name for name in parameters if ".layers." in name}
    assert in_layers
    assert all(parameters[name] is masters[name] for name in in_layers)
    assert all(parameters[name].dtype == torch.float32 and parameters[name].grad is not None for name in in_layers)
    assert parameters["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_layer_that_fails_has_its_own_weights_again(model_directory):
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    checkpoint_activations(model, torch.bfloat16)
    MasterWeights(model, torch.bfloat16, rounds_layers=False)
    layer = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    before = dict(layer.named_parameters())

    def fail(module, inputs):
        raise RuntimeError("out of memory")

    layer.mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(input_ids=torch.arange(8)[None], use_cache=False)
    after = dict(layer.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
