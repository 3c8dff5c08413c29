"""The hand-out's functions under its names, with its arguments in its order: what an adapter or a notebook relies on."""

import inspect

import pytest

from strop import cs336

ARGUMENTS = {
    "tokenize_prompt_and_output": "prompt_strs, output_strs, tokenizer",
    "compute_entropy": "logits",
    "get_response_log_probs": "model, input_ids, labels, return_token_entropy=False",
    "masked_normalize": "tensor, mask, normalize_constant, dim=None",
    "sft_microbatch_train_step": "policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0",
    "init_vllm": "model_id, device, seed, gpu_memory_utilization=0.85",
    "load_policy_into_vllm_instance": "policy, llm",
    "evaluate_vllm": "vllm_model, reward_fn, prompts, eval_sampling_params",
    "compute_group_normalized_rewards": "reward_fn, rollout_responses, repeated_ground_truths, group_size, advantage_eps,"
    " normalize_by_std",
    "compute_naive_policy_gradient_loss": "raw_rewards_or_advantages, policy_log_probs",
    "compute_grpo_clip_loss": "advantages, policy_log_probs, old_log_probs, cliprange",
    "compute_policy_gradient_loss": "policy_log_probs, loss_type, raw_rewards=None, advantages=None, old_log_probs=None,"
    " cliprange=None",
    "masked_mean": "tensor, mask, dim=None",
    "grpo_microbatch_train_step": "policy_log_probs, response_mask, gradient_accumulation_steps, loss_type, raw_rewards=None,"
    " advantages=None, old_log_probs=None, cliprange=None",
    "r1_zero_reward_fn": "response, ground_truth, fast=True",
    "question_only_reward_fn": "response, ground_truth, fast=True",
}


def written(parameter):
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default}"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_function_takes_the_arguments_of_the_hand_out_in_its_order(name):
    expected = ARGUMENTS[name].split(", ")
    parameters = list(inspect.signature(getattr(cs336, name)).parameters.values())
    assert [written(parameter) for parameter in parameters][: len(expected)] == expected
