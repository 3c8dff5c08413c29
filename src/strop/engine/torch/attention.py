"""A layer's attention over the KV cache: what happens between its first product, of queries, keys and values, and its second.

With torch's operators, everywhere. `strop.engine.torch.cpu.kernels` has a class with the same methods and compiled kernels, for
machines that allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engine.model_directory import Architecture
from strop.engine.torch.kv_cache import CHUNK_MAX, KV_STEP, Chunk, KvCache, Row, StepShape
from strop.engine.torch.weights import LayerWeights

_CHUNK_SIZES = (32, CHUNK_MAX)  # attention pads a chunk to the next of these: code is kept for every size

Tables = tuple[Tensor, Tensor]  # cos and signed sin of every position, (positions, head_dim): the first half of sin is negated


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of one step, rows first, then chunks, then padding."""

    positions: Tensor  # (N,) int64
    slots: Tensor  # (N,) int64
    lenders: Tensor  # (N,) int64: slots that hold the same first columns as each token's own
    lent: Tensor  # (N,) int64: how many
    num_rows: int
    num_real: int  # the rest is padding, of which nothing is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _AlikeChunks:
    """Chunks of one padded size `C` that read equally many columns: they are attended to together."""

    slots: Tensor  # (chunks,)
    tokens: Tensor  # (chunks, C): where the chunks' tokens are among the step's; 0 for padding
    real: Tensor  # those of its chunks * C places that are no padding
    real_tokens: Tensor  # `tokens` there
    num_columns: int
    mask: Tensor  # (chunks * kv_heads, heads that share keys * C, L), in the engine's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowsOfSlots:
    """Rows of different slots: they are attended to together."""

    slots: Tensor  # (rows,)
    mask: Tensor  # (slots * kv_heads, 1, L)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPlan:
    num_real: int
    place: tuple[Tensor | slice, ...]  # of keys and values
    rotation: tuple[Tensor, Tensor]
    rows: tuple[_RowsOfSlots, ...]  # the last tokens, then drafts by their distance from them
    alike: tuple[_AlikeChunks, ...]
    num_slots: int  # whose caches the rows' attention covers
    num_columns: int  # of each that it reads


