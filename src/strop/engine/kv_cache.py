"""Keys and values of every conversation, in a fixed number of slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.engine.weights import Architecture

KV_STEP = 128  # decode reads a whole number of these columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A copy of the first columns of one slot. Shapes (layers, blocks, kv_heads, columns of a block, head_dim)."""

    keys: Tensor
    values: Tensor


class KvCache:
    """Column `p` of a slot holds position `p` of its conversation; which columns are in use, callers know.

    It is stored by blocks of columns, (layers, blocks, slots, kv_heads, columns of a block, head_dim), because a batched
    product on a CPU is 2.5 times slower unless its operands lie in one piece: 64 rows over 192 columns of 4 layers took
    4.6 ms by slots and 1.9 ms by blocks. On an accelerator one block holds all columns.
    """

    def __init__(
        self, architecture: Architecture, *, dtype: torch.dtype, device: torch.device, num_slots: int, num_columns: int
    ) -> None:
        self.num_slots = num_slots
        self.num_columns = -(-num_columns // KV_STEP) * KV_STEP
        self.block = KV_STEP if device.type == "cpu" else self.num_columns
        shape = (architecture.num_layers, self.num_columns // self.block, num_slots, architecture.num_kv_heads)
        self.keys = torch.zeros(*shape, self.block, architecture.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._forget_loans()

    def loan(self, slot: int) -> tuple[int, int]:
        """A slot whose first columns are the same as those of `slot`, and how many: rollouts of a prompt may read it there."""
        return self._lender[slot], self._borrowed[slot]

    def note_write(self, slot: int, column: int) -> None:
        """Column `column` of `slot` is about to change: from there on nobody reads it for another's, nor another's for it."""
        self._borrowed[slot] = min(self._borrowed[slot], column)
        if column < self._lent[slot]:
            self._lent[slot] = column
            for other, lender in enumerate(self._lender):
                if lender == slot:
                    self._borrowed[other] = min(self._borrowed[other], column)

    def place(self, slots: Tensor, columns: Tensor) -> tuple[Tensor | slice, ...]:
        """Where column `columns[n]` of slot `slots[n]` is, in the cache of one layer; both (N,) int64."""
        return columns // self.block, slots, slice(None), columns % self.block

    def first_rows(self, cache: Tensor, num_rows: int, num_columns: int) -> list[Tensor]:
        """Blocks (rows * kv_heads, columns of a block, head_dim) of the first columns of the first slots, without a copy."""
        widths = [min(self.block, num_columns - start) for start in range(0, num_columns, self.block)]
        return [block[:num_rows, :, :width].flatten(0, 1) for block, width in zip(cache, widths, strict=False)]

    def in_one_piece(self, cache: Tensor, slots: Tensor, num_columns: int) -> Tensor:
        """(len(slots) * kv_heads, L, head_dim): copies of the first columns of `slots` in the cache of one layer."""
        width = min(self.block, num_columns)
        blocks = cache[: -(-num_columns // self.block), :, :, :width].index_select(1, slots)
        return blocks.permute(1, 2, 0, 3, 4).reshape(-1, len(blocks) * width, blocks.shape[-1])

    def copy_out(self, slot: int, length: int) -> Prefix:
        """The first `length` columns of `slot`, and what else lies in their blocks."""
        place = self._blocks(slot, length)
        return Prefix(keys=self.keys[place].clone(), values=self.values[place].clone())

    def copy_in(self, slot: int, prefix: Prefix, length: int) -> None:
        """Fill the first `length` columns of `slot` from `prefix`; what comes after them in their blocks is lost."""
        self.note_write(slot, 0)
        place = self._blocks(slot, length)
        _, num_blocks, _, width, _ = self.keys[place].shape
        self.keys[place] = prefix.keys[:, :num_blocks, :, :width]
        self.values[place] = prefix.values[:, :num_blocks, :, :width]

    def copy_across(self, source: int, target: int, length: int) -> None:
        """Fill the first `length` columns of slot `target` from slot `source`, as `copy_in` does."""
        self.note_write(target, 0)
        for cache in (self.keys, self.values):
            cache[self._blocks(target, length)] = cache[self._blocks(source, length)]
        lender = self._lender[source] if self._borrowed[source] >= length else source
        self._lender[target], self._borrowed[target] = lender, length
        self._lent[lender] = max(self._lent[lender], length)

    def clear(self) -> None:
        """Zero the cache: what broken weights left behind (nan) would spoil masked columns."""
        self.keys.zero_()
        self.values.zero_()
        self._forget_loans()

    def fill(self, generator: torch.Generator) -> None:
        """Give every slot the same random content, to measure with."""
        for cache in (self.keys, self.values):
            pattern = torch.randn(cache[:, :, :1].shape, generator=generator, dtype=torch.float32)
            cache.copy_(pattern.to(cache.device).expand_as(cache))
        self._forget_loans()

    def _forget_loans(self) -> None:
        self._lender = list(range(self.num_slots))  # of each slot: who has the same first columns
        self._borrowed = [0] * self.num_slots  # how many
        self._lent = [0] * self.num_slots  # the most that anybody has of a slot

    def _blocks(self, slot: int, length: int) -> tuple[slice, slice, int, slice, slice]:
        """Where the blocks of the first `length` columns of `slot` are; of a single block, only those columns."""
        num_blocks = -(-length // self.block)
        columns = slice(length) if num_blocks == 1 else slice(None)
        return slice(None), slice(num_blocks), slot, slice(None), columns
