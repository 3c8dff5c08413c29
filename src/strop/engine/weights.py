"""The weights of a decoder, fused for speed, each still addressable under its `transformers` name."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from strop.engine.linear import Matrix
from strop.engine.memory import give_back_freed_memory
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
    """One layer. `qkv` stacks the rows of q_proj, k_proj, v_proj."""

    input_norm: Tensor  # (hidden,)
    qkv: Matrix  # ((heads + 2 kv_heads) * head_dim, hidden)
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # (head_dim,)
    k_norm: Tensor | None
    output: Matrix  # (hidden, heads * head_dim)
    output_bias: Tensor | None
    mlp_norm: Tensor  # (hidden,)
    gate: Matrix  # (intermediate, hidden)
    gate_bias: Tensor | None
    up: Matrix
    up_bias: Tensor | None
    down: Matrix  # (hidden, intermediate)
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a parameter lies: rows `start` to `stop` of a matrix or a vector."""

    holder: Matrix | Tensor
    start: int
    stop: int

    def read(self, dense: Tensor) -> Tensor:
        return dense[self.start : self.stop]


class DecoderWeights:
    """Preallocated buffers, and the place of every parameter in them under the name that `transformers` gives it.

    They hold zeros until `copy` filled them; `checksum` proves what is held now, not what was once written. `seal` packs the
    matrices for the machine where it can; `unseal` makes them writable again.
    """

    def __init__(self, architecture: Architecture, *, dtype: torch.dtype, device: torch.device) -> None:
        self.architecture = architecture
        self._dtype, self._device = dtype, device
        self._matrices: list[Matrix] = []
        self._vectors: list[Tensor] = []
        self._places: dict[str, _Place] = {}
        vocabulary_shape = (architecture.vocab_size, architecture.hidden_size)
        # Rows of the embedding are looked up, so it stays as it is, and so does a head that is tied to it.
        self.embedding = self._vector(vocabulary_shape, EMBEDDING)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(architecture.num_layers)]
        self.norm = self._vector((architecture.hidden_size,), "model.norm.weight")
        self.head = self._head(vocabulary_shape)

    def named_parameters(self) -> Iterator[NamedTensor]:
        """Every parameter under its `transformers` name, tied weights once: what the forward reads, or a copy if sealed."""
        return self._read(self._places)

    def copy(self, name: str, tensor: Tensor) -> None:
        """Overwrite parameter `name` with `tensor`, cast to the engine's dtype. A tied head may be named, too.

        Raises:
            WeightsNotProven: no such parameter, or another shape.
        """
        place = self._place(name)
        holder = place.holder.dense() if isinstance(place.holder, Matrix) else place.holder
        view = place.read(holder)
        if view.shape != tensor.shape:
            raise WeightsNotProven(
                f"weight {name!r} was sent with shape {tuple(tensor.shape)}; it is {tuple(view.shape)} here."
            )
        with torch.no_grad():
            view.copy_(tensor)

    def missing(self, names: set[str]) -> list[str]:
        """Parameters that are not among `names`."""
        sent = {EMBEDDING if self.architecture.is_tied and name == HEAD else name for name in names}
        return [name for name in self._places if name not in sent]

    def checksum(self, names: set[str]) -> str:
        """`weights_checksum` of what is held now under `names`."""
        return weights_checksum(self._read(names))

    def seal(self) -> None:
        """Pack the matrices where this machine gains by it: until `unseal` nobody can write to them."""
        for index, matrix in enumerate(self._matrices):
            matrix.seal()
            if index % 16 == 15:  # so that not all are there twice, where no trainer keeps them
                give_back_freed_memory()
        give_back_freed_memory()

    def unseal(self) -> None:
        """Make every buffer writable; the matrices that were packed hold zeros."""
        for matrix in self._matrices:
            matrix.unseal()

    def writable_names(self) -> set[str]:
        """Parameters that are not sealed."""
        return {
            name for name, place in self._places.items() if not (isinstance(place.holder, Matrix) and place.holder.is_sealed)
        }

    @property
    def num_writes(self) -> int:
        """A count that grows with every in-place change torch knows of (an edit through `.data` is not one)."""
        return sum(vector._version for vector in self._vectors) + sum(matrix.num_writes for matrix in self._matrices)

    def addresses(self) -> tuple[int, ...]:
        """Of every buffer: the same after a publication, unless matrices are packed for the machine."""
        return (*(vector.data_ptr() for vector in self._vectors), *(matrix.address for matrix in self._matrices))

    def _read(self, names: Collection[str]) -> Iterator[NamedTensor]:
        """The parameters `names`; those that share a packed matrix from one copy of it."""
        holder: Matrix | Tensor | None = None
        dense = torch.empty(0)
        for name in sorted(names, key=self._order):
            place = self._place(name)
            if place.holder is not holder:
                holder = place.holder
                dense = holder.dense() if isinstance(holder, Matrix) else holder
            yield name, place.read(dense)

    def _order(self, name: str) -> tuple[int, int]:
        place = self._place(name)
        return id(place.holder), place.start

    def _place(self, name: str) -> _Place:
        if self.architecture.is_tied and name == HEAD:
            name = EMBEDDING
        if name not in self._places:
            raise WeightsNotProven(
                f"weight {name!r} was sent, but this {self.architecture.model_type} model has no such weight."
            )
        return self._places[name]

    def _vector(self, shape: tuple[int, ...], *names: str, rows: tuple[int, ...] = ()) -> Tensor:
        """One zeroed buffer; `names` share its first axis as `rows` says (one name takes it whole)."""
        vector = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._vectors.append(vector)
        self._name(vector, names, rows or shape[:1])
        return vector

    def _matrix(self, shape: tuple[int, int], *names: str, rows: tuple[int, ...] = ()) -> Matrix:
        matrix = Matrix(shape, dtype=self._dtype, device=self._device)
        self._matrices.append(matrix)
        self._name(matrix, names, rows or shape[:1])
        return matrix

    def _name(self, holder: Matrix | Tensor, names: tuple[str, ...], rows: tuple[int, ...]) -> None:
        start = 0
        for name, length in zip(names, rows, strict=True):
            self._places[name] = _Place(holder=holder, start=start, stop=start + length)
            start += length

    def _head(self, shape: tuple[int, int]) -> Matrix:
        if not self.architecture.is_tied:
            return self._matrix(shape, HEAD)
        return Matrix(shape, dtype=self._dtype, device=self._device, shared=self.embedding)

    def _layer(self, prefix: str) -> LayerWeights:
        shape = self.architecture
        hidden, inner = shape.hidden_size, shape.intermediate_size
        query_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = {f"{attention}{name}.": rows for name, rows in (("q_proj", query_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))}
        weights, biases, rows = [f"{name}weight" for name in qkv], [f"{name}bias" for name in qkv], tuple(qkv.values())

        def bias(is_used: bool, size: int, name: str) -> Tensor | None:
            return self._vector((size,), name) if is_used else None

        return LayerWeights(
            input_norm=self._vector((hidden,), f"{prefix}input_layernorm.weight"),
            qkv=self._matrix((sum(rows), hidden), *weights, rows=rows),
            qkv_bias=self._vector((sum(rows),), *biases, rows=rows) if shape.has_qkv_bias else None,
            q_norm=bias(shape.has_qk_norm, shape.head_dim, f"{attention}q_norm.weight"),
            k_norm=bias(shape.has_qk_norm, shape.head_dim, f"{attention}k_norm.weight"),
            output=self._matrix((hidden, query_rows), f"{attention}o_proj.weight"),
            output_bias=bias(shape.has_output_bias, hidden, f"{attention}o_proj.bias"),
            mlp_norm=self._vector((hidden,), f"{prefix}post_attention_layernorm.weight"),
            gate=self._matrix((inner, hidden), f"{mlp}gate_proj.weight"),
            gate_bias=bias(shape.has_mlp_bias, inner, f"{mlp}gate_proj.bias"),
            up=self._matrix((inner, hidden), f"{mlp}up_proj.weight"),
            up_bias=bias(shape.has_mlp_bias, inner, f"{mlp}up_proj.bias"),
            down=self._matrix((hidden, inner), f"{mlp}down_proj.weight"),
            down_bias=bias(shape.has_mlp_bias, hidden, f"{mlp}down_proj.bias"),
        )
