"""Sections 3 and 4 of the assignment: sample responses with an engine, judge them, and write responses and metrics."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol
from unittest import mock

import torch
import transformers

from strop.cs336.training import RewardFunction, get_response_log_probs, masked_mean, tokenize_prompt_and_output
from strop.engine.model_directory import directory_checksum
from strop.engine.servers.vllm import EXTENSION, EXTENSION_CLASS, TRANSFER
from strop.errors import WeightsNotProven
from strop.run_directory import write_text


class Generator(Protocol):
    """As `vllm.LLM`."""

    def generate(self, prompts: list[str], sampling_params: Any) -> Sequence[Any]:
        """One `vllm.RequestOutput` for each prompt, in order: its `outputs` have the `text` of each completion."""


def init_vllm(model_id: str, device: str, seed: int, gpu_memory_utilization: float = 0.85, **options: Any) -> Any:
    """Open a `vllm.LLM` on a device of its own, for `load_policy_into_vllm_instance`. It needs vLLM in this environment.

    The engine runs in a process of its own, which sees no other device, so nothing of vLLM has to be patched.

    Args:
        model_id: a model directory, or a name on the hub.
        device: as in "cuda:1", the second of the devices that this process sees; "cpu" for vLLM's CPU build.
        seed: of the sampler.
        gpu_memory_utilization: share of the device's memory that vLLM takes; of the machine's on a CPU.
        options: of `vllm.LLM`, as in `enforce_eager=True`.
    """
    from vllm import LLM  # an environment without it can do all but this

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else []
    kind, _, index = device.partition(":")
    number = int(index or 0)
    sees = {} if kind == "cpu" else {"CUDA_VISIBLE_DEVICES": devices[number] if devices else str(number)}
    sys.path.insert(0, str(EXTENSION))  # which the engine's process inherits
    with mock.patch.dict(os.environ, sees):
        return LLM(
            model=model_id,
            dtype="bfloat16",
            enable_prefix_caching=True,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
            worker_extension_cls=EXTENSION_CLASS,
            weight_transfer_config=TRANSFER,
            **options,
        )


def load_policy_into_vllm_instance(policy: transformers.PreTrainedModel, llm: Any) -> None:
    """Replace the weights of an engine of `init_vllm` by the policy's, and drop what it cached with the older ones.

    Raises:
        WeightsNotProven: the engine lacks a weight, or computes with another value.
    """
    with tempfile.TemporaryDirectory() as directory:
        policy.save_pretrained(directory)
        files = {"directory": directory, "checksum": directory_checksum(Path(directory))}
        llm.start_weight_update()
        try:
            llm.update_weights({"update_info": files})
        except Exception as error:
            raise WeightsNotProven(f"vLLM does not hold the policy's weights: {error}") from error
        llm.finish_weight_update()
    llm.reset_prefix_cache()


def evaluate_vllm(
    vllm_model: Generator,
    reward_fn: RewardFunction,
    prompts: list[str],
    eval_sampling_params: Any,
    ground_truths: list[str],
    output_path: str | Path | None = None,
) -> dict[str, float]:
    """Sample completions for each prompt, judge them, and write them to a file.

    The hand-out's signature, with the ground truths and the output file that it leaves out.

    Args:
        vllm_model: a `vllm.LLM`, or anything with its `generate`.
        reward_fn: gives `reward`, `format_reward` and `answer_reward`.
        prompts: as the model reads them.
        eval_sampling_params: passed to `generate`; a prompt with several completions counts with each.
        ground_truths: one for each prompt.
        output_path: one JSON object per line: `prompt`, `response`, `ground_truth` and the rewards. Replaces the file.

    Returns:
        The mean of each reward, `num_responses`, and counts: `num_correct` (format and answer right), `num_formatted_wrong`
        (only the format) and `num_unformatted` (neither).

    Raises:
        ValueError: the numbers of prompts, truths and answers differ, or there is no prompt.
    """
    rows = _sample(vllm_model, reward_fn, prompts, ground_truths, eval_sampling_params)
    _write(output_path, rows)
    return _metrics(rows)


def log_generations(
    vllm_model: Generator,
    policy: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    reward_fn: RewardFunction,
    prompts: list[str],
    ground_truths: list[str],
    sampling_params: Any,
    output_path: str | Path | None = None,
    batch_size: int = 8,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Sample responses to some prompts during training, and report statistics of the policy.

    Args:
        vllm_model: samples; it should hold the weights of `policy`.
        policy: gives the entropy of each response token, at temperature 1; its mode (train or eval) is not changed.
        batch_size: rows of one forward of `policy`.
        tokenizer, reward_fn, prompts, ground_truths, sampling_params, output_path: as `evaluate_vllm`.

    Returns:
        One dict for each completion: `prompt`, `response`, `ground_truth`, `reward`, `format_reward`, `answer_reward`,
        `token_entropy` (mean over the response, nats; None for an empty one) and `num_tokens` of the response. And the metrics
        of `evaluate_vllm` with the mean `token_entropy` over all response tokens, and `length`, `length_correct` and
        `length_incorrect`, mean tokens of a response; a mean over no responses is left out.
    """
    rows = _sample(vllm_model, reward_fn, prompts, ground_truths, sampling_params)
    device = next(policy.parameters()).device
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        tokens = tokenize_prompt_and_output([row["prompt"] for row in part], [row["response"] for row in part], tokenizer)
        tokens = {name: column.to(device) for name, column in tokens.items()}
        with torch.no_grad():
            scored = get_response_log_probs(policy, tokens["input_ids"], tokens["labels"], return_token_entropy=True)
        entropies = masked_mean(scored["token_entropy"], tokens["response_mask"], dim=-1).tolist()
        lengths = tokens["response_mask"].sum(-1).tolist()
        for row, entropy, length in zip(part, entropies, lengths, strict=True):
            row |= {"token_entropy": entropy if length else None, "num_tokens": length}
    _write(output_path, rows)
    metrics = _metrics(rows)
    if num_tokens := sum(row["num_tokens"] for row in rows):
        nats = sum(row["token_entropy"] * row["num_tokens"] for row in rows if row["num_tokens"])
        metrics["token_entropy"] = nats / num_tokens
    kinds = {"length": rows, "length_correct": _correct(rows), "length_incorrect": _correct(rows, wanted=False)}
    metrics |= {name: fmean(row["num_tokens"] for row in kind) for name, kind in kinds.items() if kind}
    return rows, metrics


