"""What a request changes about the draw of its tokens: truncated sampling for evaluation, and entropies of the likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.engine.protocol import NUM_LIKELIEST, Entropies, Truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawLimits:
    """Of one row."""

    truncation: Truncation | None
    entropies: Entropies
    seen: Sequence[int]  # ids of the prompt and the completion so far, which the repetition penalty lowers


def penalised(logits: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """(V,) float32: the logits of seen ids divided by `penalty` where they are positive, else multiplied by it."""
    ids = torch.tensor(sorted(set(seen)), device=logits.device)
    of_seen = logits[ids]
    return logits.float().index_put((ids,), torch.where(of_seen > 0, of_seen / penalty, of_seen * penalty).float())


def cut_off(scaled: Tensor, truncation: Truncation) -> Tensor:
    """(V,) bool, True on ids that min-p, then top-k, then top-p leave out. The likeliest id always stays.

    Args:
        scaled: (V,) float32, logits after temperature; ids that must not be drawn have a large negative one.
    """
    probabilities = scaled.softmax(0)
    cut = probabilities < truncation.min_p * probabilities.max()
    if 0 < truncation.top_k < len(scaled):
        cut |= scaled < scaled.topk(truncation.top_k).values[-1]
    if truncation.top_p < 1:
        kept, order = scaled.masked_fill(cut, -torch.inf).softmax(0).sort(descending=True)
        is_beyond = kept.cumsum(0) - kept >= truncation.top_p  # of the ids before it
        is_beyond[0] = False
        cut |= torch.zeros_like(cut).scatter(0, order, is_beyond)
    return cut


def entropy_of_likeliest(scaled: Tensor) -> float:
    """The sum of -p log p over the `NUM_LIKELIEST` likeliest ids, in nats; of `scaled` as in `cut_off`."""
    logprobs = (scaled.topk(min(NUM_LIKELIEST, len(scaled))).values - scaled.logsumexp(0)).double()
    return float(-(logprobs.exp() * logprobs).sum())


def limited(
    logits: Tensor, banned: Tensor | None, limits: Sequence[DrawLimits | None], temperatures: Sequence[float]
) -> tuple[Tensor, Tensor, dict[int, float]]:
    """Logits and banned ids after penalties and truncation, and by row the entropies that are asked for in another form.

    Args:
        logits: (N, V).
        banned: (N, V) bool, True on ids that must not be drawn; None where nothing is banned.
        temperatures: of each row; 0 counts as 1.
    """
    logits = logits.float().clone()
    banned = torch.zeros_like(logits, dtype=torch.bool) if banned is None else banned
    entropies: dict[int, float] = {}
    for place, (row, temperature) in enumerate(zip(limits, temperatures, strict=True)):
        if row is None:
            continue
        if row.truncation is not None and row.truncation.repetition_penalty != 1:
            logits[place] = penalised(logits[place], row.seen, row.truncation.repetition_penalty)
        scaled = (logits[place] / (temperature or 1.0)).masked_fill(banned[place], torch.finfo(torch.float32).min / 2)
        if row.entropies is Entropies.TOP10:
            entropies[place] = entropy_of_likeliest(scaled)
        if row.truncation is not None:
            banned[place] |= cut_off(scaled, row.truncation)
    return logits, banned, entropies
