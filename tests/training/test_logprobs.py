import pytest
import torch
from scored_tokens import token_logprobs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from strop.training.logprobs import head_logprobs
from strop.training.models import load_model


@pytest.fixture
def model(model_directory):
    return load_model(model_directory).eval()


def full_logits_reference(model, ids, where, temperature):
    """The model library's own forward, with an attention mask, all logits at once."""
    attention_mask = (torch.arange(ids.shape[1])[None] < lengths_of(where)[:, None]).long()
    logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1].float() / temperature
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    return logprobs * where[:, 1:], entropies * where[:, 1:]


def lengths_of(where):
    return (where * torch.arange(1, where.shape[1] + 1)).amax(1)


@pytest.mark.parametrize("in_cache", [61 * 3, 2**26])  # blocks of three positions, the last of a chunk smaller; of all
@pytest.mark.parametrize("max_logits", [61 * 4, 2**26])  # chunks of four positions; a single chunk
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs_entropies_and_gradients_equal_the_full_forward(
    model, make_batch, monkeypatch, max_logits, in_cache, temperature
):
    monkeypatch.setattr("strop.training.logprobs._LOGITS_IN_CACHE", in_cache)
    batch = make_batch()
    factors = torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(1))
    logprobs, entropies = token_logprobs(model, batch.ids, batch.loss_mask, temperature=temperature, max_logits=max_logits)
    (logprobs * factors + entropies * factors.flip(1)).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected, expected_entropies = full_logits_reference(model, batch.ids, batch.loss_mask, temperature)
    (expected * factors[:, 1:] + expected_entropies * factors.flip(1)[:, 1:]).sum().backward()
    torch.testing.assert_close(logprobs[:, 1:], expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropies[:, 1:], expected_entropies, rtol=0, atol=2e-6)
    assert logprobs[:, 0].tolist() == [0.0] * len(batch.lengths)
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() < 1e-6 * parameter.grad.norm()


def test_what_stands_in_the_padding_reaches_neither_logprobs_nor_gradients(model, make_batch):
    batch = make_batch()
    is_padding = torch.arange(batch.ids.shape[1])[None] >= batch.lengths[:, None]
    results = []
    for padding in (0, 17):
        ids = torch.where(is_padding, padding, batch.ids)
        logprobs, _ = token_logprobs(model, ids, batch.loss_mask, temperature=1.0)
        logprobs.sum().backward()
        results.append((logprobs.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
        model.zero_grad()
    assert torch.equal(results[0][0], results[1][0])
    for first, second in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most elements that any tensor has which is made while it is entered."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.num_elements = max([self.num_elements, *(each.numel() for each in tree_leaves(made) if torch.is_tensor(each))])
        return made


def activations_of(vocabulary, max_logits):
    """Bytes that a backward pass has to keep besides the weights, and the largest tensor on the way."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(0, vocabulary, (4, 300))
    where = torch.ones_like(ids, dtype=torch.bool)
    where[:, 0] = False
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = token_logprobs(model, ids, where, temperature=0.7, max_logits=max_logits)
        logprobs.sum().backward()
    return sum(kept.values()), largest.num_elements


def test_what_is_kept_does_not_grow_with_the_vocabulary_and_logits_are_never_all_there():
    small, _ = activations_of(8_192, 2**18)
    large, largest = activations_of(131_072, 2**18)
    assert large <= 1.1 * small
    assert largest <= 131_072 * 16  # the gradient of the head; all logits would be 75 times as much


class NumLogits(TorchDispatchMode):
    """How many logits are computed while it is entered."""

    def __init__(self, vocabulary):
        super().__init__()
        self._vocabulary, self.num = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.out and made.shape[-1] == self._vocabulary:
            self.num += made.numel()
        return made


@pytest.mark.parametrize(("chunk", "num_again"), [(64, 240), (304, 0)])
def test_the_logits_that_are_held_last_are_not_computed_again_but_by_a_second_backward_pass(chunk, num_again):
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(num, 8, generator=generator).requires_grad_() for num in (300, 61))
    targets = torch.randint(0, 61, (300,), generator=generator)
    gradients = []
    with NumLogits(61) as forward:
        logprobs, entropies = head_logprobs(hidden, weight, None, targets, temperature=0.7, max_logits=chunk * 61)
    for expected in (num_again, 304):
        with NumLogits(61) as backward:
            gradients.append(torch.autograd.grad((logprobs + entropies).sum(), [hidden, weight], retain_graph=True))
        assert backward.num == expected * 61
    assert forward.num == 304 * 61  # filled up to a multiple of 16
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
