"""Log-probs and entropies of given tokens under a causal language model, without ever holding all of their logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.training.gradients import embed
from strop.training.head import head_logprobs
from strop.training.packing import lay_out


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
    max_logits: int = 2**25,
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
        max_logits: held at once, in the precision of the products.
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


def spread(values: Tensor, predicted: Tensor, where: Tensor) -> Tensor:
    """Values of predicted positions, (m,), at their tokens in a float32 tensor of the shape of `where`; 0 elsewhere."""
    num_rows, num_columns = where.shape
    flat = values.new_zeros(num_rows * (num_columns - 1)).index_copy(0, predicted, values)
    return torch.cat([flat.new_zeros(num_rows, 1), flat.view(num_rows, num_columns - 1)], dim=1)
