"""Draws one token per row, from uniforms that belong to (seed, position) and to nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: int, count: int) -> list[float]:
    """Numbers in [0, 1), one for each position 0 .. count - 1; each is a pure function of (seed, position) (law 8).

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One token per row. Shapes (N,)."""

    ids: Tensor  # int64
    logprobs: Tensor  # float32, nats, of the drawn token
    entropies: Tensor  # float32, nats, of the whole distribution


def draw(logits: Tensor, temperatures: Tensor, uniform: Tensor, banned: Tensor | None) -> Draw:
    """Sample each row by inverting its cumulative distribution: no truncation, one uniform a token.

    Log-probs and entropies are of the distribution drawn from (design law 5): after temperature and ban, over the full
    vocabulary. A temperature of 0 takes the likeliest token; its log-prob and entropy are those at temperature 1, since
    those of a point mass say nothing.

    Args:
        logits: (N, V) float32.
        temperatures: (N,) float32, at least 0.
        uniform: (N,) float64, in [0, 1).
        banned: (N, V) bool, True on tokens that must not be drawn; None where nothing is banned.
    """
    is_greedy = temperatures == 0
    scaled = logits / torch.where(is_greedy, 1.0, temperatures).unsqueeze(1)
    if banned is not None:
        # Finite, so that probability * logprob is 0 and not nan; half the range leaves room to subtract the maximum.
        scaled = scaled.masked_fill(banned, torch.finfo(torch.float32).min / 2)
    logprobs = scaled.log_softmax(1)
    probabilities = logprobs.exp()
    cumulative = probabilities.cumsum(1, dtype=torch.float64)
    threshold = uniform.unsqueeze(1) * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, threshold, right=True).clamp_max(logits.shape[1] - 1)  # beyond only when not finite
    ids = torch.where(is_greedy.unsqueeze(1), scaled.argmax(1, keepdim=True), ids)
    return Draw(
        ids=ids.squeeze(1),
        logprobs=logprobs.gather(1, ids).squeeze(1),
        entropies=-(probabilities * logprobs).sum(1),
    )
