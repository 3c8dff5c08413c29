"""Measures what an option of the trainer saves: the peak memory and the time of one update, and the products that it counts.

    python benchmarks/training_options.py

Each setting runs in a process of its own, on one random Llama of 21 M parameters. The rollouts are groups of eight that share a
prompt of 128 tokens, of mixed length up to 512. Products are those of
matrices outside the attention kernel, as counted by torch.
Prints a table and writes benchmarks/results/training_options.json.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from training_memory import Memory
from transformers import LlamaConfig, LlamaForCausalLM

from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Aggregation
from strop.run_directory import write_json
from strop.training import Trainer, TrainerConfig
from strop.training.batch import Row, TokenBatch, pack_rows

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python benchmarks/training_options.py"
RESULT = ROOT / "benchmarks" / "results" / "training_options.json"
NUM_GROUPS, GROUP_SIZE, PROMPT, LONGEST = 2, 8, 128, 512
SETTINGS: dict[str, dict[str, object]] = {
    "padded": {"packing": False},
    "packed": {},
    "packed, activations again": {"activation_checkpointing": True},
    "packed, again, moments on disk": {"activation_checkpointing": True, "optimizer": {"moments": "disk"}},
}
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def make_batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for group in range(NUM_GROUPS):
        prompt = torch.randint(0, MODEL["vocab_size"], (PROMPT,), generator=generator).tolist()
        for _ in range(GROUP_SIZE):
            length = int(torch.randint(16, LONGEST - PROMPT + 1, (), generator=generator))
            completion = torch.randint(0, MODEL["vocab_size"], (length,), generator=generator).tolist()
            rows.append(
                Row(
                    ids=prompt + completion,
                    loss_mask=[False] * PROMPT + [True] * length,
                    advantages=torch.full((PROMPT + length,), float(torch.randn((), generator=generator))),
                    sampled_logprobs=[0.0] * (PROMPT + length),
                    group=group,
                )
            )
    return pack_rows(rows, aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)


async def measure(model: Path, name: str) -> dict[str, float]:
    torch.set_num_threads(2)
    memory = Memory()
    settings = TrainerConfig.model_validate({"precision": "bfloat16", "max_tokens_per_microbatch": 4096, **SETTINGS[name]})
    trainer, batch, method = Trainer.from_directory(model, settings), make_batch(), GRPO()
    memory.begin()
    await trainer.update(batch, method.token_loss, method.token_statistics)
    figures = memory.end()
    for _ in range(4):  # of the quickest; the peak is that of the first
        memory.begin()
        await trainer.update(batch, method.token_loss, method.token_statistics)
        figures["update_s"] = min(figures["update_s"], memory.end()["update_s"])
    with FlopCounterMode(display=False) as counter:  # counts in its own thread alone
        trainer.learner.update(batch, method.token_loss, method.token_statistics)
    await trainer.close()
    figures["trained_tokens_per_s"] = batch.num_loss_tokens / figures["update_s"]
    return figures | {"matmul_tflop": counter.get_total_flops() / 1e12}


def main() -> None:
    if len(sys.argv) > 2:
        print(json.dumps(asyncio.run(measure(Path(sys.argv[1]), sys.argv[2]))))
        return
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(directory)
        for name in SETTINGS:
            done = subprocess.run([sys.executable, __file__, directory, name], capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            results[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"{name:32}" + "".join(f"  {key} {value:10.3f}" for key, value in results[name].items()), flush=True)
    bars = bars_of(results)
    for name, bar in bars.items():
        print(f"{name}: {bar['value']:.2f}, must be {bar['bar']}: {'holds' if bar['holds'] else 'does not hold'}")
    write_json(RESULT, {"command": COMMAND, "bars": bars, "torch": torch.__version__, "threads": 2, "settings": results})


def bars_of(results: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, object]]:
    """Each option saves what it is there for, against the setting before it."""
    padded, packed, again, on_disk = results.values()
    shares = {
        "products_packed_of_padded": packed["matmul_tflop"] / padded["matmul_tflop"],
        "memory_again_of_packed": again["peak_above_idle_mib"] / packed["peak_above_idle_mib"],
        "memory_on_disk_of_again": on_disk["peak_above_idle_mib"] / again["peak_above_idle_mib"],
    }
    return {name: {"value": share, "bar": "< 0.9", "holds": share < 0.9} for name, share in shares.items()}


if __name__ == "__main__":
    main()
