"""One trainer of TRL for `training.py`: an update of the given rollouts for each line on standard input.

Runs in an environment of its own, which has no strop. Arguments: the model directory, the rollouts (JSON), the rows of a
micro-batch, "float32" or "bfloat16" for the weights (matrix products are in bfloat16 with both), and "again" where activations
are computed again in the backward pass. Prints one JSON object a line. Rollouts are given to TRL where it would have sampled
them, padded as it pads: all prompts to the longest, all completions to the longest; splitting, loss and optimizer are its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from training_memory import Memory
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PAD = 0


class OnDemand(TrainerCallback):  # type: ignore[misc]
    """One update for each line that is read."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.grad_norm: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        self.memory.begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradients = [parameter.grad for parameter in kwargs["model"].parameters() if parameter.grad is not None]
        self.grad_norm = torch.nn.utils.get_total_norm(gradients).item()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(json.dumps({**self.memory.end(), "grad_norm": self.grad_norm}), flush=True)


class GivenRollouts(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with rollouts that are there already."""

    rollouts: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        prompts = [torch.tensor(rollout["prompt"]) for rollout in self.rollouts]
        completions = [torch.tensor(rollout["completion"]) for rollout in self.rollouts]
        prompt_ids, prompt_mask = _pad(prompts, left=True)
        completion_ids, completion_mask = _pad(completions, left=False)
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": torch.tensor([rollout["advantage"] for rollout in self.rollouts]),
            "num_items_in_batch": completion_mask.sum(),
        }


def _pad(rows: list[torch.Tensor], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    side = "left" if left else "right"
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side=side)
    ones = [torch.ones_like(row) for row in rows]
    return ids, torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_value=0, padding_side=side)


def main() -> None:
    model_directory, micro_batch, weights = Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4]
    rollouts = json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(2)
    memory = Memory()
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=getattr(torch, weights), attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=len(rollouts) // micro_batch,
            num_generations=8,
            max_steps=1_000,
            learning_rate=1e-6,
            max_grad_norm=1e6,  # it is asked for after clipping, and is to be compared
            beta=0.0,
            loss_type="dapo",  # a token mean over the whole batch
            epsilon=0.2,
            epsilon_high=0.28,
            bf16=True,
            gradient_checkpointing=sys.argv[5:] == ["again"],
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GivenRollouts(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(model_directory),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "unused"}] * len(rollouts)),
            callbacks=[OnDemand(memory)],
        )
        trainer.rollouts = rollouts
        print(json.dumps({"ready": True}), flush=True)
        trainer.train()


if __name__ == "__main__":
    main()
