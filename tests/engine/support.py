"""Tiny models and the few calls that every engine test makes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from strop.engine.protocol import CompletionRequest, InferenceEngine, NamedTensor, weights_checksum
from strop.engine.publication import Publication, WeightSource
from strop.engine.published_files import write_files

VOCAB_SIZE = 67
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so that distributions are far from flat, and mistakes far from invisible
}
_MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, head_dim=32)),  # the smallest that vLLM computes on a CPU
    "llama, tied, stretched rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **_SIZES,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=32)),
}
MODEL_NAMES = tuple(_MODELS)


def make_model(name: str, seed: int = 0, scale: float = 1.0) -> torch.nn.Module:
    """A tiny random model of float32, biases and norms random, too; all but the norms multiplied by `scale`."""
    torch.manual_seed(seed)
    model = _MODELS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.2)
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(scale)
    return model.eval()


def named(model: torch.nn.Module) -> list[NamedTensor]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


class Tensors:
    """Weights in the memory of a test, as `strop.engine.publication.WeightSource`. `checksum` may be a wrong one."""

    nodes = (None,)

    def __init__(self, tensors: Iterable[NamedTensor], checksum: str = "") -> None:
        self.named = list(tensors)
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.named)
        self._checksum = checksum or weights_checksum(self.named)

    async def tensors(self) -> AsyncIterator[NamedTensor]:
        for named in self.named:
            yield named

    async def checksum(self) -> str:
        return self._checksum

    async def write(self, directories: Sequence[Path]) -> str:
        write_files(self.named, directories[0], part="test")
        return self._checksum


async def load(engine: InferenceEngine, source: WeightSource, *, version: int = 1, keeps_requests: bool = False) -> str:
    """Give weights to an engine as a trainer does."""
    async with Publication(source, version=version, keeps_requests=keeps_requests) as publication:
        await engine.load_weights(publication)
        return await publication.checksum()


async def publish(engine: InferenceEngine, model: torch.nn.Module, version: int = 1, *, keeps_requests: bool = False) -> None:
    """Give the weights of `model`, cast to the engine's dtype, to the engine."""
    cast = [(name, parameter.detach().to(engine.capabilities.dtype)) for name, parameter in model.named_parameters()]
    await load(engine, Tensors(cast), version=version, keeps_requests=keeps_requests)


def make_request(id: str, ids: Iterable[int], **changes: object) -> CompletionRequest:
    settings = {"max_tokens": 8, "stop_ids": frozenset[int](), "temperature": 1.0, "seed": 0} | changes
    return CompletionRequest(id=id, ids=tuple(ids), **settings)  # type: ignore[arg-type]
