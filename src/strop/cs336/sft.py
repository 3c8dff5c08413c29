"""Section 4 of the assignment: from texts to tokens and a mask, from a model to log-probs, from log-probs to gradients.

And what other sections share: means over a mask, and the prompts, byte for byte.
"""

from __future__ import annotations

from importlib.resources import files

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from strop.errors import ConfigError


def tokenize_prompt_and_output(
    prompt_strs: list[str], output_strs: list[str], tokenizer: transformers.PreTrainedTokenizerBase
) -> dict[str, Tensor]:
    """Rows of separately tokenized prompt and output, padded on the right (whatever `padding_side` says), and their mask.

    The prompt begins as the tokenizer begins a text (Llama's with BOS); nothing is added after it or after an output. Padding
    is the tokenizer's padding token, else its EOS; only `response_mask` distinguishes it from text.

    Returns:
        Three tensors (B, T - 1), T the length of the longest row: `input_ids`, int64, without the last column; `labels`, int64,
        without the first; `response_mask`, bool, True where the label is a token of the output.

    Raises:
        ValueError: the numbers of prompts and outputs differ, or there is no prompt.
    """
    if len(prompt_strs) != len(output_strs) or not prompt_strs:
        raise ValueError(f"{len(prompt_strs)} prompts and {len(output_strs)} outputs: give one output for each prompt.")
    prompts = [encode_beginning(tokenizer, text) for text in prompt_strs]
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in output_strs]
    padding = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
    length = max(len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True))
    ids = torch.full((len(prompts), length), padding)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        end = len(prompt) + len(output)
        ids[row, :end] = torch.tensor(prompt + output)
        mask[row, len(prompt) : end] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def encode_beginning(tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text that is continued: with the tokenizer's initial tokens, without a final EOS."""
    ids: list[int] = tokenizer.encode(text)
    own: list[int] = tokenizer.encode(text, add_special_tokens=False)
    adds_eos = ids[-1:] == [tokenizer.eos_token_id] and ids[-len(own) :] != own
    return ids[:-1] if adds_eos else ids


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy of each next-token distribution, Eq. 1, in nats: (..., V) -> (...). A logit of -inf is a probability of 0.

    16-bit logits are converted to float32.
    """
    distribution = _full_precision(logits).log_softmax(-1)
    terms = distribution.exp() * torch.where(distribution.isneginf(), 0.0, distribution)
    return -terms.sum(-1)


def get_response_log_probs(
    model: transformers.PreTrainedModel, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """Log-prob of each label given the ids up to its place, Eq. 2; prompt and padding are not masked.

    Padding must be on the right, as from `tokenize_prompt_and_output`, where no token attends to it. Padding on the left would
    be read as the first words of the row.

    `strop.training.logprobs.token_logprobs` computes the same without holding all logits; it needs a model of `transformers`.

    Args:
        model: anything whose call returns `.logits` (B, T, V); the caller decides on grad mode and autocast.
        input_ids: int64 (B, T).
        labels: int64 (B, T).
        return_token_entropy: also return the entropy of each distribution.

    Returns:
        `log_probs`, and `token_entropy` if requested: (B, T), nats, at least float32; gradients flow through both.
    """
    logits = model(input_ids).logits
    nats = F.cross_entropy(_full_precision(logits).flatten(0, 1), labels.flatten(), reduction="none")
    result = {"log_probs": -nats.view_as(labels)}
    if return_token_entropy:
        result["token_entropy"] = compute_entropy(logits)
    return result


def sft_microbatch_train_step(
    policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int, normalize_constant: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add the gradients of one micro-batch: minus the log-prob of each response, summed over its tokens, averaged over rows.

    Args:
        policy_log_probs: (B, T), nats; carries the gradient.
        response_mask: (B, T).
        gradient_accumulation_steps: micro-batches in an update, by which the loss is divided.
        normalize_constant: divides each row's sum.

    Returns:
        The scalar that was differentiated, detached; `mean_nll` is the mean per response token, in nats (NaN without any).
    """
    of_row = masked_normalize(policy_log_probs, response_mask, normalize_constant, dim=-1)
    loss = -of_row.mean() / gradient_accumulation_steps
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {"mean_nll": -masked_mean(policy_log_probs.detach(), response_mask)}


def _full_precision(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


# Means and sums over the tokens of a mask. Values outside the mask may be NaN or infinite.


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over `dim` of the elements where `mask` is 1; NaN if there are none.

    Args:
        tensor: any shape.
        mask: of the same shape, or one that broadcasts to it; bool or 0 and 1.
        dim: None for all dimensions, which gives a scalar.
    """
    mask = mask.bool().expand_as(tensor)
    return _sum(torch.where(mask, tensor, 0), dim) / _sum(mask, dim)


def masked_normalize(tensor: Tensor, mask: Tensor, normalize_constant: float, dim: int | None = None) -> Tensor:
    """Sum over `dim` of the elements where `mask` is 1, divided by a constant; 0 if there are none. Arguments as above."""
    return _sum(torch.where(mask.bool().expand_as(tensor), tensor, 0), dim) / normalize_constant


def _sum(tensor: Tensor, dim: int | None) -> Tensor:
    return tensor.sum() if dim is None else tensor.sum(dim)


PROMPTS = {
    "r1_zero": "DeepSeek-R1 (arXiv 2501.12948), Table 1, in the words of CS336 assignment 5, section 3; ends with an open tag.",
    "question_only": "CS336 assignment 5, section 8; Dr. GRPO (arXiv 2503.20783) has it as 'no template'.",
    "alpaca_sft": "Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca), as the supplement of CS336 assignment 5 has it.",
    "zero_shot_system_prompt": "The supplement of CS336 assignment 5, section 2, after URIAL (arXiv 2312.01552).",
}
"""The prompts that `load_prompt` knows, with their sources."""


def load_prompt(name: str) -> str:
    """The template; fill its fields (`{question}`, or `{instruction}` and `{response}`) with `str.format`.

    Raises:
        ConfigError: there is no such prompt.
    """
    if name not in PROMPTS:
        raise ConfigError(f"prompt {name!r}: no such prompt. Those of the assignment are {', '.join(PROMPTS)}.")
    return (files("strop.rollout") / "prompts" / f"{name}.prompt").read_text(encoding="utf-8")
