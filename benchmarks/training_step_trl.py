"""TRL's side of `training_step.py`: a whole GRPO step for each line on standard input.

Runs in an environment of its own, which has no strop. Arguments: the model directory, the workload (JSON), the rows of a
micro-batch, "float32" or "bfloat16" for matrix products, and "again" where activations are computed again in the backward pass;
weights are float32. Prints one JSON object a line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from training_memory import Memory
from training_step_reward import share_of_even_ids
from training_trl import OnDemand
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    model_directory, micro_batch, precision = Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4]
    workload = json.loads(Path(sys.argv[2]).read_text())
    prompts, size, length = workload["prompts"], workload["group_size"], workload["completion_tokens"]
    torch.set_num_threads(2)
    memory = Memory()
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="sdpa")
    num_micro_batches = len(prompts) * size // micro_batch
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=num_micro_batches,
            steps_per_generation=num_micro_batches,  # every rollout of a step in one call of generate()
            num_generations=size,
            max_completion_length=length,
            generation_kwargs={"min_new_tokens": length},
            temperature=1.0,
            top_k=0,
            max_steps=1_000,
            learning_rate=1e-6,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="dapo",  # a token mean over the whole batch
            epsilon=0.2,
            epsilon_high=0.28,
            bf16=precision == "bfloat16",
            gradient_checkpointing=sys.argv[5:] == ["again"],
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(model_directory),
            reward_funcs=lambda completion_ids, **_: [share_of_even_ids(ids) for ids in completion_ids],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            callbacks=[OnDemand(memory)],
        )
        print(json.dumps({"ready": True}), flush=True)
        trainer.train()


if __name__ == "__main__":
    main()