class TorchAttention:
    """With torch's operators: the rows of all slots in one batched product a block of columns, chunks of one size together.

    A plan is made once for each step; `read` uses it layer by layer.
    """

    def __init__(self, cache: KvCache, architecture: Architecture, tables: Tables) -> None:
        self._cache, self._architecture = cache, architecture
        device = cache.keys.device
        self._cos, self._sin = (table.view(len(table), 1, 2, -1) for table in tables)
        self._columns = torch.arange(cache.num_columns, device=device)
        self._device = device

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last axis of (N, hidden). torch's own on a CPU is slower, and rounds only after the weight."""
        eps = self._architecture.norm_eps
        if hidden.device.type != "cpu":
            return F.rms_norm(hidden, weight.shape, weight, eps)
        full = hidden.float()
        scale = torch.linalg.vecdot(full, full).mul_(1 / len(weight)).add_(eps).rsqrt_()
        normed: Tensor = (full * scale.unsqueeze(1)).to(hidden.dtype).mul_(weight)
        return normed

    def plan(self, tokens: Tokens, rows: Sequence[Row], chunks: Sequence[Chunk], shape: StepShape) -> TorchPlan:
        starts = [place for place, row in enumerate(rows) if not place or row.slot <= rows[place - 1].slot]
        parts = [slice(start, stop) for start, stop in pairwise([*starts, len(rows)])]
        return TorchPlan(
            num_real=tokens.num_real,
            place=self._cache.place(tokens.slots[: tokens.num_real], tokens.positions[: tokens.num_real]),
            rotation=(self._cos[tokens.positions], self._sin[tokens.positions]),
            rows=tuple(self._rows_of_slots(tokens, part, shape) for part in parts),
            alike=self._alike(chunks, tokens.num_rows),
            num_slots=shape.num_slots,
            num_columns=shape.num_columns,
        )

    def plan_slots(self, tokens: Tokens, num_columns: int) -> TorchPlan:
        """Attend from one token of each of the first slots. The operations depend only on the sizes."""
        return TorchPlan(
            num_real=tokens.num_real,
            place=self._cache.place(tokens.slots, tokens.positions),
            rotation=(self._cos[tokens.positions], self._sin[tokens.positions]),
            rows=(_RowsOfSlots(slots=tokens.slots, mask=self._row_mask(tokens.positions, num_columns)),),
            alike=(),
            num_slots=len(tokens.slots),
            num_columns=num_columns,
        )

    def read(self, layer: LayerWeights, index: int, qkv: Tensor, plan: TorchPlan, *, with_chunks: bool) -> Tensor:
        """Keep the keys and values of layer `index` in the cache; give what the queries read.

        Args:
            qkv: (N, (heads + 2 kv_heads) * head_dim), may be overwritten.
            with_chunks: else only the rows are wanted.

        Returns:
            (at most N, heads * head_dim): of the rows at least, and of all that is real with chunks.
        """
        keys, values = self._cache.keys[index], self._cache.values[index]
        query, key, value = self._turned(layer, qkv, plan.rotation)
        keys[plan.place] = key[: plan.num_real]
        values[plan.place] = value[: plan.num_real]
        num_rows, parts = 0, [query.new_zeros(0, query.shape[1] * query.shape[2])]
        for part in plan.rows:
            parts.append(self._attend_rows(query[num_rows : num_rows + len(part.slots)], keys, values, part, plan))
            num_rows += len(part.slots)
        rows = torch.cat(parts)
        if not with_chunks or not plan.alike:
            return rows
        attended = query.new_zeros(len(query), rows.shape[1])
        attended[:num_rows] = rows
        for alike in plan.alike:
            attended[alike.real_tokens] = self._attend_chunks(query, keys, values, alike)[alike.real]
        return attended

    def _turned(self, layer: LayerWeights, qkv: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (N, heads, head_dim), keys and values (N, kv_heads, head_dim), turned to their positions."""
        shape = self._architecture
        num_rotated = shape.num_heads + shape.num_kv_heads
        qkv = qkv.view(len(qkv), -1, shape.head_dim)
        rotated, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = rotated[:, : shape.num_heads], rotated[:, shape.num_heads :]
            query = F.rms_norm(query, (shape.head_dim,), layer.q_norm, shape.norm_eps)
            key = F.rms_norm(key, (shape.head_dim,), layer.k_norm, shape.norm_eps)
            rotated = torch.cat((query, key), 1)
        rotated = _rotate(rotated, *rotation)
        return rotated[:, : shape.num_heads], rotated[:, shape.num_heads :], value

    def _rows_of_slots(self, tokens: Tokens, part: slice, shape: StepShape) -> _RowsOfSlots:
        slots = tokens.slots[part]
        positions = torch.zeros(shape.num_slots, dtype=torch.int64, device=self._device)
        positions[slots] = tokens.positions[part]
        return _RowsOfSlots(slots=slots, mask=self._row_mask(positions, shape.num_columns))

    def _alike(self, chunks: Sequence[Chunk], start: int) -> tuple[_AlikeChunks, ...]:
        """The chunks, whose tokens begin at `start` among the step's, by their sizes."""
        by_size: dict[tuple[int, int], list[tuple[Chunk, int]]] = {}
        for chunk in chunks:
            size = next(size for size in _CHUNK_SIZES if size >= len(chunk.ids))
            num_columns = -(-(chunk.start + len(chunk.ids)) // KV_STEP) * KV_STEP
            by_size.setdefault((size, num_columns), []).append((chunk, start))
            start += len(chunk.ids)
        return tuple(self._placed(placed, *sizes) for sizes, placed in by_size.items())

    def _placed(self, placed: Sequence[tuple[Chunk, int]], size: int, num_columns: int) -> _AlikeChunks:
        real = [number * size + offset for number, (chunk, _) in enumerate(placed) for offset in range(len(chunk.ids))]
        real_tokens = [start + offset for chunk, start in placed for offset in range(len(chunk.ids))]
        where = torch.tensor((real, real_tokens), device=self._device)
        slots, firsts = torch.tensor([(chunk.slot, chunk.start) for chunk, _ in placed], device=self._device).unbind(1)
        tokens = torch.zeros(len(placed) * size, dtype=torch.int64, device=self._device)
        tokens[where[0]] = where[1]
        positions = firsts.unsqueeze(1) + torch.arange(size, device=self._device)
        mask = self._mask(positions.flatten(), num_columns).to(self._cache.keys.dtype)
        num_kv_heads = self._architecture.num_kv_heads
        num_shared = self._architecture.num_heads // num_kv_heads
        mask = mask.view(len(placed), 1, 1, size, num_columns).expand(-1, num_kv_heads, num_shared, -1, -1)
        return _AlikeChunks(
            slots=slots,
            tokens=tokens.view(-1, size),
            real=where[0],
            real_tokens=where[1],
            num_columns=num_columns,
            mask=mask.reshape(len(placed) * num_kv_heads, num_shared * size, num_columns),
        )

    def _attend_rows(self, query: Tensor, keys: Tensor, values: Tensor, of: _RowsOfSlots, plan: TorchPlan) -> Tensor:
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = self._architecture.num_kv_heads
        is_dense = num_rows == plan.num_slots
        by_slot = query if is_dense else query.new_zeros(plan.num_slots, num_heads, head_dim)
        if not is_dense:
            by_slot[of.slots] = query
        grouped = by_slot.reshape(plan.num_slots * num_kv_heads, -1, head_dim)
        key_blocks = self._cache.first_rows(keys, plan.num_slots, plan.num_columns)
        value_blocks = self._cache.first_rows(values, plan.num_slots, plan.num_columns)
        attended = _attend(grouped, key_blocks, value_blocks, of.mask).view(plan.num_slots, -1)
        return attended if is_dense else attended[of.slots]

    def _attend_chunks(self, query: Tensor, keys: Tensor, values: Tensor, chunks: _AlikeChunks) -> Tensor:
        """(chunks * C, heads * head_dim)."""
        num_chunks, size = chunks.tokens.shape
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = self._architecture.num_kv_heads
        # Heads that read the same keys are rows of one product.
        grouped = query[chunks.tokens].view(num_chunks, size, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        grouped = grouped.reshape(num_chunks * num_kv_heads, -1, head_dim)
        own_keys = self._cache.in_one_piece(keys, chunks.slots, chunks.num_columns)
        own_values = self._cache.in_one_piece(values, chunks.slots, chunks.num_columns)
        scores = torch.baddbmm(chunks.mask, grouped, own_keys.transpose(1, 2), alpha=head_dim**-0.5)
        attended = torch.bmm(scores.softmax(-1), own_values)  # torch's softmax of bfloat16 is computed in float32
        return attended.view(num_chunks, num_heads, size, head_dim).transpose(1, 2).reshape(num_chunks * size, -1)

    def _row_mask(self, positions: Tensor, num_columns: int) -> Tensor:
        """(slots * kv_heads, 1, L) float32, from a position of each slot."""
        num_kv_heads = self._architecture.num_kv_heads
        mask = self._mask(positions, num_columns).unsqueeze(1).expand(-1, num_kv_heads, -1)
        return mask.reshape(len(positions) * num_kv_heads, 1, num_columns)

    def _mask(self, positions: Tensor, num_columns: int) -> Tensor:
        """(N, L) float32: 0 on the columns that position `n` may read, -inf after it."""
        is_hidden = self._columns[:num_columns] > positions.unsqueeze(1)
        return torch.zeros(is_hidden.shape, device=self._device).masked_fill_(is_hidden, -torch.inf)


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
