"""Measures an update of the trainer, a publication, and decoding of the embedded engine on a device, each against its limit."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_check_correctness import make_batch
from gpu_check_machine import Machine, median, or_out_of_memory
from gpu_check_models import Costs

from strop.algorithms.grpo import GRPO
from strop.engine.config import EngineConfig
from strop.engine.protocol import CompletionRequest
from strop.engine.torch.engine import TorchEngine
from strop.training import Trainer, TrainerConfig
from strop.training.batch import TokenBatch

ROWS = 64
ROUNDS = 3
DECODE_SETTINGS: dict[str, dict[str, Any]] = {
    "static": {"decode": "static"},  # as on CUDA where nothing is said; off it, the same without graphs
    "static, not deterministic": {"decode": "static", "deterministic": False},
    "eager": {"decode": "eager"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How much is trained and decoded."""

    num_rows: int  # of an update
    row_length: int
    microbatches: tuple[int, ...]  # tokens, to choose the best of
    max_logits: int  # the default is a CPU's: of a vocabulary of 150 000 it makes products of two hundred tokens
    prompt: int  # of the conversations that decode
    completion: int


FULL = Work(num_rows=16, row_length=2048, microbatches=(16_384, 8192, 4096), max_logits=2**28, prompt=256, completion=256)
TINY = Work(num_rows=4, row_length=48, microbatches=(96,), max_logits=2**12, prompt=16, completion=8)


def training(machine: Machine, model: Path, costs: Costs, vocabulary: int, work: Work) -> dict[str, Any]:
    """An update in bfloat16 over float32 weights, at several sizes of micro-batch, with activations kept and computed again.

    There is no `best` where none of them fits into memory.
    """
    generator = torch.Generator().manual_seed(0)
    texts = [tuple(torch.randint(vocabulary, (work.row_length,), generator=generator).tolist()) for _ in range(work.num_rows)]
    batch = make_batch(texts, prompt=work.row_length // 8)
    flops = costs.update_flops(batch.lengths.tolist(), batch.num_loss_tokens)
    settings: dict[str, Any] = {}
    for again in (False, True):
        for max_tokens in work.microbatches:
            name = f"{max_tokens} tokens{', activations again' if again else ''}"
            config = {
                "max_tokens_per_microbatch": max_tokens,
                "activation_checkpointing": again,
                "max_logits": work.max_logits,
            }
            taken = or_out_of_memory(machine, lambda config=config: asyncio.run(_update(machine, model, config, batch)))
            settings[name] = taken or {"out_of_memory": True}
    done = {name: taken for name, taken in settings.items() if "update_s" in taken}
    if not done:
        return {"settings": settings, "update_tflop": flops / 1e12}
    best = min(done, key=lambda name: done[name]["update_s"])
    return {
        "settings": settings,
        "best": best,
        "update_tflop": flops / 1e12,
        "tflops": flops / done[best]["update_s"] / 1e12,
        "tokens_per_s": work.num_rows * work.row_length / done[best]["update_s"],
        "peak_mib": done[best]["peak_mib"],
    }


def _trainer(machine: Machine, model: Path, config: dict[str, Any]) -> Trainer:
    settings = {"precision": "bfloat16", "device": machine.device.type} | config
    return Trainer.from_directory(model, TrainerConfig.model_validate(settings))


async def _update(machine: Machine, model: Path, config: dict[str, Any], batch: TokenBatch) -> dict[str, Any]:
    machine.clear()
    trainer, method, taken = _trainer(machine, model, config), GRPO(), []
    try:
        for _ in range(1 + ROUNDS):
            started_at = time.perf_counter()  # the report holds numbers, so the device is done when it is there
            await trainer.update(batch, method.token_loss, method.token_statistics)
            taken.append(time.perf_counter() - started_at)
    finally:
        await trainer.close()
    return {"update_s": median(taken[1:]), "peak_mib": machine.peak_mib()}


async def publication(machine: Machine, model: Path) -> float:
    """Seconds from the trainer's weights to an engine in the same process that has proved them; the median of several."""
    machine.clear()
    trainer = _trainer(machine, model, {})
    config = EngineConfig(slots=2, max_length=128, dtype="bfloat16", device=_kind(machine))
    taken = []
    try:
        engine = await asyncio.to_thread(TorchEngine.from_directory, model, config)
        try:
            for version in range(1, 2 + ROUNDS):
                started_at = time.perf_counter()
                await trainer.publish(engine, version=version)
                taken.append(time.perf_counter() - started_at)
        finally:
            await engine.close()
    finally:
        await trainer.close()
    return median(taken[1:])


def decoding(machine: Machine, model: Path, costs: Costs, vocabulary: int, work: Work, *, bandwidth: float) -> dict[str, Any]:
    """64 conversations of one prompt that decode together, against what reading weights and KV allows.

    There are no `tokens_per_s` where the default way does not fit into memory.
    """
    limit = ROWS * bandwidth / costs.step_bytes(ROWS, work.prompt + work.completion / 2)
    settings: dict[str, Any] = {}
    for name, chosen in DECODE_SETTINGS.items():
        run = or_out_of_memory(machine, lambda chosen=chosen: asyncio.run(_decode(machine, model, vocabulary, work, chosen)))
        settings[name] = run or {"out_of_memory": True}
    found = {"settings": settings, "limit_tokens_per_s": limit}
    default = settings["static"]
    if "tokens_per_s" not in default:
        return found
    return found | {
        "tokens_per_s": default["tokens_per_s"],
        "share_of_limit": default["tokens_per_s"] / limit,
        "peak_mib": default["peak_mib"],
    }


async def _decode(machine: Machine, model: Path, vocabulary: int, work: Work, chosen: dict[str, Any]) -> dict[str, Any]:
    machine.clear()
    sizes = {"slots": ROWS, "max_length": work.prompt + work.completion, "dtype": "bfloat16", "device": _kind(machine)}
    engine = await asyncio.to_thread(TorchEngine.from_directory, model, EngineConfig.model_validate(sizes | chosen))
    prompt = tuple(torch.randint(vocabulary, (work.prompt,), generator=torch.Generator().manual_seed(0)).tolist())

    async def converse(number: int) -> None:
        request = CompletionRequest(
            id=f"{number}", ids=prompt, max_tokens=work.completion, stop_ids=frozenset(), temperature=1.0, seed=number
        )
        await engine.complete(request)
        await engine.release(request.id)

    taken = []
    try:
        for _ in range(1 + ROUNDS):  # the first one also computes the prompt, which stays cached
            started_at = time.perf_counter()
            await asyncio.gather(*(converse(number) for number in range(ROWS)))
            taken.append(time.perf_counter() - started_at)
    finally:
        await engine.close()
    return {"tokens_per_s": ROWS * work.completion / median(taken[1:]), "peak_mib": machine.peak_mib()}


def _kind(machine: Machine) -> Any:
    return machine.device.type
