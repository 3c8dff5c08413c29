"""Rows of tokens laid end to end, without padding, what a row shares with the one before it only once; and their attention.

The layers of a model treat every token by itself, but for attention; so they may run over all tokens of a micro-batch as one
long row. Attention then takes each row apart: its queries are its own tokens, its keys also those it shares with rows before.
So no product is spent on padding, on tokens of other rows, or a second time on the prompt of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from strop.errors import ModelError

ATTENTION = "strop_rows"  # its name in the model library
MIN_SHARED = 16  # tokens; below, computing them again costs less than gathering their keys and values for each row
# A row behind a shared beginning needs a mask, with which kernels compute the half of its own scores that causal ones leave
# out: 2 h L^2 operations a layer of width h for L own tokens, against 24 h^2 for each shared one. Here h is 1024.
_MOST_OWN_SQUARED = 12 * 1024
UNIT = 16  # tokens; for each number of rows that is no multiple of it, products compile kernels, and keep them
_LEAST_FILLED = 32  # tokens of a row
_UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some models ask of their attention, and ours would leave out


@dataclass(frozen=True, slots=True)
class _Piece:
    """The first `length` tokens of what `row` has for itself."""

    row: int
    length: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the tokens of rows stand when they are laid end to end."""

    ids: Tensor  # int64 (1, total), with some at the end that no place points to
    positions: Tensor  # int64 (1, total), of each token in its row
    places: Tensor  # int64 (n, T), where each token of a row stands among `total`; 0 beyond the row
    sizes: tuple[int, ...]  # of each row, how many tokens it has for itself
    shared: tuple[tuple[_Piece, ...], ...]  # of each row, what comes before its own tokens
    masks: dict[tuple[int, torch.dtype, int | None], Tensor] = field(default_factory=dict)  # made once for all layers

    def mask(self, row: int, like: Tensor, window: int | None) -> Tensor:
        key = (row, like.dtype, window)
        if key not in self.masks:
            num_shared = sum(piece.length for piece in self.shared[row])
            self.masks[key] = _causal_mask(self.sizes[row], num_shared, like, window)
        return self.masks[key]


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
    shared: list[tuple[_Piece, ...]] = []
    start = 0
    of_rows = zip(lengths.tolist(), shared_lengths(ids, lengths), strict=True)
    for row, (length, num_shared) in enumerate(of_rows):
        if num_shared:
            places[row, :num_shared] = places[row - 1, :num_shared]
            shared.append(_first(num_shared, (*shared[-1], _Piece(row - 1, sizes[-1]))))
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
    return RowLayout(
        ids=torch.cat([ids[is_own], torch.zeros_like(more)])[None],
        positions=torch.cat([columns.expand(ids.shape)[is_own], lengths[-1] + more])[None],
        places=places,
        sizes=tuple(sizes),
        shared=tuple(shared),
    )


def _first(length: int, pieces: tuple[_Piece, ...]) -> tuple[_Piece, ...]:
    """The first `length` tokens of `pieces`."""
    taken = []
    for piece in pieces:
        if length <= 0:
            break
        if piece.length:
            taken.append(_Piece(piece.row, min(piece.length, length)))
            length -= piece.length
    return tuple(taken)


def use_row_attention(model: PreTrainedModel) -> None:
    """Let `model` attend by `row_attention` from now on, which without a layout is plain causal attention.

    Raises:
        ModelError: the model does not let its attention be chosen.
    """
    try:
        model.set_attn_implementation(ATTENTION)
    except ValueError as error:
        raise ModelError(f"{type(model).__name__}: cannot be trained here: {error}") from error


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: RowLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What the model library calls in each layer: heads (n, H, T, D) -> (n, T, H, D).

    Args:
        layout: of the tokens, all in one row (n = 1); without it rows are padded on the right, and every row is its own.
        options: of the model library; attention has no dropout here, as the trainer has none.
    """
    if attention_mask is not None or any(options.get(name) is not None for name in _UNKNOWN):
        raise ModelError(
            f"{type(module).__name__}: asks for more of its attention than to be causal; it cannot be trained here"
        )
    if layout is None:
        mask = None if sliding_window is None else _causal_mask(query.shape[2], 0, query, sliding_window)
        return _attend(query, key, value, mask, scaling).transpose(1, 2), None
    sizes = list(layout.sizes)
    queries, keys, values = (torch.split(heads, sizes, dim=2) for heads in (query, key, value))
    outputs = []
    for row, pieces in enumerate(layout.shared):
        if not sizes[row]:
            continue
        needs_mask = pieces or (sliding_window is not None and sizes[row] > sliding_window)
        outputs.append(
            _attend(
                queries[row],
                _behind(pieces, keys, row),
                _behind(pieces, values, row),
                layout.mask(row, query, sliding_window) if needs_mask else None,
                scaling,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _behind(pieces: tuple[_Piece, ...], heads: tuple[Tensor, ...], row: int) -> Tensor:
    """The heads of a row's own tokens behind those of what it shares."""
    if not pieces:
        return heads[row]
    return torch.cat([*(heads[piece.row][:, :, : piece.length] for piece in pieces), heads[row]], dim=2)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Without a mask, causal; a mask (`_causal_mask`) may be of more queries and keys than there are."""
    num_queries_a_key, length = query.shape[1] // key.shape[1], query.shape[2]
    num_queries, num_keys = mask.shape if mask is not None else (_filled(length, query),) * 2
    query, key, value = _fill(query, num_queries), _fill(key, num_keys), _fill(value, num_keys)
    if mask is not None and query.is_cuda:  # only its plain kernel, which holds all scores, takes a mask and grouped heads
        key, value = (heads.repeat_interleave(num_queries_a_key, dim=1) for heads in (key, value))
    is_grouped = key.shape[1] != query.shape[1]
    outputs = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
    )
    return outputs[:, :, :length]


def _filled(length: int, like: Tensor) -> int:
    """What `length` is filled up to: on a CPU in bfloat16, so that there are eight lengths an octave.

    The backward pass compiles kernels for each number of queries and keys, 2 to 5 MB, and keeps them as long as the process
    lives: rollouts of a hundred lengths took 0.4 GB.
    """
    if like.device.type != "cpu" or like.dtype is torch.float32:
        return length
    unit = max(_LEAST_FILLED, 2 ** ((length - 1).bit_length() - 4)) if length else 1
    return -(-length // unit) * unit


def _fill(heads: Tensor, length: int) -> Tensor:
    """(n, H, T, D) -> (n, H, length, D)."""
    return heads if heads.shape[2] == length else F.pad(heads, (0, 0, 0, length - heads.shape[2]))


def _causal_mask(num_queries: int, num_before: int, like: Tensor, window: int | None) -> Tensor:
    """To be added to scores (queries, before + queries): queries stand after what is before them, and see up to `window`.

    Both are filled up at their ends, where no query looks that is there.
    """
    shape = _filled(num_queries, like), _filled(num_before + num_queries, like)
    is_seen = torch.ones(shape, dtype=torch.bool, device=like.device).tril(num_before)
    if window is not None:
        is_seen = is_seen.triu(num_before - window + 1)
    is_seen[num_queries:, 0] = True  # so that queries that are not there see something
    return torch.zeros(shape, dtype=like.dtype, device=like.device).masked_fill(~is_seen, -torch.inf)


AttentionInterface.register(ATTENTION, row_attention)
