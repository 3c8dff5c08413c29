"""What one step of a decoder computes, and in which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_MAX = 128  # a prefill goes in chunks of at most so many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a prompt or an observation: `ids` at positions `start` .. of `slot`, whose earlier columns are there."""

    slot: int
    start: int
    ids: Sequence[int]  # at most CHUNK_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One token of each of some conversations, to be followed by another. Lists of equal length, slots ascending."""

    slots: Sequence[int]
    ids: Sequence[int]
    positions: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """In which sizes a step is computed; what exceeds its content is padding."""

    num_tokens: int  # of the products over all tokens
    num_rows: int  # of the products over the rows alone; at most num_tokens
    num_slots: int  # whose caches the rows' attention covers
    num_columns: int  # of each slot that the rows' attention reads
    granule: int = 0  # so many neighbouring slots, or a multiple, may be attended to by themselves; 0: only all of them
