"""Attention over rows of tokens that are laid end to end.

The layers of a model treat every token by itself, but for attention; so they may run over all tokens of a micro-batch as one
long row. Attention then takes each row apart: its tokens attend to each other, and to those that it shares with rows before.
So no product is spent on padding, on tokens of other rows, or a second time on the prompt of a group.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.errors import ModelError
from strop.training.batch import Piece, RowLayout
from strop.training.cpu.kernels import HEAD_UNIT, MAX_DIM, Kernels, compiled

if TYPE_CHECKING:
    import transformers

ATTENTION = "strop_rows"  # its name in the model library
_LONG = 512  # tokens of a row, above which torch's attention with AVX-512 is faster than that in C for AVX2
_UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some models ask of their attention, and ours would leave out


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
