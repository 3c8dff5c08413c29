"""The input of one step of a decoder, its sizes, and which of them give the same bits in deterministic mode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from strop.engine.torch.kv_cache import KV_STEP

if TYPE_CHECKING:
    from strop.engine.torch.decoder import Decoder
    from strop.engine.torch.truncation import DrawLimits


CHUNK_MAX = 128  # largest number of tokens of a prefill chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a prompt or an observation: `ids` from position `start` of `slot`, whose earlier columns are computed."""

    slot: int
    start: int
    ids: Sequence[int]  # at most CHUNK_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The last token of one conversation, and how the token after it is drawn. The rows of a step are in order of slots."""

    slot: int
    id: int
    position: int
    uniform: float = 0.0
    temperature: float = 1.0
    banned: Sequence[int] = ()  # ids that must not be drawn
    limits: DrawLimits | None = None  # None: the whole distribution, as in training


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The sizes in which a step is computed. Sizes above the content are padded."""

    num_tokens: int  # of the products over all tokens
    num_rows: int  # of the products over the rows; at most num_tokens
    num_slots: int  # whose caches the rows' attention covers
    num_columns: int  # of each slot that the rows' attention reads
    granule: int = 0  # multiples of this number of slots may be attended to separately; 0: only all of them


_log = logging.getLogger(__name__)
_MAX_COLUMN_SIZES = 20
_MAX_ROW_SIZES, _ROW_STEP = 8, 8
# oneDNN generates code for every size of every weight's shape and keeps it: 0.6 MiB each, five shapes in SmolLM2-135M.
_MAX_PRODUCT_SIZES, _CHUNK_SIZES = 3, 3  # of rows, and of chunk tokens next to all rows
CHUNK_BUDGET = 256  # tokens of prompts and observations in one step, next to the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The allowed sizes of a step, each ascending. The largest hold all slots and columns."""

    tokens: tuple[int, ...]  # of the products over rows and chunks
    slots: tuple[int, ...]  # that the rows' attention covers
    columns: tuple[int, ...]  # of each slot that it reads
    can_mix: bool  # chunks may be computed in one step with rows
    is_invariant: bool  # a row's bits depend neither on its slot nor on the size chosen

    def shape(self, *, num_rows: int, num_chunk_tokens: int, num_slots: int, num_columns: int) -> StepShape:
        """Return the smallest sizes that hold the content. A single chunk keeps its own size, unless chunks can be mixed."""
        num_tokens = num_rows + num_chunk_tokens
        return StepShape(
            num_tokens=_covering(self.tokens, num_tokens) if num_rows or self.can_mix else num_tokens,
            num_rows=_covering(self.tokens, num_rows) if num_rows else 0,
            num_slots=_covering(self.slots, num_slots),
            num_columns=_covering(self.columns, num_columns),
            granule=self._granule,
        )

    @property
    def _granule(self) -> int:
        """The smallest number of slots, if all its multiples are allowed."""
        smallest, largest = self.slots[0], self.slots[-1]
        return smallest if self.slots == tuple(range(smallest, largest + 1, smallest)) else 0

    def slots_covering(self, num_slots: int) -> int:
        return _covering(self.slots, num_slots)


def _covering(sizes: Sequence[int], number: int) -> int:
    return next(size for size in sizes if size >= number)


def all_sizes(decoder: Decoder) -> StepSizes:
    """Return the candidate sizes: at most 8 of slots, 3 of rows, 3 of chunk tokens next to all rows, 20 KV lengths."""
    slots = _evenly_up_to(decoder.num_slots, _ROW_STEP, _MAX_ROW_SIZES)
    rows = _evenly_up_to(decoder.num_slots, _ROW_STEP, _MAX_PRODUCT_SIZES)
    chunk_sizes = _evenly_up_to(CHUNK_BUDGET, _ROW_STEP, _CHUNK_SIZES)
    return StepSizes(
        tokens=(*rows, *(rows[-1] + size for size in chunk_sizes)),
        slots=slots,
        columns=_evenly_up_to(decoder.num_columns, KV_STEP, _MAX_COLUMN_SIZES),
        can_mix=True,
        is_invariant=False,
    )


def _evenly_up_to(largest: int, unit: int, max_sizes: int) -> tuple[int, ...]:
    """Multiples of a multiple of `unit` below `largest`, and `largest`."""
    step = -(-largest // (max_sizes * unit)) * unit
    return (*range(step, largest, step), largest)


@torch.inference_mode()
def invariant_sizes(decoder: Decoder) -> StepSizes:
    """Return the sizes of `all_sizes` whose logits equal, bit for bit and in every row, the first row of the largest size.

    Every slot is given the same content, so all rows of all sizes should agree. Kernels are chosen by shape, not by value,
    so weights of any later version behave alike, and all layers have one shape, so that two are enough: the last one computes
    its products for rows alone. The weights held now must be real ones, since zeros agree always. The KV cache is used for it
    and empty afterwards.
    """
    every = all_sizes(decoder)
    most_rows, most_columns = decoder.num_slots, decoder.num_columns
    decoder.cache.fill(torch.Generator().manual_seed(0))
    position = min(KV_STEP, most_columns) * 2 // 3

    def logits(slots: Sequence[int], num_tokens: int, num_slots: int, num_columns: int) -> torch.Tensor:
        rows = [Row(slot=slot, id=0, position=position) for slot in slots]
        num_rows = min(num_tokens, most_rows)
        shape = StepShape(num_tokens=num_tokens, num_rows=num_rows, num_slots=num_slots, num_columns=num_columns)
        return decoder.step(rows, (), shape, num_layers=2)

    reference = logits(range(most_rows), most_rows, most_rows, most_columns)[:1]

    def agreeing(sizes: Sequence[int], of_size: Callable[[int], torch.Tensor]) -> tuple[int, ...]:
        return tuple(size for size in sizes if torch.equal(found := of_size(size), reference.expand_as(found)))

    tokens = agreeing(every.tokens, lambda size: logits(range(min(size, most_rows)), size, most_rows, most_columns))
    slots = agreeing(every.slots[:-1], lambda size: logits(range(size), most_rows, size, most_columns))
    columns = agreeing(every.columns[:-1], lambda size: logits(range(most_rows), most_rows, most_rows, size))
    decoder.cache.clear()
    largest = every.tokens[-1]
    sizes = StepSizes(
        tokens=tokens if largest in tokens else tuple(sorted({*(size for size in tokens if size < most_rows), most_rows})),
        slots=(*slots, most_rows),
        columns=(*columns, most_columns),
        can_mix=largest in tokens,
        is_invariant=most_rows in tokens,
    )
    _log.debug("steps give equal bits with %s", sizes)
    if not sizes.is_invariant:
        _log.warning(
            "deterministic mode: on this machine the rows of one decode step differ in their bits although their content is"
            " equal; completions may depend on the slot they get"
        )
    return sizes
