"""Log-probs and entropies of given tokens under a causal language model, without ever holding all of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.training.attention import UNIT, lay_out
from strop.training.gradients import embed, gradient_sum

_HEAD_ROWS_AT_ONCE = 2_048  # of the head's gradient, while it is added up
_BANNED = -1e30  # a logit without probability; finite, so that probability * log-prob is 0 and not nan


class LogprobModule(nn.Module):
    """`token_logprobs` of a model as a module: ranks that divide its weights hook into the call of one."""

    def __init__(self, model: PreTrainedModel, *, max_logits: int, is_packed: bool) -> None:
        super().__init__()
        self.model = model
        self._max_logits, self._is_packed = max_logits, is_packed

    def forward(
        self, ids: Tensor, where: Tensor, temperature: float, is_banned: Tensor, banned_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            self.model,
            ids,
            where,
            temperature=temperature,
            max_logits=self._max_logits,
            is_packed=self._is_packed,
            is_banned=is_banned,
            banned_ids=banned_ids,
        )


def token_logprobs(
    model: PreTrainedModel,
    ids: Tensor,
    where: Tensor,
    *,
    temperature: float,
    max_logits: int = 2**24,
    is_packed: bool = False,
    is_banned: Tensor | None = None,
    banned_ids: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """log π(ids[:, t] | ids[:, :t]) and the entropy of that distribution, after temperature, over the full vocabulary (law 5).

    Rows are padded on the right, or not at all, and there is no mask for padding: attention is causal, so a token never sees
    what comes after it, and what padding itself computes is not read. That keeps the fast causal kernels, and positions count
    from 0 in every row.

    The decoder runs once; the head runs on the positions of `where` alone, in chunks, forward and again in the backward pass,
    so that at most `max_logits` logits are held at once, however long the batch and however large the vocabulary.

    Args:
        model: a decoder-only model with a head; the caller decides on grad mode and autocast.
        ids: int64 (n, T).
        where: bool (n, T), False in column 0.
        temperature: divides the logits.
        max_logits: of float32 logits held at once, and as many again of their gradient; 2**24 are 64 MiB.
        is_packed: lay the rows end to end, which wants a model with `use_row_attention`: no padding is computed, and what a
            row shares with the row before it is computed once.
        is_banned: bool (n, T), True where the distribution is that without `banned_ids`; None: nowhere.

    Returns:
        Two float32 tensors (n, T), in nats, 0 where `where` is False; gradients flow through both.
    """
    selected, predicted = hidden_before(model.base_model, ids, where, is_packed=is_packed)
    targets = ids[:, 1:].reshape(-1).index_select(0, predicted)
    head = model.get_output_embeddings()
    banned = None
    if is_banned is not None and banned_ids:
        banned = is_banned[:, 1:].reshape(-1).index_select(0, predicted)
    logprobs, entropies = head_logprobs(
        selected,
        head.weight,
        head.bias,
        targets,
        temperature=temperature,
        max_logits=max_logits,
        banned=banned,
        banned_ids=banned_ids,
    )
    return spread(logprobs, predicted, where), spread(entropies, predicted, where)


def hidden_before(decoder: PreTrainedModel, ids: Tensor, where: Tensor, *, is_packed: bool) -> tuple[Tensor, Tensor]:
    """Hidden states (m, H) of ids[:, :t] for each of the m tokens t of `where`, and their places for `spread`, (m,).

    Args as of `token_logprobs`.
    """
    predicted = where[:, 1:].reshape(-1).nonzero().squeeze(1)
    # The last column predicts nothing here, so it need not be computed.
    if is_packed:
        lengths = (where[:, 1:] * torch.arange(1, where.shape[1], device=where.device)).amax(1).clamp(min=1)
        layout = lay_out(ids[:, :-1], lengths)
        embedded = embed(decoder.get_input_embeddings(), layout.ids)
        outputs = decoder(inputs_embeds=embedded, position_ids=layout.positions, use_cache=False, layout=layout)
        hidden = outputs.last_hidden_state
        places = layout.places.reshape(-1).index_select(0, predicted)
    else:
        embedded = embed(decoder.get_input_embeddings(), ids[:, :-1])
        hidden = decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
        places = predicted
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, places), predicted


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    max_logits: int,
    banned: Tensor | None = None,
    banned_ids: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each position, both float32 (m,), in nats, both with gradient.

    Args:
        hidden: (m, H), what the decoder gives for the positions that predict the targets.
        weight, bias: of the head, (V, H) and (V,).
        targets: int64 (m,).
        temperature: divides the logits.
        max_logits: of float32 logits held at once.
        banned: bool (m,), True where `banned_ids` have no probability; None: nowhere.
    """
    kind = hidden.device.type
    # As a linear layer under autocast would; autocast does not reach into a function of our own.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    chunk = max_logits // weight.shape[0]
    chunk = max(1, chunk // UNIT * UNIT or chunk)
    of_ban = None if banned is None else torch.tensor(banned_ids, device=hidden.device)
    num_given = len(targets)
    if num_given >= UNIT**2:
        num_more = -num_given % UNIT
        hidden, targets = F.pad(hidden, (0, 0, 0, num_more)), F.pad(targets, (0, num_more))
        banned = None if banned is None else F.pad(banned, (0, num_more))
    logprobs, entropies = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, chunk, dtype, banned, of_ban
    )
    return logprobs[:num_given], entropies[:num_given]


