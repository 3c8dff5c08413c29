"""Loads models to train, and checks the trainer's assumptions about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import checkpoint

from strop.engine.model_directory import shapes_of
from strop.errors import ModelError
from strop.training.attention import keep_attention, use_row_attention
from strop.training.batch import MIN_SHARED
from strop.training.cpu.lean_layers import use_lean_layers
from strop.training.logprobs import LogprobModule
from strop.training.weights import add_up_in, layers_of

if TYPE_CHECKING:
    import transformers

# What makes up a tokenizer on disk. Carried from the first model to every saved one, byte for byte.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_PROBE_LENGTH = 24
PROBE_TOLERANCE = 1e-3  # nats; between two orders of the same float32 sums there are about 1e-6


def load_model(directory: Path) -> transformers.PreTrainedModel:
    """Return the causal language model in `directory`, in float32, with PyTorch's scaled-dot-product attention.

    Raises:
        ModelError: `directory` holds no model that transformers can load.
    """
    import transformers

    require_config(directory)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{directory}: transformers cannot load this model: {error}") from error
    assert isinstance(model, transformers.PreTrainedModel)
    return model


def require_config(directory: Path) -> None:
    """Raises `ModelError` if there is no model in `directory`."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory}: no model here: config.json is missing. Name a directory that transformers can load.")


def check_shapes(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ModelError` unless the weights in `directory` have these names and shapes, and there are no others."""
    found = shapes_of(directory)
    if wrong := sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name)):
        raise ModelError(
            f"{directory}: not the model that is being trained: {len(wrong)} weights have other names or shapes, such as"
            f" {wrong[0]}. Resume from a checkpoint of this model."
        )


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}


def checkpoint_activations(model: transformers.PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Keep only the inputs of each layer, and for packed rows on a CPU the attention output; compute the rest again later.

    Call it after `eval()`.

    Args:
        dtype: round the weights of a layer to it only while the layer computes; None: use the weights as they are.

    Raises:
        ModelError: the model library does not mark the layers of this model.
    """
    layers = layers_of(model)
    if not layers:
        raise ModelError(
            f"{type(model).__name__}: its layers cannot be computed again in the backward pass."
            " Set trainer.activation_checkpointing = false."
        )
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_computed_again, layer, dtype)
        layer.training = True  # only of the layer itself; its submodules stay in eval mode, so dropout is off


def _computed_again(layer: nn.Module, dtype: torch.dtype | None, function: Callable[..., Any], *inputs: Any) -> Any:
    def compute(*inputs: Any) -> Any:
        with _rounded(layer, dtype):
            return function(*inputs)

    # There is no dropout, so no state of a random generator has to come back.
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=keep_attention)


@contextmanager
def _rounded(layer: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """`layer` with weights in `dtype`; gradients of these go to its own."""
    exact: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in layer.modules() if dtype is not None else ():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype != dtype:
                exact.append((module, name, parameter))
    try:
        for module, name, parameter in exact:
            rounded = module._parameters[name] = parameter.to(dtype)  # type: ignore[assignment]
            add_up_in(rounded, parameter)
        yield
    finally:
        for module, name, parameter in exact:
            module._parameters[name] = parameter


@torch.no_grad()
def check_logprobs(policy: LogprobModule, *, is_packed: bool, tolerance: float = PROBE_TOLERANCE) -> None:
    """Compare the trainer's log-probs with those of the model's own full forward pass, before training. All ranks call this.

    Call it first. Afterwards the model has `use_lean_layers` and, with `is_packed`, `use_row_attention`.

    Raises:
        ModelError: they differ, as in models that scale or cap their logits, or attend in another way.
    """
    model = policy.model
    head = model.get_output_embeddings().weight
    ids = (torch.arange(2 * _PROBE_LENGTH, device=head.device) * 7919 % head.shape[0]).view(2, -1)
    ids[1, : MIN_SHARED + 1] = ids[0, : MIN_SHARED + 1]  # so that the second row shares something with the first
    full = policy.full_logprobs(ids)
    where = torch.ones_like(ids, dtype=torch.bool)
    where[:, 0] = False
    use_lean_layers(model)
    if is_packed:
        use_row_attention(model)
    try:
        ours, _ = policy(ids, where, 1.0, ~where, ())
    except TypeError as error:
        raise ModelError(
            f"{type(model).__name__}: its rows cannot be packed ({error}). Set trainer.packing = false."
        ) from error
    gap = (ours[:, 1:] - full).abs().max().item()
    if not gap < tolerance:
        remedy = " Try trainer.packing = false." if is_packed else " It cannot be trained here."
        raise ModelError(
            f"{type(model).__name__}: the trainer's log-probs differ by {gap:.2g} nats from those of the model's full forward:"
            f" it may scale or cap its logits, or attend in a way of its own.{remedy}"
        )
