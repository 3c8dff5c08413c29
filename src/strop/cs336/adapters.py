"""The functions that the course's own tests call, under the names and signatures of its `tests/adapters.py`.

Replace the file with `from strop.cs336.adapters import *`.
"""

from __future__ import annotations

from torch import Tensor

from strop import cs336

run_tokenize_prompt_and_output = cs336.tokenize_prompt_and_output
run_compute_entropy = cs336.compute_entropy
run_get_response_log_probs = cs336.get_response_log_probs
run_sft_microbatch_train_step = cs336.sft_microbatch_train_step
run_compute_group_normalized_rewards = cs336.compute_group_normalized_rewards
run_compute_naive_policy_gradient_loss = cs336.compute_naive_policy_gradient_loss
run_compute_grpo_clip_loss = cs336.compute_grpo_clip_loss
run_compute_policy_gradient_loss = cs336.compute_policy_gradient_loss
run_masked_mean = cs336.masked_mean
run_grpo_microbatch_train_step = cs336.grpo_microbatch_train_step
get_packed_sft_dataset = cs336.get_packed_sft_dataset
run_iterate_batches = cs336.iterate_batches
run_parse_mmlu_response = cs336.parse_mmlu_response
run_parse_gsm8k_response = cs336.parse_gsm8k_response
run_compute_per_instance_dpo_loss = cs336.compute_per_instance_dpo_loss


def run_masked_normalize(tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0) -> Tensor:
    """As `strop.cs336.masked_normalize`, whose arguments have the hand-out's order."""
    return cs336.masked_normalize(tensor, mask, normalize_constant, dim=dim)


__all__ = [name for name in globals() if name.startswith(("run_", "get_"))]
