"""Log-probs of given tokens under a causal language model, without ever holding all of their logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def token_logprobs(
    model: PreTrainedModel, ids: Tensor, where: Tensor, *, temperature: float, max_logits: int = 2**26
) -> tuple[Tensor, Tensor]:
    """log π(ids[:, t] | ids[:, :t]) and the entropy of that distribution, after temperature, over the full vocabulary (law 5).

    Rows are padded on the right and no attention mask is made: attention is causal, so a token never sees what comes after it,
    and what padding itself computes is not read. That keeps the fast causal kernels, and positions count from 0 in every row.

    The decoder runs once; the head runs on the positions of `where` alone, in chunks that are computed again in the backward
    pass when there are several, so that at most `max_logits` logits are held at once, however long the batch.

    Args:
        model: a decoder-only model with a head; the caller decides on grad mode and autocast.
        ids: int64 (n, T).
        where: bool (n, T), False in column 0.
        temperature: divides the logits.
        max_logits: of float32 logits held at once; 2**26 are 256 MiB.

    Returns:
        Two float32 tensors (n, T), in nats, 0 where `where` is False: log-probs with gradient, entropies without.
    """
    # The last column predicts nothing here, so it need not be computed.
    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    predicted = where[:, 1:].reshape(-1).nonzero().squeeze(1)
    selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, predicted)
    targets = ids[:, 1:].reshape(-1).index_select(0, predicted)
    head = model.get_output_embeddings()
    chunk = max(1, max_logits // head.weight.shape[0])
    logprobs, entropies = [], []
    for hidden_chunk, target_chunk in zip(torch.split(selected, chunk), torch.split(targets, chunk), strict=True):
        if len(selected) <= chunk or not torch.is_grad_enabled():
            of_chunk = _head_logprobs(head, hidden_chunk, target_chunk, temperature)
        else:
            of_chunk = checkpoint(_head_logprobs, head, hidden_chunk, target_chunk, temperature, use_reentrant=False)
        logprobs.append(of_chunk[0])
        entropies.append(of_chunk[1])
    return _spread(torch.cat(logprobs), predicted, where), _spread(torch.cat(entropies), predicted, where)


def _head_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each position: (m, hidden) and (m,) -> two float32 (m,)."""
    distribution = (head(hidden).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropies = -(distribution.exp() * distribution).sum(-1)
    # Not gather: its backward, a scatter_add over the vocabulary, took 4% of an update on two CPU threads.
    return -F.nll_loss(distribution, targets, reduction="none"), entropies


def _spread(values: Tensor, predicted: Tensor, where: Tensor) -> Tensor:
    """Values of predicted positions, (m,), at their tokens in a float32 tensor of the shape of `where`; 0 elsewhere."""
    num_rows, num_columns = where.shape
    flat = values.new_zeros(num_rows * (num_columns - 1)).index_copy(0, predicted, values)
    return torch.cat([flat.new_zeros(num_rows, 1), flat.view(num_rows, num_columns - 1)], dim=1)
