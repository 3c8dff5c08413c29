"""Our side of `training_step.py`: a whole GRPO step for each line on standard input.

Arguments: the model directory, the workload (JSON), the most tokens of a micro-batch, the precision. Prints one JSON
object a line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from training_memory import Memory
from training_step_reward import share_of_even_ids
from transformers import AutoTokenizer

from strop.algorithms.grpo import GRPO, group_normalized_advantages
from strop.algorithms.losses import Aggregation
from strop.engine.config import EngineConfig
from strop.engine.protocol import CompletionRequest
from strop.engine.torch.engine import TorchEngine
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.batch import Row, TokenBatch, pack_rows
from strop.types import Completion


async def roll_out(
    engine: TorchEngine, prompts: list[list[int]], workload: dict[str, Any], step: int
) -> list[list[Completion]]:
    """A group of completions for each prompt, all at once."""
    size, length = workload["group_size"], workload["completion_tokens"]

    async def complete(name: str, ids: list[int], seed: int) -> Completion:
        request = CompletionRequest(
            id=name, ids=tuple(ids), max_tokens=length, stop_ids=frozenset(), temperature=1.0, seed=seed
        )
        completion = await engine.complete(request)
        await engine.release(name)
        return completion

    flat = await asyncio.gather(
        *(
            complete(f"{step}/{number}/{member}", ids, 1_000_000 * step + 1000 * number + member)
            for number, ids in enumerate(prompts)
            for member in range(size)
        )
    )
    return [list(flat[start : start + size]) for start in range(0, len(flat), size)]


def batch_of(prompts: list[list[int]], groups: list[list[Completion]]) -> TokenBatch:
    rows = []
    for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        rewards = [share_of_even_ids(completion.ids) for completion in group]
        for completion, advantage in zip(group, group_normalized_advantages(rewards, eps=1e-4), strict=True):
            num_all = len(prompt) + len(completion.ids)
            rows.append(
                Row(
                    ids=[*prompt, *completion.ids],
                    loss_mask=[False] * len(prompt) + [True] * len(completion.ids),
                    advantages=torch.full((num_all,), advantage),
                    sampled_logprobs=[0.0] * len(prompt) + list(completion.logprobs),
                    group=number,
                )
            )
    return pack_rows(rows, aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)


async def main() -> None:
    model, max_tokens, precision = Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4]
    workload = json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(2)
    memory = Memory()
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(text)["input_ids"] for text in workload["prompts"]]
    num_columns = max(map(len, prompts)) + workload["completion_tokens"]
    sizes = EngineConfig(slots=64, max_length=num_columns, dtype=precision, device="cpu")  # type: ignore[arg-type]
    engine = TorchEngine.from_directory(model, sizes)
    config = TrainerConfig(
        precision=precision,  # type: ignore[arg-type]
        max_tokens_per_microbatch=max_tokens,
        max_logits=2**27 if precision == "bfloat16" else 2**25,  # all of two groups; in float32 the default
        optimizer=OptimizerConfig(lr=1e-6, grad_clip=1.0),
    )
    trainer, method = Trainer.from_directory(model, config), GRPO()
    loop, step = asyncio.get_running_loop(), 0
    print(json.dumps({"ready": True}), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        step += 1
        memory.begin()
        groups = await roll_out(engine, prompts, workload, step)
        await engine.sleep()
        rolled_s = memory.end()["update_s"]
        report = await trainer.update(batch_of(prompts, groups), method.token_loss, method.token_statistics)
        await trainer.publish(engine, version=step)
        print(json.dumps({**memory.end(), "rollout_s": rolled_s, "grad_norm": report.grad_norm}), flush=True)
    await trainer.close()
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
