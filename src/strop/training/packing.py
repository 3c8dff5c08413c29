"""Rows of tokens laid end to end, without padding; what a row shares with the one before it stands there once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

MIN_SHARED = 16  # tokens; below, computing them again costs less than attending to them apart
# On CUDA a row behind a shared beginning needs a mask, with which kernels compute the half of its own scores that causal ones
# leave out: 2 h L^2 operations a layer of width h for L own tokens, against 24 h^2 for each shared one. Here h is 1024.
# One rule for all devices: micro-batches are a function of the batch alone.
_MOST_OWN_SQUARED = 12 * 1024
UNIT = 16  # tokens; for each number of rows that is no multiple of it, products compile kernels, and keep them


@dataclass(frozen=True, slots=True)
class Piece:
    """The first `length` tokens of what `row` has for itself."""

    row: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Tokens that attend to others: a row to itself, causally, or rows to all of a piece that they share."""

    queries: slice
    keys: slice
    is_own: bool


@dataclass(frozen=True, slots=True)
class Waves:
    """Reads in the order in which threads compute them: of a wave no two have a query, or a key, in common."""

    reads: Tensor  # int64 (R, 5): the first query, how many, the first key, how many, whether it is a row's own
    starts: Tensor  # int64 (waves + 1,), of each wave the first of its reads, and how many there are in all

    @classmethod
    def of(cls, reads: Sequence[Read]) -> Waves:
        """First those of rows to themselves, one of each token; then each read after those before it that it touches."""
        waves: list[list[Read]] = [[each for each in reads if each.is_own]]
        for read in (each for each in reads if not each.is_own):
            touched = (number for number, wave in enumerate(waves[1:], start=1) if any(_touch(read, other) for other in wave))
            number = max(touched, default=0) + 1
            if number == len(waves):
                waves.append([])
            waves[number].append(read)
        rows = [
            [read.queries.start, _length(read.queries), read.keys.start, _length(read.keys), int(read.is_own)]
            for wave in waves  # of a wave, the longest first: the last ones then end at about the same time
            for read in sorted(wave, key=lambda read: -_length(read.queries) * _length(read.keys))
        ]
        return cls(torch.tensor(rows), torch.tensor([0, *accumulate(map(len, waves))]))


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the tokens of rows stand when they are laid end to end."""

    ids: Tensor  # int64 (1, total), with some at the end that no place points to
    positions: Tensor  # int64 (1, total), of each token in its row
    places: Tensor  # int64 (n, T), where each token of a row stands among `total`; 0 beyond the row
    sizes: tuple[int, ...]  # of each row, how many tokens it has for itself
    shared: tuple[tuple[Piece, ...], ...]  # of each row, what comes before its own tokens
    reads: tuple[Read, ...]  # what attends to what: of every row to itself first, then to what rows share
    waves: Waves  # the same reads
    masks: dict[tuple[int, torch.dtype, int | None], Tensor] = field(default_factory=dict)  # made once for all layers

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(size + sum(piece.length for piece in pieces) for size, pieces in zip(self.sizes, self.shared, strict=True))


def shared_lengths(ids: Tensor, lengths: Tensor) -> list[int]:
    """How many of its first tokens each row shares with the row before it; 0 where sharing them would cost more than it saves.

    Args:
        ids: int64 (n, T).
        lengths: int64 (n,), of each row.
    """
    if len(ids) < 2:
        return [0] * len(ids)
    both = torch.minimum(lengths[1:], lengths[:-1])
    is_same = (ids[1:] == ids[:-1]) & (torch.arange(ids.shape[1], device=ids.device) < both[:, None])
    counts = is_same.cumprod(1, dtype=torch.int8).sum(1)
    is_worth_it = (counts >= MIN_SHARED) & ((lengths[1:] - counts) ** 2 <= _MOST_OWN_SQUARED * counts)
    return [0, *(counts * is_worth_it).tolist()]


def lay_out(ids: Tensor, lengths: Tensor) -> RowLayout:
    """Args as of `shared_lengths`. The last row is filled up, with tokens nobody reads, to a multiple of `UNIT` in all.

    For each other number of tokens the products of every layer would compile kernels, and keep them.
    """
    places = torch.zeros(ids.shape, dtype=torch.int64, device=ids.device)
    sizes: list[int] = []
    shared: list[tuple[Piece, ...]] = []
    start = 0
    of_rows = zip(lengths.tolist(), shared_lengths(ids, lengths), strict=True)
    for row, (length, num_shared) in enumerate(of_rows):
        if num_shared:
            places[row, :num_shared] = places[row - 1, :num_shared]
            shared.append(_first(num_shared, (*shared[-1], Piece(row - 1, sizes[-1]))))
        else:
            shared.append(())
        sizes.append(length - num_shared)
        places[row, num_shared:length] = torch.arange(start, start + sizes[-1], device=ids.device)
        start += sizes[-1]
    columns = torch.arange(ids.shape[1], device=ids.device)
    is_own = (columns < lengths[:, None]) & (columns >= (lengths - torch.tensor(sizes, device=ids.device))[:, None])
    num_more = -start % UNIT if start >= UNIT**2 else 0
    sizes[-1] += num_more
    more = torch.arange(num_more, device=ids.device)
    reads = _reads(sizes, shared)
    return RowLayout(
        ids=torch.cat([ids[is_own], torch.zeros_like(more)])[None],
        positions=torch.cat([columns.expand(ids.shape)[is_own], lengths[-1] + more])[None],
        places=places,
        sizes=tuple(sizes),
        shared=tuple(shared),
        reads=reads,
        waves=Waves.of(reads),
    )


def _reads(sizes: Sequence[int], shared: Sequence[tuple[Piece, ...]]) -> tuple[Read, ...]:
    """Rows that stand together and share the same piece read it together."""
    starts = [0, *accumulate(sizes)]
    tokens = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    together: list[Read] = []
    newest: dict[Piece, int] = {}  # where the last read of a piece stands in `together`
    for own, pieces in zip(tokens, shared, strict=True):
        for piece in pieces if own.start < own.stop else ():
            place = newest.get(piece)
            if place is not None and together[place].queries.stop == own.start:
                together[place] = replace(together[place], queries=slice(together[place].queries.start, own.stop))
            else:
                newest[piece] = len(together)
                start = starts[piece.row]
                together.append(Read(queries=own, keys=slice(start, start + piece.length), is_own=False))
    return (*(Read(queries=own, keys=own, is_own=True) for own in tokens if own.start < own.stop), *together)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _touch(one: Read, other: Read) -> bool:
    both = (one.queries, other.queries), (one.keys, other.keys)
    return any(a.start < b.stop and b.start < a.stop for a, b in both)


def _first(length: int, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The first `length` tokens of `pieces`."""
    taken = []
    for piece in pieces:
        if length <= 0:
            break
        if piece.length:
            taken.append(Piece(piece.row, min(piece.length, length)))
            length -= piece.length
    return tuple(taken)
