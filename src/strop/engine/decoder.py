"""The forward of a Llama-like decoder over a KV cache with a fixed number of slots.

Written for few operations, because a small model's step on a CPU is mostly overhead: q, k and v are one product, gate and up
another, residuals are added inside the products, and q and k turn together. Every function is the same arithmetic as
`transformers`' own forward up to rounding; tests hold the gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engine.weights import ROTARY_CLASSES, Architecture, DecoderWeights, LayerWeights
from strop.errors import ModelError

KV_STEP = 64  # decode reads a whole number of these columns
CHUNK_STEP, CHUNK_MAX = 16, 128  # a prefill goes in chunks of at most CHUNK_MAX tokens, padded to a multiple of CHUNK_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A copy of the first columns of one slot. Shapes (layers, blocks, kv_heads, columns of a block, head_dim)."""

    keys: Tensor
    values: Tensor
    length: int


class Decoder:
    """Weights, KV cache and the two forwards over them: `prefill` for one slot, `decode` for one token of many slots.

    Column `p` of a slot holds position `p` of its conversation. Nothing here knows which columns are in use; callers pass
    lengths. Columns beyond them may hold anything finite.

    The cache is stored by blocks of columns, (layers, blocks, slots, kv_heads, columns of a block, head_dim), because a
    batched product on a CPU is 2.5 times slower unless its operands lie in one piece: 64 rows over 192 columns of 4 layers
    took 4.6 ms by slots and 1.9 ms by blocks. On an accelerator one block holds all columns.
    """

    def __init__(self, model_config: Any, *, dtype: torch.dtype, device: torch.device, num_slots: int, max_length: int) -> None:
        self.architecture = Architecture.of(model_config, max_length=max_length)
        self.weights = DecoderWeights(self.architecture, dtype=dtype, device=device)
        self.device, self.num_slots = device, num_slots
        # One column beyond max_length takes what idle rows write; a padded last chunk may reach CHUNK_STEP further.
        self.num_columns = _round_up(max_length + 1 + CHUNK_STEP, KV_STEP)
        self._block = KV_STEP if device.type == "cpu" else self.num_columns
        shape = (self.architecture.num_layers, self.num_columns // self._block, num_slots, self.architecture.num_kv_heads)
        self._keys = torch.zeros(*shape, self._block, self.architecture.head_dim, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._cos, self._sin = self._rotary_tables(model_config, dtype)
        self._columns = torch.arange(self.num_columns, device=device)
        self._rows = torch.arange(num_slots, device=device)

    def prefill(self, slot: int, ids: Sequence[int], start: int) -> Tensor:
        """Compute `ids` at positions `start` .. of `slot`, after the `start` columns that are there.

        Chunks depend on `start` and on the number of ids only, and one slot is computed at a time: what it leaves behind
        does not depend on any other conversation.

        Returns:
            (V,) float32 logits after the last id.
        """
        end = start + len(ids)
        hidden = self.weights.embedding[:0]
        for chunk_start in range(start, end, CHUNK_MAX):
            chunk = ids[chunk_start - start : chunk_start - start + CHUNK_MAX]
            padded = [*chunk, *([0] * (-len(chunk) % CHUNK_STEP))]
            hidden = self._prefill_chunk(slot, padded, chunk_start)[len(chunk) - 1 : len(chunk)]
        return self._logits(hidden)[0].float()

    def decode(self, ids: Tensor, positions: Tensor, num_columns: int) -> Tensor:
        """One token for each of the first `N` slots: `ids` and `positions` are (N,) int64, positions < `num_columns`.

        Row `r` writes column `positions[r]` of slot `r` and reads the columns up to it.

        Returns:
            (N, V) logits in the engine's dtype.
        """
        num_rows, shape = ids.shape[0], self.architecture
        mask = self._mask(positions, num_columns).unsqueeze(1)  # (N, 1, L)
        mask = mask.expand(-1, shape.num_kv_heads, -1).reshape(num_rows * shape.num_kv_heads, 1, num_columns)
        rotation = (self._cos[positions], self._sin[positions])
        place = (positions // self._block, self._rows[:num_rows], slice(None), positions % self._block)
        widths = [min(self._block, num_columns - start) for start in range(0, num_columns, self._block)]
        hidden = self.weights.embedding[ids]
        for layer, keys, values in zip(self.weights.layers, self._keys, self._values, strict=True):
            query, key, value = self._project(layer, hidden, rotation)
            keys[place] = key
            values[place] = value
            query = query.reshape(num_rows * shape.num_kv_heads, -1, shape.head_dim)
            attended = _attend(
                query,
                [block[:num_rows, :, :width].flatten(0, 1) for block, width in zip(keys, widths, strict=False)],
                [block[:num_rows, :, :width].flatten(0, 1) for block, width in zip(values, widths, strict=False)],
                mask,
            )
            hidden = self._finish_layer(layer, hidden, attended.view(num_rows, -1))
        return self._logits(hidden)

    def copy_out(self, slot: int, length: int) -> Prefix:
        """The first `length` columns of `slot`, and what else lies in their blocks."""
        place = self._blocks(slot, length)
        return Prefix(keys=self._keys[place].clone(), values=self._values[place].clone(), length=length)

    def copy_in(self, slot: int, prefix: Prefix, length: int) -> None:
        """Fill the first `length` columns of `slot` from `prefix`; what comes after them in their blocks is lost."""
        place = self._blocks(slot, length)
        _, num_blocks, _, width, _ = self._keys[place].shape
        self._keys[place] = prefix.keys[:, :num_blocks, :, :width]
        self._values[place] = prefix.values[:, :num_blocks, :, :width]

    def copy_across(self, source: int, target: int, length: int) -> None:
        """Fill the first `length` columns of slot `target` from slot `source`, as `copy_in` does."""
        for cache in (self._keys, self._values):
            cache[self._blocks(target, length)] = cache[self._blocks(source, length)]

    def clear(self) -> None:
        """Zero the cache: what broken weights left behind (nan) would spoil masked columns."""
        self._keys.zero_()
        self._values.zero_()

    def fill(self, generator: torch.Generator) -> None:
        """Give every slot the same random content, to measure with."""
        for cache in (self._keys, self._values):
            pattern = torch.randn(cache[:, :, :1].shape, generator=generator, dtype=torch.float32)
            cache.copy_(pattern.expand_as(cache))

    def _blocks(self, slot: int, length: int) -> tuple[slice, slice, int, slice, slice]:
        """Where the blocks of the first `length` columns of `slot` are; of a single block, only those columns."""
        num_blocks = -(-length // self._block)
        columns = slice(length) if num_blocks == 1 else slice(None)
        return slice(None), slice(num_blocks), slot, slice(None), columns

    def _prefill_chunk(self, slot: int, ids: Sequence[int], start: int) -> Tensor:
        """Hidden states (C, hidden) of one padded chunk; its keys and values are in columns start .. start + C."""
        shape, size = self.architecture, len(ids)
        end = start + size
        num_columns = _round_up(end, KV_STEP)
        columns = self._columns[start:end]
        place = (columns // self._block, slot, slice(None), columns % self._block)
        rotation = (self._cos[start:end], self._sin[start:end])
        num_shared = shape.num_heads // shape.num_kv_heads
        mask = self._mask(columns, num_columns).repeat(num_shared, 1)  # (heads that share keys * C, L)
        hidden = self.weights.embedding[torch.tensor(ids, device=self.device)]
        for layer, keys, values in zip(self.weights.layers, self._keys, self._values, strict=True):
            query, key, value = self._project(layer, hidden, rotation)
            keys[place] = key
            values[place] = value
            query = query.view(size, shape.num_kv_heads, num_shared, shape.head_dim).permute(1, 2, 0, 3)
            attended = _attend(
                query.reshape(shape.num_kv_heads, num_shared * size, shape.head_dim),
                [self._in_one_piece(keys, slot, num_columns)],
                [self._in_one_piece(values, slot, num_columns)],
                mask,
            )
            attended = attended.view(shape.num_heads, size, shape.head_dim).transpose(0, 1)
            hidden = self._finish_layer(layer, hidden, attended.reshape(size, -1))
        return hidden

    def _in_one_piece(self, cache: Tensor, slot: int, num_columns: int) -> Tensor:
        """(kv_heads, L, head_dim): the first columns of `slot` in the cache of one layer."""
        num_blocks = -(-num_columns // self._block)
        return cache[:num_blocks, slot].transpose(0, 1).flatten(1, 2)[:, :num_columns]

    def _project(self, layer: LayerWeights, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (N, heads, head_dim), keys and values (N, kv_heads, head_dim) of one layer, turned to their positions."""
        shape = self.architecture
        num_rotated = shape.num_heads + shape.num_kv_heads
        normed = F.rms_norm(hidden, (shape.hidden_size,), layer.input_norm, shape.norm_eps)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden), -1, shape.head_dim)
        rotated, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = rotated[:, : shape.num_heads], rotated[:, shape.num_heads :]
            query = F.rms_norm(query, (shape.head_dim,), layer.q_norm, shape.norm_eps)
            key = F.rms_norm(key, (shape.head_dim,), layer.k_norm, shape.norm_eps)
            rotated = torch.cat((query, key), 1)
        rotated = _rotate(rotated, *rotation)
        return rotated[:, : shape.num_heads], rotated[:, shape.num_heads :], value

    def _finish_layer(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer, after attention."""
        hidden = _linear_onto(hidden, attended, layer.output, layer.output_bias)
        normed = F.rms_norm(hidden, (self.architecture.hidden_size,), layer.mlp_norm, self.architecture.norm_eps)
        gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return _linear_onto(hidden, F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, (self.architecture.hidden_size,), self.weights.norm, self.architecture.norm_eps)
        return F.linear(normed, self.weights.head)

    def _mask(self, positions: Tensor, num_columns: int) -> Tensor:
        """(N, L) float32: 0 on the columns that position `n` may read, -inf after it."""
        is_readable = self._columns[:num_columns] <= positions.unsqueeze(1)
        return torch.where(is_readable, 0.0, -torch.inf)

    def _rotary_tables(self, model_config: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every position, (columns, 1, 2, head_dim / 2), from `transformers`' own class.

        sin is negated in the first half, where rotate_half negates.
        """
        rotary = ROTARY_CLASSES[self.architecture.model_type](model_config)
        positions = torch.arange(self.num_columns)
        if self.architecture.rope_limit is not None:  # columns beyond it exist for padding only
            positions = positions.clamp_max(self.architecture.rope_limit - 1)
        cos, sin = rotary(torch.zeros((), dtype=dtype), positions[None])
        if cos.shape[-1] != self.architecture.head_dim:
            raise ModelError(
                f"the torch engine does not implement rotary embeddings of a part of each head ({cos.shape[-1]} of"
                f" {self.architecture.head_dim}), which this {self.architecture.model_type} model uses."
            )
        shape = (self.num_columns, 1, 2, self.architecture.head_dim // 2)
        sign = torch.tensor([[-1.0], [1.0]], dtype=dtype)
        return cos[0].reshape(shape).to(self.device), (sin[0].reshape(shape) * sign).to(self.device)


def _rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary position embedding of (N, H, head_dim): x * cos + rotate_half(x) * sin, its halves swapped by one flip."""
    halves = heads.reshape(*heads.shape[:2], 2, -1)
    return torch.addcmul(halves * cos, halves.flip(2), signed_sin).view(heads.shape)


def _attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor) -> Tensor:
    """softmax(query keysᵀ / sqrt(head_dim) + mask) values, the softmax in float32.

    Not `scaled_dot_product_attention`: with one query a row that takes 2 to 3 times as long on a CPU.

    Args:
        query: (B, Q, head_dim).
        keys, values: each a sequence of blocks (B, columns, head_dim), `L` columns in all.
        mask: float32, broadcast to (B, Q, L).

    Returns:
        (B, Q, head_dim).
    """
    scores = [torch.bmm(query, block.transpose(1, 2)) for block in keys]
    scale = query.shape[-1] ** -0.5
    weights = torch.add(mask, torch.cat(scores, -1), alpha=scale).softmax(-1).to(query.dtype)
    if len(values) == 1:
        return torch.bmm(weights, values[0])
    # By blocks and in one piece, like the values.
    weights = weights.view(*weights.shape[:2], len(values), -1).permute(2, 0, 1, 3).contiguous()
    attended = torch.bmm(weights[0], values[0])
    for block_weights, block in zip(weights[1:], values[1:], strict=True):
        attended.baddbmm_(block_weights, block)
    return attended


def _linear_onto(residual: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual + inputs weightᵀ (+ bias)."""
    total = torch.addmm(residual, inputs, weight.t())
    return total if bias is None else total + bias


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
