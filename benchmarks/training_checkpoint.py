"""How long a run waits for a checkpoint: written at once, and from a copy while training goes on.

    make bench-training-checkpoint

Trains a random Llama, saves it again and again in both ways, and prints the time that the caller waits, the time until the
checkpoint is whole, and what an update takes while one is written, beside the limit: the same bytes written to one file.
Writes results/training_checkpoint.{json,txt}.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.run_directory import write_directory, write_json, write_text
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.sft import Demonstration, Segment, pack_demonstrations, sft_token_loss, sft_token_statistics

RESULTS = Path(__file__).parent / "results" / "training_checkpoint.json"
COMMAND = "make bench-training-checkpoint"
WAIT_BAR = 0.2  # of the time that the same checkpoint takes when the run writes it itself
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 20,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
}
NUM_ROWS, ROW_TOKENS = 8, 128


async def measure(directory: Path, repeats: int) -> dict[str, Any]:
    model = directory / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(model)
    trainer = Trainer.from_directory(model, TrainerConfig(optimizer=OptimizerConfig(lr=1e-5)))
    try:
        await update(trainer)  # so that there are moments
        alone, beside, at_once, copying, in_background, bare = [], [], [], [], [], []
        for _ in range(repeats):
            alone.append(await timed(update(trainer)))
            at_once.append(await timed(write(directory / "at-once", at_once_writer(trainer))))
            started = time.perf_counter()
            snapshot = await trainer.snapshot()
            copying.append(time.perf_counter() - started)
            writing = asyncio.create_task(write(directory / "background", snapshot))
            beside.append(await timed(update(trainer)))
            await writing
            in_background.append(time.perf_counter() - started)
            bare.append(bare_write_s(directory / "bare", size_mib(directory / "background")))
        num_parameters = sum(parameter.numel() for parameter in trainer.learner.model.parameters())
    finally:
        await trainer.close()
    waits = {"at_once_s": statistics.median(at_once), "background_s": statistics.median(copying)}
    share = waits["background_s"] / waits["at_once_s"]
    return {
        "command": COMMAND,
        "bars": {"wait_of_that_at_once": {"value": share, "bar": f"<= {WAIT_BAR}", "holds": share <= WAIT_BAR}},
        "parameters": num_parameters,
        "checkpoint_mib": size_mib(directory / "background"),
        "repeats": repeats,
        "waits_for": waits | {"ratio": waits["at_once_s"] / waits["background_s"]},
        "whole_after": {"at_once_s": statistics.median(at_once), "background_s": statistics.median(in_background)},
        "update": {"alone_s": statistics.median(alone), "beside_the_writer_s": statistics.median(beside)},
        "bare_write_s": statistics.median(bare),
        "spread": {  # the quickest and the slowest of the repeats
            "at_once_s": [min(at_once), max(at_once)],
            "background_s": [min(copying), max(copying)],
            "bare_write_s": [min(bare), max(bare)],
        },
        "machine": {"system": platform.system(), "cores": psutil.cpu_count(), "torch": torch.__version__},
    }


async def update(trainer: Trainer) -> None:
    ids = torch.randint(SHAPE["vocab_size"], (NUM_ROWS, ROW_TOKENS), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [Demonstration(segments=(Segment(ids=tuple(row), is_demonstrator=True),)) for row in ids]
    await trainer.update(pack_demonstrations(rows), sft_token_loss, sft_token_statistics)


def at_once_writer(trainer: Trainer):
    loop = asyncio.get_running_loop()
    return lambda directory: asyncio.run_coroutine_threadsafe(trainer.save(directory), loop).result()


async def write(path: Path, fill) -> None:
    """As a run does it: complete or not there at all, on disk at the end."""
    await asyncio.to_thread(write_directory, path, fill)


async def timed(work) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def bare_write_s(path: Path, num_mib: float) -> float:
    """As many bytes into one file, on disk at the end: what no checkpoint can be quicker than."""
    piece = os.urandom(2**20)
    started = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(round(num_mib)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def table(found: Mapping[str, Any]) -> str:
    """What a reader wants to see first."""
    waits, whole, update, bare_s = found["waits_for"], found["whole_after"], found["update"], found["bare_write_s"]
    machine = found["machine"]
    rows = [
        f"{found['parameters'] / 1e6:.1f} M parameters, {found['checkpoint_mib']:.0f} MiB a checkpoint,"
        f" median of {found['repeats']}; {machine['cores']} cores, torch {machine['torch']}",
        f"{'':<16} {'the run waits, s':>17} {'whole after, s':>15} {'of a bare write':>16} {'an update, s':>13}",
    ]
    for name, key, update_key in (
        ("at once", "at_once_s", "alone_s"),
        ("in background", "background_s", "beside_the_writer_s"),
    ):
        rows.append(
            f"{name:<16} {waits[key]:>17.3f} {whole[key]:>15.3f} {whole[key] / bare_s:>15.1f}x {update[update_key]:>13.3f}"
        )
    rows.append(
        f"a bare write of as many bytes takes {bare_s:.3f} s; the run waits {waits['ratio']:.1f} times less in background"
    )
    bar = found["bars"]["wait_of_that_at_once"]
    rows.append(
        f"wait_of_that_at_once: {bar['value']:.3f}, must be {bar['bar']}: {'holds' if bar['holds'] else 'does not hold'}"
    )
    return "\n".join(rows)


def size_mib(directory: Path) -> float:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="on the disk that is to be measured; a temporary one by default")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        found = asyncio.run(measure(Path(directory), arguments.repeats))
    write_json(arguments.results, found)
    write_text(arguments.results.with_suffix(".txt"), table(found) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
