"""Entropies from the likeliest log-probs that a server reports: exact over the ten likeliest, or estimated over all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from strop.engine.protocol import NUM_LIKELIEST, Entropies

_NUM_LIKELIEST = {Entropies.ANY: 0, Entropies.TOP10: NUM_LIKELIEST, Entropies.FULL: 20}
MAX_LOGPROBS = 1 + max(_NUM_LIKELIEST.values())


def num_logprobs(kind: Entropies) -> int:
    """Log-probs to ask for at each token: one more than are used, as vLLM sends the sampled token's in place of the last."""
    return _NUM_LIKELIEST[kind] and 1 + _NUM_LIKELIEST[kind]


def entropy_of(logprobs: Sequence[float], kind: Entropies, *, vocab_size: int) -> float:
    """The entropy of one token, in nats.

    `FULL` spreads the probability that is left evenly over the rest of the vocabulary. That is the largest entropy that the
    likeliest tokens allow, so the estimate is never too small but for rounding.

    Args:
        logprobs: `num_logprobs` of them, in any order, or all if the vocabulary is smaller.
    """
    likeliest = sorted(logprobs, reverse=True)[: _NUM_LIKELIEST[kind]]
    total = -math.fsum(math.exp(each) * each for each in likeliest if each > -math.inf)
    if kind is Entropies.TOP10:
        return max(0.0, total)
    rest, num_rest = 1 - math.fsum(math.exp(each) for each in likeliest), vocab_size - len(likeliest)
    return max(0.0, total - (rest * math.log(rest / num_rest) if rest > 0 and num_rest > 0 else 0.0))
