"""Holds bfloat16 on a device against float32: log-probs of the engine, and the gradient of the trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from gpu_check_machine import Machine
from torch import Tensor
from transformers import AutoModelForCausalLM

from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Aggregation
from strop.engine.config import EngineConfig
from strop.engine.protocol import CompletionRequest
from strop.engine.torch.engine import TorchEngine
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.batch import Row, TokenBatch, pack_rows
from strop.types import Completion

NUM_TOKENS = 48
LENGTHS = (3, 17, 40, 64, 127, 130, 150, 200)  # of the prompts: on both sides of a chunk's and of a block's end
MAX_LENGTH = 256
FIRST_ID = 1  # of every text; in many vocabularies a beginning

Ids = tuple[int, ...]


def own_texts(machine: Machine, model: Path, num_texts: int, length: int) -> list[Ids]:
    """What the model itself says, in float32: of ids drawn at random, roundings of a real model say little."""
    return asyncio.run(_complete(machine, model, "float32", [(FIRST_ID,)] * num_texts, num_tokens=length - 1))


def logprob_gaps(machine: Machine, model: Path, settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The engine in float32 and in bfloat16, against the model library's own forward in float32 of what each sampled."""
    texts = own_texts(machine, model, len(LENGTHS), max(LENGTHS))
    prompts = [text[:length] for text, length in zip(texts, LENGTHS, strict=True)]
    sampled = {
        dtype: asyncio.run(_sample(machine, model, dtype, prompts, NUM_TOKENS, settings)) for dtype in ("float32", "bfloat16")
    }
    machine.clear()
    library = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").to(machine.device)
    found = {}
    for dtype, completions in sampled.items():
        pairs = zip(prompts, completions, strict=True)
        gaps = torch.cat([_gap(library, prompt, completion) for prompt, completion in pairs])
        found[dtype] = {
            "max": gaps.abs().max().item(),
            "mean": gaps.abs().mean().item(),
            "p99": gaps.abs().quantile(0.99).item(),
            "mean_ratio_off_1": abs(gaps.exp().mean().item() - 1),
        }
    return found


async def _complete(machine: Machine, model: Path, dtype: str, prompts: list[Ids], *, num_tokens: int) -> list[Ids]:
    completions = await _sample(machine, model, dtype, prompts, num_tokens, {})
    return [prompt + completion.ids for prompt, completion in zip(prompts, completions, strict=True)]


async def _sample(
    machine: Machine, model: Path, dtype: str, prompts: list[Ids], num_tokens: int, settings: dict[str, Any]
) -> list[Completion]:
    # Fewer slots than prompts, so that slots change hands.
    config = EngineConfig.model_validate(
        {"slots": 6, "max_length": MAX_LENGTH, "dtype": dtype, "device": machine.device.type} | settings
    )
    engine = await asyncio.to_thread(TorchEngine.from_directory, model, config)

    async def ask(number: int, prompt: Ids) -> Completion:
        request = CompletionRequest(
            id=f"{number}", ids=prompt, max_tokens=num_tokens, stop_ids=frozenset(), temperature=1.0, seed=number
        )
        completion = await engine.complete(request)
        await engine.release(request.id)
        return completion

    try:
        return list(await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts))))
    finally:
        await engine.close()


@torch.inference_mode()
def _gap(library: Any, prompt: Ids, completion: Completion) -> Tensor:
    """(tokens,) log of the library's probability over the engine's, of each sampled token."""
    ids = torch.tensor([(*prompt, *completion.ids)], device=library.device)
    logprobs = library(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    theirs = logprobs.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    return theirs.cpu() - torch.tensor(completion.logprobs)


def make_batch(texts: list[Ids], *, prompt: int) -> TokenBatch:
    """Texts of one length with random advantages; of each the first `prompt` tokens are not trained on."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        Row(
            ids=text,
            loss_mask=[column >= prompt for column in range(len(text))],
            advantages=torch.randn((), generator=generator).expand(len(text)),
            sampled_logprobs=[0.0] * len(text),
            group=group,
        )
        for group, text in enumerate(texts)
    ]
    return pack_rows(rows, aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)


def gradient_gap(machine: Machine, model: Path, *, num_rows: int, length: int) -> dict[str, float]:
    """The gradient of one update in bfloat16 against the same in float32, over all weights at once; and the library's own.

    How far rounding turns a gradient is the model's property first, so what the model library makes of the same loss in
    bfloat16 is the measure of it.
    """
    batch = make_batch(own_texts(machine, model, num_rows, length), prompt=length // 4)
    exact = asyncio.run(_gradient(machine, model, "float32", batch))
    rounded = asyncio.run(_gradient(machine, model, "bfloat16", batch))
    library = _library_gradient(machine, model, batch)
    machine.clear()
    cosine, difference = _compare(exact, rounded)
    _, library_difference = _compare(exact, library)
    return {
        "cosine": cosine,
        "relative_difference": difference,
        "library_relative_difference": library_difference,
        "difference_over_library": difference / library_difference,
    }


def _compare(exact: dict[str, Tensor], rounded: dict[str, Tensor]) -> tuple[float, float]:
    """The cosine between two gradients, and the length of their difference over that of `exact`."""
    sums = torch.zeros(4, dtype=torch.float64)
    for name, of_weight in exact.items():  # one at a time: in double precision all of them would be too much
        left, right = of_weight.double().flatten(), rounded[name].double().flatten()
        sums += torch.stack((left @ left, right @ right, left @ right, (left - right).square().sum()))
    of_exact, of_rounded, together, apart = sums.tolist()
    return together / (of_exact * of_rounded) ** 0.5, (apart / of_exact) ** 0.5


async def _gradient(machine: Machine, model: Path, precision: str, batch: TokenBatch) -> dict[str, Tensor]:
    """Of each weight, on the CPU: with beta1 = 0 and without clipping, AdamW's first moment is the gradient itself."""
    machine.clear()
    config = TrainerConfig.model_validate(
        {
            "precision": precision,
            "device": machine.device.type,
            "optimizer": OptimizerConfig(betas=(0.0, 0.95), grad_clip=0.0).model_dump(),
        }
    )
    trainer, method = Trainer.from_directory(model, config), GRPO()
    try:
        await trainer.update(batch, method.token_loss, method.token_statistics)
        state = trainer.learner.optimization.optimizer.state
        return {name: state[weight]["exp_avg"].cpu() for name, weight in trainer.learner.weights.named().items()}
    finally:
        await trainer.close()


def _library_gradient(machine: Machine, model: Path, batch: TokenBatch) -> dict[str, Tensor]:
    """Of the same loss, which on policy is -advantage * log-prob, all of it in bfloat16 by the model library."""
    machine.clear()
    library = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(machine.device, torch.bfloat16)
    for ids, weights in zip(batch.ids, batch.loss_weights * batch.advantages, strict=True):
        ids, weights = ids.to(machine.device), weights.to(machine.device)
        logprobs = library(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        (-weights[1:] * logprobs.gather(1, ids[1:, None]).squeeze(1)).sum().backward()
    return {name: weight.grad.cpu() for name, weight in library.named_parameters()}
