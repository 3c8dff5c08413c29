"""Reads the architecture and the weights of a model directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from strop.engine.protocol import NamedTensor, weights_checksum
from strop.errors import ModelError, WeightsNotProven
from strop.run_directory import parse_json

_IMPLEMENTED = ("llama", "qwen2", "qwen3")
_REFUSED_ROPE = ("dynamic", "longrope")  # their angles change once a text passes the original context length
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_HEAD = "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"  # old files hold it; it is computed from the config


def config_of(directory: Path) -> Any:
    """Return the `transformers` config of the model in `directory`. Never asks the hub.

    Raises:
        ModelError: the directory does not exist, or `transformers` finds no model in it.
    """
    import transformers

    if not directory.is_dir():  # transformers takes any other string for a hub id
        raise ModelError(
            f"{directory}: no such model directory. Give the path of a directory, such as `strop model import` writes, not a"
            " hub id."
        )
    try:
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}: not a model directory that transformers can load: {error}") from error


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _TOKENIZERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes and switches of a Llama-like decoder, read from its `transformers` config."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    has_qkv_bias: bool
    has_qk_norm: bool
    is_tied: bool

    @classmethod
    def of(cls, config: Any) -> Architecture:
        """Read `config`, a `transformers` model config.

        Raises:
            ModelError: an architecture, or a feature of one, whose forward is not written here.
        """
        model_type = str(config.model_type)
        if model_type not in _IMPLEMENTED:
            raise ModelError(
                f"the torch engine does not implement the architecture {model_type!r} ({config.architectures});"
                f" it implements {', '.join(_IMPLEMENTED)}. Use one of these, or another kind of engine."
            )
        rope_type = config.rope_parameters["rope_type"]
        refused = {
            f"hidden_act {config.hidden_act!r} (only 'silu')": config.hidden_act != "silu",
            "sliding-window attention": "sliding_attention" in (getattr(config, "layer_types", None) or ()),
            "quantized weights": getattr(config, "quantization_config", None) is not None,
            f"rope_type {rope_type!r}": rope_type in _REFUSED_ROPE,
            "attention_bias": getattr(config, "attention_bias", False),
            "mlp_bias": getattr(config, "mlp_bias", False),
        }
        for feature, is_used in refused.items():
            if is_used:
                raise ModelError(
                    f"the torch engine does not implement {feature}, which the {model_type} model {config.name_or_path!r} uses."
                    ' Use a server engine, such as engine.kind = "vllm".'
                )
        return cls(
            model_type=model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            norm_eps=config.rms_norm_eps,
            has_qkv_bias=model_type == "qwen2",
            has_qk_norm=model_type == "qwen3",
            is_tied=bool(config.tie_word_embeddings),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a server engine needs to know about the model in a directory."""

    directory: Path
    vocab_size: int
    shapes: Mapping[str, tuple[int, ...]]  # of each weight that a publication contains
    optional: frozenset[str]  # weights that a publication may omit because they are tied
    has_tokenizer: bool
    kv_elements_per_token: int

    def check_weights(self, directory: Path, version: int) -> None:
        """Raises `WeightsNotProven` unless the files of a publication hold each weight of this model once, in its shape."""
        try:
            sent = shapes_in(sorted(directory.glob("*.safetensors")))
        except UNREADABLE as error:
            raise WeightsNotProven(f"the files of version {version} cannot be read: {error}") from error
        for name, shape in sent.items():
            if name not in self.shapes and name not in self.optional:
                raise WeightsNotProven(f"weight {name!r} was sent, but the model in {self.directory} has no such weight.")
            if shape != self.shapes.get(name, shape):
                raise WeightsNotProven(f"weight {name!r} was sent with shape {shape}; it is {self.shapes[name]} here.")
        if missing := sorted(self.shapes.keys() - self.optional - sent.keys()):
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightsNotProven(f"publication of version {version} lacks {len(missing)} weights: {shown}.")

    @classmethod
    def of(cls, directory: Path) -> ModelFacts:
        """Read the config and the headers of the weight files. Blocks meanwhile.

        Raises:
            ModelError: `transformers` finds no model, or there are no safetensors files.
        """
        config = config_of(directory)
        text = config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            directory=directory.resolve(),
            vocab_size=text.vocab_size,
            shapes=shapes_of(directory),
            optional=frozenset({_HEAD} if text.tie_word_embeddings else ()),
            has_tokenizer=has_tokenizer(directory),
            kv_elements_per_token=2 * text.num_hidden_layers * text.num_key_value_heads * head_dim,
        )


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory. Raises `ModelError` if it has none."""
    index = directory / _INDEX
    if index.exists():
        content = parse_json(index.read_bytes())
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"{index}: has no weight_map with names of files. Save or download the model again.")
        return [directory / name for name in sorted(set(names.values()))]
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    raise ModelError(f"{directory}: neither {_SINGLE} nor {_INDEX}. Save the model with transformers' save_pretrained.")


def read_weights(directory: Path) -> Iterator[NamedTensor]:
    """Yield the weights of a model directory, a file at a time. Raises `ModelError` if a file is missing or damaged."""
    with _whole(directory):
        for name, tensor in tensors_in(weight_files(directory)):
            if not name.endswith(_COMPUTED):
                yield name, tensor


def shapes_of(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight in a model directory. Raises `ModelError` if a file is missing or damaged."""
    with _whole(directory):
        return shapes_in(weight_files(directory))


@contextmanager
def _whole(directory: Path) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise ModelError(f"{directory}: missing or damaged: {error}. Save or download the model again.") from error


def directory_checksum(directory: Path) -> str:
    """Return `weights_checksum` of the weights in a model directory. Blocks while it reads them."""
    return weights_checksum(read_weights(directory))


UNREADABLE = (OSError, ValueError, SafetensorError)
"""What `tensors_in` and `shapes_in` raise for a file that is missing or damaged."""


def tensors_in(files: Iterable[Path]) -> Iterator[NamedTensor]:
    """Yield the tensors of safetensors files, a file at a time. Raises one of `UNREADABLE`."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def shapes_in(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, without reading the weights. Raises one of `UNREADABLE`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="np") as file:  # which needs no torch
            names = [name for name in file.keys() if not name.endswith(_COMPUTED)]  # noqa: SIM118 - not a mapping
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes
