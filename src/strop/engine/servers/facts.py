"""What a model directory says about its model, so that a server need not be asked, or believed."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from strop.engine.model_directory import config_of
from strop.engine.protocol import NamedTensor, weights_checksum
from strop.errors import ModelError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_HEAD = "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"  # old files hold it; it is computed from the config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One model directory."""

    directory: Path
    vocab_size: int
    shapes: Mapping[str, tuple[int, ...]]  # of every weight that must be published
    optional: frozenset[str]  # weights that may be left out, since another is the same
    has_tokenizer: bool
    kv_elements_per_token: int

    @property
    def num_elements(self) -> int:
        return sum(_product(shape) for shape in self.shapes.values())

    @classmethod
    def of(cls, directory: Path) -> ModelFacts:
        """Blocks while it reads the headers of the weight files.

        Raises:
            ModelError: no model that `transformers` knows, or no safetensors.
        """
        config = config_of(directory)
        text = config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            directory=directory.resolve(),
            vocab_size=text.vocab_size,
            shapes=_shapes(directory),
            optional=frozenset({_HEAD} if text.tie_word_embeddings else ()),
            has_tokenizer=any((directory / name).exists() for name in _TOKENIZERS),
            kv_elements_per_token=2 * text.num_hidden_layers * text.num_key_value_heads * head_dim,
        )


def weight_files(directory: Path) -> list[Path]:
    """Raises `ModelError` when there are none."""
    index = directory / _INDEX
    if index.exists():
        return [directory / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    raise ModelError(f"{directory}: neither {_SINGLE} nor {_INDEX}. Save the model with transformers' save_pretrained.")


def directory_checksum(directory: Path) -> str:
    """`weights_checksum` of a model directory's weights as they lie there. Blocks while it reads them."""
    return weights_checksum(_tensors(directory))


def _tensors(directory: Path) -> Iterator[NamedTensor]:
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if not name.endswith(_COMPUTED):
                    yield name, file.get_tensor(name)


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """From the headers alone: 8 bytes of length, then JSON."""
    shapes = {}
    for path in weight_files(directory):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
        except (OSError, struct.error, ValueError) as error:
            raise ModelError(f"{path}: missing or damaged: {error}. Save or download the model again.") from error
        for name, entry in header.items():
            if name != "__metadata__" and not name.endswith(_COMPUTED):
                shapes[name] = tuple(entry["shape"])
    return shapes


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
