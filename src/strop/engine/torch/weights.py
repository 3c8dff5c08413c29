"""The weights of a decoder, fused for speed, each still addressable under its `transformers` name; and their proof."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engine.model_directory import Architecture, read_weights
from strop.engine.protocol import NamedTensor, weights_checksum
from strop.engine.torch.cpu.products import CompiledWeight, OneDnnWeight, multiply_shared, pack, products_for
from strop.engine.torch.cpu.resources import give_back_freed_memory
from strop.errors import WeightsNotProven


class Matrix:
    """One weight (out, in). It can be sealed: packed for the machine and read-only. Shared ones cannot.

    A product on a CPU rearranges its weight first, every time, unless the weight is packed beforehand: with 64 rows of
    SmolLM2-135M in bfloat16 that is a fifth of oneDNN's time, with 8 more than a third. Packing loses nothing: `dense` gives
    every bit back.
    """

    def __init__(
        self, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device, shared: Tensor | None = None
    ) -> None:
        """A matrix of zeros, or one that is `shared`, which others read and write, too."""
        self._shape, self._dtype, self._device, self._is_shared = shape, dtype, device, shared is not None
        self._plain: Tensor | None = self._zeros() if shared is None else shared
        self._packed: CompiledWeight | OneDnnWeight | None = None

    @property
    def is_sealed(self) -> bool:
        return self._packed is not None

    @property
    def multiplies_in_c(self) -> bool:
        """Whether its products are those of `products.h`."""
        return isinstance(self._packed, CompiledWeight) or (self._plain is not None and products_for(self._plain) is not None)

    @property
    def num_writes(self) -> int:
        """Grows with every in-place change that torch knows of."""
        held = self._plain if self._packed is None else self._packed.memory
        return 0 if held is None or self._is_shared else held._version

    def dense(self) -> Tensor:
        """The weight itself, or of a sealed one a copy."""
        return self._plain if self._plain is not None else self._packed.dense()  # type: ignore[union-attr]

    def seal(self) -> None:
        """Pack, where this machine can."""
        if self._plain is not None and not self._is_shared and (packed := pack(self._plain)) is not None:
            self._packed, self._plain = packed, None

    def free(self) -> None:
        """Give its memory back until `unseal`. Shared ones are others' to free."""
        if not self._is_shared:
            self._packed = self._plain = None

    def unseal(self) -> None:
        """Make it writable again. What it held is gone if it was packed or freed."""
        if self._plain is None:
            memory = None if self._packed is None else self._packed.memory
            self._packed, self._plain = None, self._zeros() if memory is None else memory

    def product(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """inputs weightᵀ (+ bias), of (N, in)."""
        if self._packed is not None:
            return self._packed.product(inputs, bias)
        if self._is_shared and self._device.type == "cpu":
            return multiply_shared(inputs, self.dense())
        return F.linear(inputs, self.dense(), bias)

    def onto(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """residual + inputs weightᵀ."""
        if self._packed is not None:
            return self._packed.product(inputs, operation="add", other=residual)
        return torch.addmm(residual, inputs, self.dense().t())

    def silu(self, inputs: Tensor) -> Tensor:
        """silu(inputs weightᵀ)."""
        if self._packed is not None:
            return self._packed.product(inputs, operation="silu")
        return F.silu(self.product(inputs))

    def times(self, factor: Tensor, inputs: Tensor) -> Tensor:
        """factor * (inputs weightᵀ). `factor` may be overwritten."""
        if self._packed is not None:
            return self._packed.product(inputs, operation="mul", other=factor)
        return factor.mul_(self.product(inputs))

    def _zeros(self) -> Tensor:
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. `qkv` stacks the rows of q_proj, k_proj, v_proj."""

    input_norm: Tensor  # (hidden,)
    qkv: Matrix  # ((heads + 2 kv_heads) * head_dim, hidden)
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # (head_dim,)
    k_norm: Tensor | None
    output: Matrix  # (hidden, heads * head_dim)
    mlp_norm: Tensor  # (hidden,)
    gate: Matrix  # (intermediate, hidden)
    up: Matrix
    down: Matrix  # (hidden, intermediate)


_Place: TypeAlias = tuple[Matrix | Tensor, slice]
"""Where a parameter lies: some rows of a matrix or a vector."""


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

    @property
    def multiply_in_c(self) -> bool:
        """Whether all products are in C, with the same code for any number of rows."""
        return all(matrix.multiplies_in_c for matrix in (*self._matrices, self.head))

    def named_parameters(self) -> Iterator[NamedTensor]:
        """Every parameter under its `transformers` name, tied weights once: what the forward reads, or a copy if sealed."""
        return self._read(self._places)

    def copy(self, name: str, tensor: Tensor) -> None:
        """Overwrite parameter `name` with `tensor`, cast to the engine's dtype. A tied head may be named, too.

        Raises:
            WeightsNotProven: no such parameter, or another shape.
        """
        holder, rows = self._place(name)
        view = (holder.dense() if isinstance(holder, Matrix) else holder)[rows]
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
        """Pack the matrices if this machine multiplies packed ones faster. They are read-only until `unseal`."""
        for index, matrix in enumerate(self._matrices):
            matrix.seal()
            if index % 16 == 15:  # so that not all are there twice, where no trainer keeps them
                give_back_freed_memory()
        give_back_freed_memory()

    def free(self) -> None:
        """Give the memory back until `unseal`. On a GPU it stays, since graphs hold its addresses."""
        if self._device.type != "cpu":
            return
        for matrix in self._matrices:
            matrix.free()
        self.embedding.data = self.embedding.new_empty(0)  # the one vector that is large
        give_back_freed_memory()

    def unseal(self) -> None:
        """Make every buffer writable; those that were packed or freed hold nothing of use."""
        for matrix in self._matrices:
            matrix.unseal()
        if not len(self.embedding):
            self.embedding.data = self.embedding.new_zeros(self.architecture.vocab_size, self.architecture.hidden_size)

    def writable_names(self) -> set[str]:
        """Parameters that are not sealed."""
        return {name for name, (holder, _) in self._places.items() if not (isinstance(holder, Matrix) and holder.is_sealed)}

    @property
    def num_writes(self) -> int:
        """A count that grows with every in-place change torch knows of (an edit through `.data` is not one)."""
        return sum(vector._version for vector in self._vectors) + sum(matrix.num_writes for matrix in self._matrices)

    def _read(self, names: Collection[str]) -> Iterator[NamedTensor]:
        """The parameters `names`; those that share a packed matrix from one copy of it."""
        last: Matrix | Tensor | None = None
        dense = torch.empty(0)
        for name in sorted(names, key=lambda name: id(self._place(name)[0])):
            holder, rows = self._place(name)
            if holder is not last:
                last, dense = holder, holder.dense() if isinstance(holder, Matrix) else holder
            yield name, dense[rows]

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
            self._places[name] = holder, slice(start, start + length)
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

        def head_norm(name: str) -> Tensor | None:
            return self._vector((shape.head_dim,), f"{attention}{name}.weight") if shape.has_qk_norm else None

        return LayerWeights(
            input_norm=self._vector((hidden,), f"{prefix}input_layernorm.weight"),
            qkv=self._matrix((sum(rows), hidden), *weights, rows=rows),
            qkv_bias=self._vector((sum(rows),), *biases, rows=rows) if shape.has_qkv_bias else None,
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            output=self._matrix((hidden, query_rows), f"{attention}o_proj.weight"),
            mlp_norm=self._vector((hidden,), f"{prefix}post_attention_layernorm.weight"),
            gate=self._matrix((inner, hidden), f"{mlp}gate_proj.weight"),
            up=self._matrix((inner, hidden), f"{mlp}up_proj.weight"),
            down=self._matrix((hidden, inner), f"{mlp}down_proj.weight"),
        )


_THOROUGH_EVERY_S = 60.0  # 0.7 s of hashing for SmolLM2 in float32: about a hundredth of the time at most


class PublishedWeights:
    """The weights of an engine, and what was promised of them. Used by one thread; `version` may be read by any."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.version = -1
        self._weights = weights
        self._names: set[str] = set()  # that were sent since the last `retract`
        self._writable = ""  # checksum of what somebody could still write to
        self._num_writes = 0
        self._hashed_s = 0.0  # when what is held was last hashed
        self._doubt = "no weights were published to this engine yet"  # empty: the weights are proven

    def retract(self, doubt: str) -> None:
        """Weights are about to change: nothing may sample until `prove` succeeds."""
        self._doubt = doubt
        self._names = set()
        self._weights.unseal()

    def free(self) -> None:
        """Give the memory back. Nothing may sample until weights are published again."""
        self._doubt = "the engine sleeps until the next publication"
        self._weights.free()

    def copy(self, name: str, tensor: Tensor) -> None:
        """Raises `WeightsNotProven` when the model has no such weight, or one of another shape."""
        self._weights.copy(name, tensor)
        self._names.add(name)

    def prove(self, version: int, checksum: str) -> None:
        """Accept what was copied as `version`.

        Raises:
            WeightsNotProven: weights are missing, or what is held now differs from `checksum`.
        """
        if missing := self._weights.missing(self._names):
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            self._doubt = f"the last publication (version {version}) lacked {shown}"
            raise WeightsNotProven(f"publication of version {version} lacks {len(missing)} weights: {shown}.")
        self._weights.seal()  # before the proof, which is of what the forward will read
        held = self._weights.checksum(self._names)
        if held != checksum:
            self._doubt = f"the last publication (version {version}) arrived damaged"
            raise WeightsNotProven(f"version {version} was published with checksum {checksum}, but the engine holds {held}.")
        writable = self._weights.writable_names()
        self._writable = held if writable == self._names else self._weights.checksum(writable)
        self.version, self._num_writes, self._doubt = version, self._weights.num_writes, ""
        self._hashed_s = time.monotonic()

    def read(self, directory: Path, version: int) -> None:
        """Accept the safetensors of a `transformers` model directory as `version`.

        Raises:
            ModelError: no safetensors there.
            WeightsNotProven: they are not those of this model.
        """
        self.retract(f"reading {directory} failed")
        for name, tensor in read_weights(directory):
            self.copy(name, tensor)
        self.prove(version, self._weights.checksum(self._names))

    def verify(self, *, is_idle: bool) -> None:
        """Check that nothing was written since the proof: by torch's write counters, and now and then by every byte.

        Bytes are hashed only while no request runs, and at most once in `_THOROUGH_EVERY_S`: a single rollout with tools
        leaves the engine idle at each turn.

        Raises:
            WeightsNotProven: also on every later call, until weights are published again.
        """
        if not self._doubt and self._weights.num_writes != self._num_writes:
            self._doubt = f"somebody wrote to the weights of version {self.version} after they were published"
        if not self._doubt and is_idle and time.monotonic() - self._hashed_s >= _THOROUGH_EVERY_S:
            self._hash_again()
        if self._doubt:
            raise WeightsNotProven(f"{self._doubt}. Publish weights to the engine again before sampling from it.")

    def _hash_again(self) -> None:
        if self._weights.checksum(self._weights.writable_names()) != self._writable:
            self._doubt = f"the weights are no longer those that were published as version {self.version}"
        self._hashed_s = time.monotonic()