class _HeadLogprobs(torch.autograd.Function):
    """With p = softmax(z / T) and H its entropy: d log p_y / dz = (1_y - p) / T and dH / dz = -p (log p + H) / T."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        dtype: torch.dtype,
        banned: Tensor | None,
        banned_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, banned, banned_ids)
        ctx.temperature, ctx.chunk, ctx.dtype = temperature, chunk, dtype
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        matrix = weight.to(dtype)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            log_p = _log_softmax(hidden[part], matrix, bias, temperature, None if banned is None else banned[part], banned_ids)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropies[part] = -_dots(log_p.exp(), log_p)
        ctx.entropies = entropies
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, to_logprobs: Tensor | None, to_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, banned, banned_ids = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        matrix = weight.to(ctx.dtype)
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = gradient_sum(weight) if needs_weight else None
        is_summed = of_weight is not None
        if needs_weight and not is_summed:
            of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        of_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if needs_bias else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            of_part = None if banned is None else banned[part]
            log_p = _log_softmax(hidden[part], matrix, bias, ctx.temperature, of_part, banned_ids)
            of_logits = log_p.exp()
            if to_entropies is not None:
                log_p.add_(ctx.entropies[part, None]).mul_(to_entropies[part, None])
                if to_logprobs is not None:
                    log_p.add_(to_logprobs[part, None])
                of_logits.mul_(log_p)
            elif to_logprobs is not None:
                of_logits.mul_(to_logprobs[part, None])
            if to_logprobs is not None:
                of_logits.scatter_add_(1, targets[part, None], -to_logprobs[part, None])
            of_logits = of_logits.mul_(-1.0 / ctx.temperature)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            of_logits = of_logits.to(ctx.dtype)
            if of_hidden is not None:
                of_hidden[part] = of_logits @ matrix
            if of_weight is not None:
                _add_products(of_weight, of_logits, hidden[part].to(ctx.dtype))
        return (
            of_hidden,
            None if of_weight is None or is_summed else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 6,
        )


def _log_softmax(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, temperature: float, banned: Tensor | None, banned_ids: Tensor | None
) -> Tensor:
    """(m, H) -> float32 (m, V)."""
    logits = F.linear(hidden.to(matrix.dtype), matrix, None if bias is None else bias.to(matrix.dtype)).float()
    if temperature != 1.0:
        logits.div_(temperature)
    if banned is not None and banned_ids is not None:
        logits[banned.nonzero(), banned_ids] = _BANNED
    return logits.log_softmax(-1)


def _dots(left: Tensor, right: Tensor) -> Tensor:
    """The dot product of each row of `left` with that of `right`, without their elementwise product: twice (m, V) -> (m,)."""
    return torch.bmm(left[:, None, :], right[:, :, None]).flatten()


def _add_products(total: Tensor, of_logits: Tensor, hidden: Tensor) -> None:
    """Add of_logits^T @ hidden to the float32 `total` (V, H), a few of its rows at a time."""
    if total.dtype == hidden.dtype:
        total.addmm_(of_logits.T, hidden)
        return
    for rows in range(0, len(total), _HEAD_ROWS_AT_ONCE):
        block = slice(rows, rows + _HEAD_ROWS_AT_ONCE)
        total[block] += of_logits[:, block].T @ hidden


def spread(values: Tensor, predicted: Tensor, where: Tensor) -> Tensor:
    """Values of predicted positions, (m,), at their tokens in a float32 tensor of the shape of `where`; 0 elsewhere."""
    num_rows, num_columns = where.shape
    flat = values.new_zeros(num_rows * (num_columns - 1)).index_copy(0, predicted, values)
    return torch.cat([flat.new_zeros(num_rows, 1), flat.view(num_rows, num_columns - 1)], dim=1)
