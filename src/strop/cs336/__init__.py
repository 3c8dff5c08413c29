"""The functions of CS336 assignment 5 (Stanford's hand-out) under its names, for students and their tests.

Arguments and return values are those of the hand-out, so an adapter is one import; `docs/guides/cs336.md` shows how.
"""

from strop.cs336.evaluation import evaluate_vllm, init_vllm, load_policy_into_vllm_instance, log_generations
from strop.cs336.supplement import (
    PackedSFTDataset,
    compute_per_instance_dpo_loss,
    get_packed_sft_dataset,
    iterate_batches,
    parse_gsm8k_response,
    parse_mmlu_response,
)
from strop.cs336.training import (
    compute_entropy,
    compute_group_normalized_rewards,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    get_response_log_probs,
    grpo_microbatch_train_step,
    load_prompt,
    masked_mean,
    masked_normalize,
    sft_microbatch_train_step,
    tokenize_prompt_and_output,
)
from strop.rewards.r1_zero import question_only_reward_fn, r1_zero_reward_fn

__all__ = [
    "PackedSFTDataset",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_per_instance_dpo_loss",
    "compute_policy_gradient_loss",
    "evaluate_vllm",
    "get_packed_sft_dataset",
    "get_response_log_probs",
    "grpo_microbatch_train_step",
    "init_vllm",
    "iterate_batches",
    "load_policy_into_vllm_instance",
    "load_prompt",
    "log_generations",
    "masked_mean",
    "masked_normalize",
    "parse_gsm8k_response",
    "parse_mmlu_response",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
    "sft_microbatch_train_step",
    "tokenize_prompt_and_output",
]
