"""Draws one token per row, from uniforms that belong to (seed, position) and to nothing else.

Evaluations may truncate the distribution, and a request may ask for the entropy of the likeliest tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.engine.protocol import NUM_LIKELIEST, Entropies, Truncation
from strop.engine.torch.cpu.kernels import draw_kernels

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
DRAWN_AT_ONCE = 8  # rows: on a GPU sums may depend on their number
_BLOCK = 256  # tokens of the vocabulary whose probabilities are summed first


def uniforms(seed: int, count: int) -> list[float]:
    """Numbers in [0, 1), one for each position 0 .. count - 1; each is a pure function of (seed, position).

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), its state hashed from the seed so that the streams of neighbouring
    seeds have nothing in common. 52 bits: the product with a total of probabilities always stays below that total.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is what is meant
        state = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)
        bits = _mix(state + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64))
    drawn: list[float] = ((bits >> np.uint64(12)).astype(np.float64) * 2.0**-52).tolist()
    return drawn


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def banned_mask(logits: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor | None:
    """(N, V) bool, True on each (row, id) that must not be drawn; None where nothing is banned."""
    if not pairs:
        return None
    places, mask = torch.tensor(pairs, device=logits.device), torch.zeros_like(logits, dtype=torch.bool)
    mask[places[:, 0], places[:, 1]] = True
    return mask


def draw(logits: Tensor, temperatures: Tensor, uniform: Tensor, banned: Tensor | None) -> Tensor:
    """Sample each row by inverting its cumulative distribution: no truncation, one uniform a token.

    Log-probs and entropies are of the distribution drawn from: after temperature and ban, over the full
    vocabulary. A temperature of 0 takes the likeliest token; its log-prob and entropy are those at temperature 1, since
    those of a point mass say nothing.

    One exponential a logit serves the log-prob, the entropy and the draw, and the cumulative sum is taken over blocks of the
    vocabulary and then within one of them: in double precision over all of it, it took most of the time.

    Args:
        logits: (N, V), of any float type; what follows is float32.
        temperatures: (N,) float32, at least 0.
        uniform: (N,) float64, in [0, 1).
        banned: (N, V) bool, True on tokens that must not be drawn; None where nothing is banned.

    Returns:
        (3, N) float64, which holds exactly the ids, their log-probs and the entropies of the whole distribution, both in nats
        and float32: one transfer from a device instead of three.
    """
    if (kernels := draw_kernels(logits)) is not None:
        if banned is not None:
            logits = logits.masked_fill(banned, -torch.inf)
        return kernels.draw(logits, temperatures, uniform)
    columns = [logits, temperatures, uniform, *([] if banned is None else [banned])]
    some_rows = zip(*(torch.split(column, DRAWN_AT_ONCE) for column in columns), strict=True)
    parts = [_draw_some(*some) for some in some_rows]
    return torch.stack([torch.cat(drawn).double() for drawn in zip(*parts, strict=True)])


def _draw_some(
    logits: Tensor, temperatures: Tensor, uniform: Tensor, banned: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, log-probs, entropies) of so few rows that their copies in float32 stay small."""
    is_greedy = temperatures == 0
    scaled = logits.float() / temperatures.masked_fill(is_greedy, 1.0).unsqueeze(1)
    if banned is not None:
        # Finite, so that probability * logit is 0 and not nan; half the range leaves room to subtract the maximum.
        scaled = scaled.masked_fill_(banned, torch.finfo(torch.float32).min / 2)
    scaled -= scaled.amax(1, keepdim=True)
    probabilities = scaled.softmax(1)
    log_total = -probabilities.amax(1).log()  # the likeliest token's scaled logit is 0
    ids = _invert(probabilities, uniform)
    if logits.device.type != "cpu" or is_greedy.any():  # to ask would make a device wait, and cannot be captured
        ids = torch.where(is_greedy, scaled.argmax(1), ids)
    logprobs = scaled.gather(1, ids.unsqueeze(1)).squeeze(1) - log_total
    entropies = (log_total - torch.linalg.vecdot(probabilities, scaled)).clamp_min(0.0)
    return ids, logprobs, entropies


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """(N,) int64: the first token whose cumulative probability passes `uniform` of the total; never one of probability 0."""
    num_rows, size = probabilities.shape
    num_whole = size // _BLOCK
    whole, rest = probabilities[:, : num_whole * _BLOCK], probabilities[:, num_whole * _BLOCK :]
    blocks = torch.cat((whole.view(num_rows, num_whole, _BLOCK).sum(2), rest.sum(1, keepdim=True)), 1)
    cumulative = blocks.cumsum(1, dtype=torch.float64)
    threshold = uniform.unsqueeze(1) * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, threshold, right=True).clamp_max(num_whole)  # beyond only when not finite
    threshold = threshold - (cumulative - blocks).gather(1, block)

    columns = block * _BLOCK + torch.arange(_BLOCK, device=probabilities.device)
    within = probabilities.gather(1, columns.clamp_max(size - 1)).masked_fill(columns >= size, 0.0)
    cumulative = within.cumsum(1, dtype=torch.float64)
    # The block's sum was rounded in float32, so the threshold may lie a little outside of what its tokens add up to.
    threshold = torch.minimum(threshold, cumulative[:, -1:] * (1 - 2**-52)).clamp_min(0.0)
    place = torch.searchsorted(cumulative, threshold, right=True).clamp_max(_BLOCK - 1)
    return columns.gather(1, place).squeeze(1).clamp_max(size - 1)


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
