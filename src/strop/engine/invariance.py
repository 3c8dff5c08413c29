"""Measures which sizes of a decode step give the same bits, so that deterministic mode need not always use the largest."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from strop.engine.decoder import KV_STEP, Decoder

_log = logging.getLogger(__name__)
_MAX_COLUMN_SIZES = 20
_MAX_ROW_SIZES, _ROW_STEP = 8, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The row counts and KV lengths in which a decode step may be computed, ascending; the largest hold everything."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    is_invariant: bool  # a row's bits depend neither on its slot nor on the size chosen

    def covering(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """The smallest sizes that hold `num_rows` and `num_columns`."""
        return (
            next(size for size in self.rows if size >= num_rows),
            next(size for size in self.columns if size >= num_columns),
        )


def all_sizes(decoder: Decoder) -> StepSizes:
    """The sizes worth having: at most 8 row counts, multiples of 8, and at most 20 KV lengths, multiples of `KV_STEP`."""
    return StepSizes(
        rows=_evenly_up_to(decoder.num_slots, _ROW_STEP, _MAX_ROW_SIZES),
        columns=_evenly_up_to(decoder.num_columns, KV_STEP, _MAX_COLUMN_SIZES),
        is_invariant=False,
    )


def _evenly_up_to(largest: int, unit: int, max_sizes: int) -> tuple[int, ...]:
    """Multiples of a multiple of `unit` below `largest`, and `largest`."""
    step = -(-largest // (max_sizes * unit)) * unit
    return (*range(step, largest, step), largest)


@torch.inference_mode()
def invariant_sizes(decoder: Decoder) -> StepSizes:
    """Those of `all_sizes` whose logits equal, bit for bit and in every row, the first row of the largest size.

    Every slot is given the same content, so all rows of all sizes should agree. Kernels are chosen by shape, not by value,
    so weights of any later version behave alike; the weights held now must be real ones, since zeros agree always.
    The KV cache is used for it and empty afterwards.
    """
    candidates = all_sizes(decoder)
    decoder.fill(torch.Generator().manual_seed(0))
    position = min(KV_STEP, decoder.num_columns) * 2 // 3

    def agrees(num_rows: int, num_columns: int) -> bool:
        logits = _decode_alike(decoder, num_rows, position, num_columns)
        return torch.equal(logits, reference.expand_as(logits))

    reference = _decode_alike(decoder, decoder.num_slots, position, decoder.num_columns)[:1]
    sizes = StepSizes(
        rows=tuple(size for size in candidates.rows if size == decoder.num_slots or agrees(size, candidates.columns[0])),
        columns=tuple(size for size in candidates.columns if size == decoder.num_columns or agrees(decoder.num_slots, size)),
        is_invariant=agrees(decoder.num_slots, decoder.num_columns),
    )
    decoder.clear()
    _log.debug("decode steps give equal bits with rows %s and columns %s", sizes.rows, sizes.columns)
    if not sizes.is_invariant:
        _log.warning(
            "deterministic mode: on this machine the rows of one decode step differ in their bits although their content is"
            " equal; completions may depend on the slot they get"
        )
    return sizes


def _decode_alike(decoder: Decoder, num_rows: int, position: int, num_columns: int) -> torch.Tensor:
    ids = torch.zeros(num_rows, dtype=torch.int64, device=decoder.device)
    return decoder.decode(ids, ids + position, num_columns)