def _sample(
    model: Generator, reward_fn: RewardFunction, prompts: list[str], ground_truths: list[str], sampling_params: Any
) -> list[dict[str, Any]]:
    if len(prompts) != len(ground_truths) or not prompts:
        raise ValueError(f"{len(prompts)} prompts and {len(ground_truths)} ground truths: give one truth for each prompt.")
    answered = model.generate(prompts, sampling_params)
    if len(answered) != len(prompts):
        raise ValueError(f"the model answered {len(answered)} of {len(prompts)} prompts.")
    return [
        {"prompt": prompt, "response": one.text, "ground_truth": truth, **reward_fn(one.text, truth)}
        for prompt, truth, request in zip(prompts, ground_truths, answered, strict=True)
        for one in request.outputs
    ]


def _write(path: str | Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        write_text(Path(path), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    metrics = {name: fmean(row[name] for row in rows) for name in ("reward", "format_reward", "answer_reward")}
    num_correct, num_formatted = len(_correct(rows)), sum(row["format_reward"] == 1 for row in rows)
    return metrics | {
        "num_responses": len(rows),
        "num_correct": num_correct,
        "num_formatted_wrong": num_formatted - num_correct,
        "num_unformatted": len(rows) - num_formatted,
    }


def _correct(rows: list[dict[str, Any]], *, wanted: bool = True) -> list[dict[str, Any]]:
    return [row for row in rows if (row["format_reward"] == row["answer_reward"] == 1) is wanted]
