"""Sections 4 and 7 of the assignment: tokens, advantages, losses and gradients; and the prompts of all its sections."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.resources import files
from statistics import fmean
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from strop.algorithms.grpo import group_normalized_advantages, mean_centered_advantages
from strop.algorithms.losses import clip_token_loss, no_clip_token_loss, probability_ratio
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

    `strop.training.logprobs.LogprobModule` computes the same without holding all logits; it needs a model of `transformers`.

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


logger = logging.getLogger(__name__)

RewardFunction: TypeAlias = Callable[[str, str], Mapping[str, float]]
"""(response, ground truth) -> `reward`, `format_reward`, `answer_reward`; see `r1_zero_reward_fn`."""

LossType: TypeAlias = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"]
"""The losses of `compute_policy_gradient_loss`; the last is the ablation of section 8."""


def compute_group_normalized_rewards(
    reward_fn: RewardFunction,
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages of rollouts against the others of their group: Eq. 28, or Eq. 31 without `normalize_by_std`.

    The std is the unbiased one; groups whose rewards are all equal get exact zeros. Computed in float64.

    Args:
        reward_fn: called once for each response, in order.
        rollout_responses: groups one after the other.
        repeated_ground_truths: one for each response.
        group_size: responses to one question.
        advantage_eps: added to the std.
        normalize_by_std: divide by it.

    Returns:
        Advantages and raw rewards, float32 (N,), and over all responses `reward_mean`, `reward_std` (unbiased), `reward_min`,
        `reward_max` and the means of the other parts, as in `format_reward_mean`.

    Raises:
        ValueError: the numbers of responses and truths differ, they are not a whole number of groups, or a group has one
            response with `normalize_by_std`: it has no std. Without it its advantage is 0, and a warning is logged.
    """
    if len(rollout_responses) != len(repeated_ground_truths):
        raise ValueError(
            f"{len(rollout_responses)} responses and {len(repeated_ground_truths)} ground truths: give one truth for each"
            " response, group_size times the same."
        )
    if group_size < 1 or not rollout_responses or len(rollout_responses) % group_size:
        raise ValueError(f"{len(rollout_responses)} responses are not a whole number of groups of {group_size}.")
    if group_size == 1:
        logger.warning("a group of one response has advantage 0: nothing is learnt from it")
    if group_size == 1 and normalize_by_std:
        raise ValueError("group_size is 1: one reward has no standard deviation. Set normalize_by_std = False, or sample more.")
    judged = [reward_fn(response, truth) for response, truth in zip(rollout_responses, repeated_ground_truths, strict=True)]
    rewards = [float(parts["reward"]) for parts in judged]
    advantages: list[float] = []
    for first in range(0, len(rewards), group_size):
        group = rewards[first : first + group_size]
        if normalize_by_std:
            advantages += group_normalized_advantages(group, eps=advantage_eps)
        else:
            advantages += mean_centered_advantages(group) if group_size > 1 else [0.0]
    raw = torch.tensor(rewards)
    metadata = {f"{name}_mean": fmean(float(parts[name]) for parts in judged) for name in judged[0]}
    if len(rewards) > 1:
        metadata["reward_std"] = float(raw.double().std())
    metadata |= {"reward_min": min(rewards), "reward_max": max(rewards)}
    return torch.tensor(advantages), raw, metadata


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """-A log π of each token, Eq. 32: (B, 1) and (B, T) -> (B, T). Raises `ValueError` for other shapes."""
    _check_column("raw_rewards_or_advantages", raw_rewards_or_advantages, policy_log_probs)
    return -raw_rewards_or_advantages * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ratio A, clip(ratio, 1 - ε, 1 + ε) A) of each token, Eq. 33.

    Args:
        advantages: (B, 1).
        policy_log_probs: (B, T), nats; carries the gradient.
        old_log_probs: (B, T), nats; no gradient flows to them.
        cliprange: ε.

    Returns:
        The loss (B, T); and without gradient `is_clipped`, bool (B, T), True where the clipped term is the smaller one, and
        `ratio`, (B, T).

    Raises:
        ValueError: advantages of another shape.
    """
    _check_column("advantages", advantages, policy_log_probs)
    everywhere = torch.ones_like(policy_log_probs, dtype=torch.bool)
    ratio = probability_ratio(policy_log_probs, old_log_probs.detach(), everywhere)
    loss = clip_token_loss(ratio, advantages, everywhere, clip_low=cliprange, clip_high=cliprange)
    return loss, {"is_clipped": loss > -ratio * advantages, "ratio": ratio.detach()}


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The named loss of each token, (B, T), and its statistics.

    Args:
        policy_log_probs: (B, T), nats; carries the gradient.
        loss_type: `no_baseline` and `reinforce_with_baseline` are Eq. 32 of rewards and of advantages, `grpo_clip` is Eq. 33,
            `grpo_no_clip` Eq. 34: -ratio A.
        raw_rewards: (B, 1); for `no_baseline`.
        advantages: (B, 1); for the others.
        old_log_probs: (B, T); for the last two.
        cliprange: for `grpo_clip`.

    Raises:
        ValueError: there is no such loss, or an argument that it needs is missing.
    """

    def need(name: str, value: Tensor | None) -> Tensor:
        if value is None:
            raise ValueError(f"loss_type {loss_type!r} needs {name}, which is None.")
        return value

    match loss_type:
        case "no_baseline":
            return compute_naive_policy_gradient_loss(need("raw_rewards", raw_rewards), policy_log_probs), {}
        case "reinforce_with_baseline":
            return compute_naive_policy_gradient_loss(need("advantages", advantages), policy_log_probs), {}
        case "grpo_clip":
            if cliprange is None:
                raise ValueError(f"loss_type {loss_type!r} needs cliprange, which is None.")
            column, old = need("advantages", advantages), need("old_log_probs", old_log_probs)
            return compute_grpo_clip_loss(column, policy_log_probs, old, cliprange)
        case "grpo_no_clip":
            column = need("advantages", advantages)
            _check_column("advantages", column, policy_log_probs)
            everywhere = torch.ones_like(policy_log_probs, dtype=torch.bool)
            ratio = probability_ratio(policy_log_probs, need("old_log_probs", old_log_probs).detach(), everywhere)
            return no_clip_token_loss(ratio, column, everywhere), {"ratio": ratio.detach()}
    raise ValueError(f"loss_type {loss_type!r}: no such loss. There are {', '.join(get_args(LossType))}.")


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    normalize_constant: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add the gradients of one micro-batch: the loss of each row's tokens, averaged; then averaged over rows.

    Rows without a response token have no mean and are left out of the mean over rows; with `normalize_constant` they count
    as 0. A micro-batch of such rows adds zero gradients. Log-probs where the mask is 0 may be NaN.

    Args:
        response_mask: (B, T).
        gradient_accumulation_steps: micro-batches in an update, by which the loss is divided.
        normalize_constant: divide each row's sum by this instead of by its number of tokens (section 8; Dr. GRPO).
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange: as `compute_policy_gradient_loss`.

    Returns:
        The scalar that was differentiated, detached; `ratio_mean` if the loss has a ratio and `clip_fraction` if it clips, over
        response tokens (NaN without any).
    """
    mask = response_mask.bool()
    # Mask before exp: a mask after it would still pass NaN into the gradient of padded positions.
    policy_log_probs = torch.where(mask, policy_log_probs, 0.0)
    old_log_probs = None if old_log_probs is None else torch.where(mask, old_log_probs, 0.0)
    token_loss, statistics = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    rows = mask.any(-1)
    if normalize_constant is None:
        of_rows = masked_mean(token_loss[rows], mask[rows], dim=-1).sum() / rows.sum().clamp(min=1)
    else:
        of_rows = masked_normalize(token_loss, mask, normalize_constant, dim=-1).mean()
    loss = of_rows / gradient_accumulation_steps
    loss.backward()  # type: ignore[no-untyped-call]
    names = {"is_clipped": "clip_fraction", "ratio": "ratio_mean"}
    return loss.detach(), {names[name]: masked_mean(values.float(), mask) for name, values in statistics.items()}


def _check_column(name: str, column: Tensor, policy_log_probs: Tensor) -> None:
    """A vector (B,) would broadcast along the wrong dimension, silently if B equals T."""
    expected = (policy_log_probs.shape[0], 1)
    if tuple(column.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(column.shape)}; it must be {expected}: one for each row. Try unsqueeze(-1).")
