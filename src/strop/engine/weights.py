"""The weights of a decoder, fused for speed, each still addressable under its `transformers` name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from strop.engine.protocol import NamedTensor, weights_checksum
from strop.errors import ModelError, WeightsNotProven

ROTARY_CLASSES = {"llama": LlamaRotaryEmbedding, "qwen2": Qwen2RotaryEmbedding, "qwen3": Qwen3RotaryEmbedding}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # their angles change once a text passes the original context length
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    rope_limit: int | None  # positions from here on would change the angles of earlier ones; None: they never do

    @classmethod
    def of(cls, config: Any, *, max_length: int) -> Architecture:
        """Read `config`, a `transformers` model config.

        Raises:
            ModelError: an architecture, or a feature of one, whose forward is not written here.
        """
        model_type = str(config.model_type)
        if model_type not in ROTARY_CLASSES:
            raise ModelError(
                f"the torch engine does not implement the architecture {model_type!r} ({config.architectures});"
                f" it implements {', '.join(ROTARY_CLASSES)}. Use one of these, or another kind of engine."
            )
        rope_type, rope_limit = config.rope_parameters["rope_type"], _rope_limit(config)
        refused = {
            f"hidden_act {config.hidden_act!r} (only 'silu')": config.hidden_act != "silu",
            "sliding-window attention": "sliding_attention" in (getattr(config, "layer_types", None) or ()),
            "quantized weights": getattr(config, "quantization_config", None) is not None,
            f"rope_type {rope_type!r} beyond {rope_limit} positions": rope_limit is not None and max_length > rope_limit,
        }
        for feature, is_used in refused.items():
            if is_used:
                raise ModelError(f"the torch engine does not implement {feature}, which this {model_type} model uses.")
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
            has_qkv_bias=model_type == "qwen2" or bool(config.attention_bias),
            has_output_bias=model_type != "qwen2" and bool(config.attention_bias),
            has_mlp_bias=bool(getattr(config, "mlp_bias", False)),
            has_qk_norm=model_type == "qwen3",
            is_tied=bool(config.tie_word_embeddings),
            rope_limit=rope_limit,
        )


def _rope_limit(config: Any) -> int | None:
    rope = config.rope_parameters
    if rope["rope_type"] not in _LENGTH_DEPENDENT_ROPE:
        return None
    return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. `qkv` stacks the rows of q_proj, k_proj, v_proj; `gate_up` those of gate_proj, up_proj."""

    input_norm: Tensor  # (hidden,)
    qkv: Tensor  # ((heads + 2 kv_heads) * head_dim, hidden)
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # (head_dim,)
    k_norm: Tensor | None
    output: Tensor  # (hidden, heads * head_dim)
    output_bias: Tensor | None
    mlp_norm: Tensor  # (hidden,)
    gate_up: Tensor  # (2 * intermediate, hidden)
    gate_up_bias: Tensor | None
    down: Tensor  # (hidden, intermediate)
    down_bias: Tensor | None


class DecoderWeights:
    """Preallocated buffers, and a view into them for every name that `transformers` gives a parameter.

    They hold zeros until `copy` filled them; `checksum` proves what is held now, not what was once written.
    """

    def __init__(self, architecture: Architecture, *, dtype: torch.dtype, device: torch.device) -> None:
        self.architecture = architecture
        self._dtype, self._device = dtype, device
        self._buffers: list[Tensor] = []
        self._views: dict[str, Tensor] = {}
        vocabulary_shape = (architecture.vocab_size, architecture.hidden_size)
        self.embedding = self._buffer(vocabulary_shape, EMBEDDING)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(architecture.num_layers)]
        self.norm = self._buffer((architecture.hidden_size,), "model.norm.weight")
        self.head = self.embedding if architecture.is_tied else self._buffer(vocabulary_shape, HEAD)

    def named_parameters(self) -> Iterator[NamedTensor]:
        """Every parameter under its `transformers` name, as a view of what the forward reads; tied weights once."""
        return iter(self._views.items())

    def copy(self, name: str, tensor: Tensor) -> None:
        """Overwrite parameter `name` with `tensor`, cast to the engine's dtype. A tied head may be named, too.

        Raises:
            WeightsNotProven: no such parameter, or another shape.
        """
        view = self._view(name)
        if view.shape != tensor.shape:
            raise WeightsNotProven(
                f"weight {name!r} was sent with shape {tuple(tensor.shape)}; it is {tuple(view.shape)} here."
            )
        with torch.no_grad():
            view.copy_(tensor)

    def missing(self, names: set[str]) -> list[str]:
        """Parameters that are not among `names`."""
        sent = {EMBEDDING if self.architecture.is_tied and name == HEAD else name for name in names}
        return [name for name in self._views if name not in sent]

    def checksum(self, names: set[str]) -> str:
        """`weights_checksum` of what is held now under `names`."""
        return weights_checksum((name, self._view(name)) for name in names)

    @property
    def num_writes(self) -> int:
        """A count that grows with every in-place change torch knows of (an edit through `.data` is not one)."""
        return sum(buffer._version for buffer in self._buffers)

    def _view(self, name: str) -> Tensor:
        if self.architecture.is_tied and name == HEAD:
            return self.embedding
        if name not in self._views:
            raise WeightsNotProven(
                f"weight {name!r} was sent, but this {self.architecture.model_type} model has no such weight."
            )
        return self._views[name]

    def _buffer(self, shape: tuple[int, ...], *names: str, rows: tuple[int, ...] = ()) -> Tensor:
        """One zeroed buffer; `names` share its first axis as `rows` says (one name takes it whole)."""
        buffer = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._buffers.append(buffer)
        self._views.update(zip(names, torch.split(buffer, list(rows or shape[:1])), strict=True))
        return buffer

    def _layer(self, prefix: str) -> LayerWeights:
        shape = self.architecture
        hidden, inner = shape.hidden_size, shape.intermediate_size
        query_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

        def stacked(place: str, kind: str, rows: dict[str, int], *width: int) -> Tensor:
            names = [f"{place}{projection}.{kind}" for projection in rows]
            return self._buffer((sum(rows.values()), *width), *names, rows=tuple(rows.values()))

        qkv = {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        gate_up = {"gate_proj": inner, "up_proj": inner}
        return LayerWeights(
            input_norm=self._buffer((hidden,), f"{prefix}input_layernorm.weight"),
            qkv=stacked(attention, "weight", qkv, hidden),
            qkv_bias=stacked(attention, "bias", qkv) if shape.has_qkv_bias else None,
            q_norm=self._buffer((shape.head_dim,), f"{attention}q_norm.weight") if shape.has_qk_norm else None,
            k_norm=self._buffer((shape.head_dim,), f"{attention}k_norm.weight") if shape.has_qk_norm else None,
            output=self._buffer((hidden, query_rows), f"{attention}o_proj.weight"),
            output_bias=self._buffer((hidden,), f"{attention}o_proj.bias") if shape.has_output_bias else None,
            mlp_norm=self._buffer((hidden,), f"{prefix}post_attention_layernorm.weight"),
            gate_up=stacked(mlp, "weight", gate_up, hidden),
            gate_up_bias=stacked(mlp, "bias", gate_up) if shape.has_mlp_bias else None,
            down=self._buffer((hidden, inner), f"{mlp}down_proj.weight"),
            down_bias=self._buffer((hidden,), f"{mlp}down_proj.bias") if shape.has_mlp_bias else None,
        )
