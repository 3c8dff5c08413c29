"""The layout of rows that are laid end to end, and attention over them.

The layers of a model treat every token by itself, but for attention; so they may run over all tokens of a micro-batch as one
long row. Attention then takes each row apart: its tokens attend to each other, and to those that it shares with rows before.
So no product is spent on padding, on tokens of other rows, or a second time on the prompt of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.errors import ModelError
from strop.training.batch import shared_lengths
from strop.training.cpu.kernels import HEAD_UNIT, MAX_DIM, Kernels, Read, Waves, compiled

if TYPE_CHECKING:
    import transformers

    from strop.training.sharded import SequenceGroup

ATTENTION = "strop_rows"  # its name in the model library
UNIT = 16  # tokens; for each number of rows that is no multiple of it, products compile kernels, and keep them
_LONG = 512  # tokens of a row, above which torch's attention with AVX-512 is faster than that in C for AVX2
_UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some models ask of their attention, and ours would leave out


@dataclass(frozen=True, slots=True)
class Piece:
    """The first `length` tokens of what `row` has for itself."""

    row: int
    length: int


@dataclass(frozen=True)
class RowLayout:
    """Where the tokens of rows stand when they are laid end to end."""

    ids: Tensor  # int64 (1, total), with some at the end that no place points to
    positions: Tensor  # int64 (1, total), of each token in its row
    places: Tensor  # int64 (n, T), where each token of a row stands among `total`; 0 beyond the row
    sizes: tuple[int, ...]  # of each row, how many tokens it has for itself
    shared: tuple[tuple[Piece, ...], ...]  # of each row, what comes before its own tokens
    reads: tuple[Read, ...]  # what attends to what: of every row to itself first, then to what rows share
    group: SequenceGroup | None = None  # the ranks that divide the tokens
    masks: dict[tuple[int, torch.dtype, int | None], Tensor] = field(default_factory=dict)  # made once for all layers

    @cached_property
    def waves(self) -> Waves:
        """The reads in the order of the CPU kernels."""
        return Waves.of(self.reads)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(size + sum(piece.length for piece in pieces) for size, pieces in zip(self.sizes, self.shared, strict=True))


def lay_out(ids: Tensor, lengths: Tensor, group: SequenceGroup | None = None) -> RowLayout:
    """Args as of `shared_lengths`. The last row is padded, with tokens that are never read, to a multiple of `UNIT` in all.

    For each other number of tokens the products of every layer would compile kernels, and keep them. Each rank of `group` has
    as many tokens.
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
    num_more = -start % ((UNIT if start >= UNIT**2 else 1) * (1 if group is None else group.size))
    sizes[-1] += num_more
    more = torch.arange(num_more, device=ids.device)
    return RowLayout(
        ids=torch.cat([ids[is_own], torch.zeros_like(more)])[None],
        positions=torch.cat([columns.expand(ids.shape)[is_own], lengths[-1] + more])[None],
        places=places,
        sizes=tuple(sizes),
        shared=tuple(shared),
        reads=_reads(sizes, shared),
        group=group,
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


def use_row_attention(model: transformers.PreTrainedModel) -> None:
    """Let `model` attend by `row_attention` from now on, which without a layout is plain causal attention.

    Raises:
        ModelError: the model does not let its attention be chosen.
    """
    import transformers

    transformers.AttentionInterface.register(ATTENTION, row_attention)
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

    On a CPU by kernels of our own where the machine can have them, else by torch's in float32 throughout: these are faster than
    its own in bfloat16, which are compiled for each number of queries and keys, and kept as long as the process lives.

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
    if layout.group is not None:
        query, key, value = map(layout.group.to_heads, (query, key, value))
    is_within = sliding_window is None or layout.longest <= sliding_window
    if query.device.type == "cpu" and is_within and query.shape[-1] == value.shape[-1]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        attended: Tensor = _Reads.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    else:
        attended = _attend_rows(query, key, value, layout, scaling, sliding_window).transpose(1, 2)
    return attended if layout.group is None else layout.group.to_tokens(attended), None


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For a layer that is computed again in the backward pass: what its attention gave is kept on a CPU, not computed again.

    Of all that a layer computes, it takes longest for what it holds.

    Returns:
        What the first computation runs in, and what the second does (`context_fn` of `torch.utils.checkpoint`).
    """
    kept: list[tuple[Tensor, Tensor]] = []
    return _Kept(kept, is_again=False), _Kept(kept, is_again=True)


class _Kept(AbstractContextManager[None]):
    """Outputs of attention and its log-normalizers, in the order in which they are computed while this is entered."""

    def __init__(self, kept: list[tuple[Tensor, Tensor]], *, is_again: bool) -> None:
        self._kept, self._is_again, self._num_read = kept, is_again, 0

    def __enter__(self) -> None:
        self._num_read = 0
        self._token = _CURRENT.set(self)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)

    def next(self) -> tuple[Tensor, Tensor] | None:
        """What the first computation gave at this place; None while this is the first."""
        if not self._is_again:
            return None
        self._num_read += 1
        outputs, normalizers = self._kept[self._num_read - 1]
        return outputs.detach(), normalizers

    def add(self, outputs: Tensor, normalizers: Tensor) -> None:
        self._kept.append((outputs.detach(), normalizers))  # or a graph would hold itself through what it gave


_CURRENT: ContextVar[_Kept | None] = ContextVar("kept attention", default=None)


def attention_kernels(query: Tensor, key: Tensor, value: Tensor, longest: int = 0) -> Kernels | None:
    """The compiled attention, if it is made for such heads, this machine can have it, and it is faster there.

    Args:
        longest: tokens of the longest row.
    """
    dim, dtype = query.shape[-1], query.dtype
    fits = (
        all(each.dtype is dtype and each.device.type == "cpu" for each in (query, key, value))
        and dim == value.shape[-1]
        and dim % HEAD_UNIT.get(dtype, 1) == 0
        and dim <= MAX_DIM
        and query.shape[1] % key.shape[1] == 0
    )
    if dtype is torch.float32 and longest > _LONG and torch.backends.cpu.get_cpu_capability() == "AVX512":
        return None
    return compiled(dtype) if fits else None


class _Reads(torch.autograd.Function):
    """Every token attends in each of its reads by itself, and what they give is put together.

    With the log-normalizer n_i of each read i, that of all is n = log sum_i exp(n_i), and the output sum_i exp(n_i - n) o_i.
    Backward, kernels take n and the whole output and then give each read's share of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scale: float) -> Tensor:
        kept = _CURRENT.get()
        before = None if kept is None else kept.next()
        outputs, normalizers = _read_all(query, key, value, layout, scale) if before is None else before
        if kept is not None and before is None:
            kept.add(outputs, normalizers)
        ctx.save_for_backward(query, key, value, outputs, normalizers)
        ctx.layout, ctx.scale = layout, scale
        return outputs

    @staticmethod
    def backward(ctx: Any, to_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, outputs, normalizers = ctx.saved_tensors
        if (kernels := attention_kernels(query, key, value, ctx.layout.longest)) is not None:
            waves = ctx.layout.waves
            heads = kernels.attend_backward(query, key, value, outputs, normalizers, to_outputs, waves, ctx.scale)
            return *heads, None, None
        dtype = query.dtype
        query, key, value = query.float(), key.float(), value.float()
        outputs, to_outputs = outputs.transpose(1, 2).float(), to_outputs.transpose(1, 2).float()
        of_query, of_key, of_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for read in ctx.layout.reads:
            of_queries, of_keys, of_values = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                to_outputs[:, :, read.queries],
                query[:, :, read.queries],
                key[:, :, read.keys],
                value[:, :, read.keys],
                outputs[:, :, read.queries],
                normalizers[:, :, read.queries],
                0.0,
                read.is_own,
                scale=ctx.scale,
            )
            if read.is_own:  # of each token once, and before it is read by others
                of_query[:, :, read.queries] = of_queries
                of_key[:, :, read.keys] = of_keys
                of_value[:, :, read.keys] = of_values
            else:
                of_query[:, :, read.queries] += of_queries
                of_key[:, :, read.keys] += of_keys
                of_value[:, :, read.keys] += of_values
        return of_query.to(dtype), of_key.to(dtype), of_value.to(dtype), None, None


def _read_all(query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs (1, T, H, D) in the precision of `query`, and log-normalizers, float32 (1, H, T)."""
    if (kernels := attention_kernels(query, key, value, layout.longest)) is not None:
        return kernels.attend(query, key, value, layout.waves, scale)
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()
    num_heads, length, width = query.shape[1:]
    outputs = query.new_empty(1, length, num_heads, width)
    normalizers = query.new_empty(1, num_heads, length)
    for read in layout.reads:
        of_read, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, :, read.queries], key[:, :, read.keys], value[:, :, read.keys], 0.0, read.is_own, scale=scale
        )
        here, of_here = outputs[:, read.queries], normalizers[:, :, read.queries]
        of_read = of_read.transpose(1, 2)
        if read.is_own:
            here.copy_(of_read)
            of_here.copy_(normalizer)
        else:
            both = torch.logaddexp(of_here, normalizer)
            here.mul_(_weights(of_here - both)).addcmul_(of_read, _weights(normalizer - both))
            of_here.copy_(both)
    return outputs.to(dtype), normalizers


def _weights(log_weights: Tensor) -> Tensor:
    """(1, H, T) -> (1, T, H, 1)."""
    return log_weights.exp().transpose(1, 2)[..., None]


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scaling: float | None, window: int | None
) -> Tensor:
    """Row by row, those behind a shared beginning with a mask: any device, any window."""
    sizes = list(layout.sizes)
    queries, keys, values = (torch.split(heads, sizes, dim=2) for heads in (query, key, value))
    outputs = []
    for row, pieces in enumerate(layout.shared):
        if not sizes[row]:
            continue
        needs_mask = pieces or (window is not None and sizes[row] > window)
        num_shared = sum(piece.length for piece in pieces)
        mask_of = (row, query.dtype, window)
        if needs_mask and mask_of not in layout.masks:
            layout.masks[mask_of] = _causal_mask(sizes[row], num_shared, query, window)
        mask = layout.masks[mask_of] if needs_mask else None
        own_keys, own_values = _behind(pieces, keys, row), _behind(pieces, values, row)
        outputs.append(_attend(queries[row], own_keys, own_values, mask, scaling))
    return torch.cat(outputs, dim=2)


def _behind(pieces: tuple[Piece, ...], heads: tuple[Tensor, ...], row: int) -> Tensor:
    """The heads of a row's own tokens behind those of what it shares."""
    if not pieces:
        return heads[row]
    return torch.cat([*(heads[piece.row][:, :, : piece.length] for piece in pieces), heads[row]], dim=2)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Without a mask, causal."""
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    num_queries_a_key = query.shape[1] // key.shape[1]
    if mask is not None and query.is_cuda:  # only its plain kernel, which holds all scores, takes a mask and grouped heads
        key, value = (heads.repeat_interleave(num_queries_a_key, dim=1) for heads in (key, value))
    is_grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
    ).to(dtype)


def _causal_mask(num_queries: int, num_before: int, like: Tensor, window: int | None) -> Tensor:
    """To be added to scores (queries, before + queries): queries stand after what is before them, and see up to `window`."""
    dtype = torch.float32 if like.device.type == "cpu" else like.dtype
    is_seen = torch.ones(num_queries, num_before + num_queries, dtype=torch.bool, device=like.device).tril(num_before)
    if window is not None:
        is_seen = is_seen.triu(num_before - window + 1)
    return torch.zeros(is_seen.shape, dtype=dtype, device=like.device).masked_fill(~is_seen, -torch.inf)
