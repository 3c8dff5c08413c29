"""Tiny models and the few calls that every engine test makes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from strop.engine import CompletionRequest, InferenceEngine, NamedTensor, weights_checksum

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
    "llama, tied, biased, stretched rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **_SIZES,
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
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


async def stream(tensors: Iterable[NamedTensor]) -> AsyncIterator[NamedTensor]:
    for named in tensors:
        yield named


async def publish(engine: InferenceEngine, model: torch.nn.Module, version: int = 1) -> None:
    """As a trainer does it: cast to the engine's dtype, then checksum and stream what was cast."""
    cast = [(name, parameter.detach().to(engine.capabilities.dtype)) for name, parameter in model.named_parameters()]
    await engine.load_weights(stream(cast), version=version, checksum=weights_checksum(cast))


def make_request(id: str, ids: Iterable[int], **changes: object) -> CompletionRequest:
    settings = {"max_tokens": 8, "stop_ids": frozenset[int](), "temperature": 1.0, "seed": 0} | changes
    return CompletionRequest(id=id, ids=tuple(ids), **settings)  # type: ignore[arg-type]
