"""One trainer of ours for `training.py`: an update of the given rollouts for each line on standard input.

Arguments: the model directory, the rollouts (JSON), the most tokens of a micro-batch, and "again" where activations are
computed again in the backward pass, "disk" where the moments lie in a file. Prints one JSON object a line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import torch
from training_memory import Memory

from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Aggregation
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.batch import Row, TokenBatch, pack_rows


def batch_of(path: Path) -> TokenBatch:
    rows = [
        Row(
            ids=rollout["prompt"] + rollout["completion"],
            loss_mask=[False] * len(rollout["prompt"]) + [True] * len(rollout["completion"]),
            advantages=torch.full((len(rollout["prompt"]) + len(rollout["completion"]),), rollout["advantage"]),
            sampled_logprobs=[0.0] * (len(rollout["prompt"]) + len(rollout["completion"])),
            group=rollout["group"],
        )
        for rollout in json.loads(path.read_text())
    ]
    return pack_rows(rows, aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)


async def main() -> None:
    model, rollouts, max_tokens = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    computes_again = "again" in sys.argv[4:]
    torch.set_num_threads(2)
    memory = Memory()
    config = TrainerConfig(
        precision="bfloat16",
        max_tokens_per_microbatch=max_tokens,
        activation_checkpointing=computes_again,
        max_logits=2**22 if computes_again else 2**28,
        optimizer=OptimizerConfig(lr=1e-6, grad_clip=1e6, moments="disk" if "disk" in sys.argv[4:] else "memory"),
    )
    trainer, method, batch = Trainer.from_directory(model, config), GRPO(), batch_of(rollouts)
    loop = asyncio.get_running_loop()
    print(json.dumps({"ready": True}), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        memory.begin()
        report = await trainer.update(batch, method.token_loss, method.token_statistics)
        print(json.dumps({**memory.end(), "grad_norm": report.grad_norm}), flush=True)
    await trainer.close()


if __name__ == "__main__":
    asyncio.run(main())
