"""Do sampler and trainer mean the same distribution, and is it the one that was sampled from?

Two questions, two instruments. The gap |engine - trainer| compares what is said of each token. The tokens themselves tell,
whatever was said of them, which distribution they were drawn from: each suspect (another temperature, top-p, top-k) is fitted,
and convicted when it makes them likelier by more than chance would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from strop.doctor.examination import Evidence, Examination, logprobs_at
from strop.doctor.finding import Finding

NAME = "log-probs"
_CONVICTING_NATS = 12.0  # a fit to tokens that were drawn as they should be gains this much once in e^12 times
_FITTED_TOKENS = 96  # of a large vocabulary, more would take long
_NEWTON_STEPS = 12
_RANGE = 8.0  # temperatures are looked for from 1/8 of the recipe's to 8 times it


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Another distribution that the tokens may have been drawn from, and how much likelier that makes them."""

    words: str
    gain_nats: float


async def check_logprobs(examination: Examination) -> Finding:
    """Measure both; when something is wrong, say who is wrong and how."""
    evidence, parts = examination.evidence, examination.parts
    temperature = parts.temperature
    gap = (evidence.engine - evidence.trainer).abs()
    truncation = max(_truncations(evidence, temperature), key=lambda suspect: suspect.gain_nats)
    tempering = _tempering(evidence, temperature)
    is_gap = not gap.mean().item() <= examination.tolerance_nats
    if truncation.gain_nats > max(_CONVICTING_NATS, tempering.gain_nats):
        said = f" Reported log-probs are {gap.mean():.2g} nats from the trainer's." if is_gap else ""
        return Finding(
            check=NAME,
            detail=f"sampling is truncated: all {len(gap)} tokens look drawn with {truncation.words}.{said}",
            remedy="Switch top-p and top-k off in the engine: the policy gradient needs tokens of the whole distribution.",
        )
    if is_gap:
        return _explain_gap(evidence, gap.mean().item(), temperature)
    if tempering.gain_nats > _CONVICTING_NATS:
        return Finding(
            check=NAME,
            detail=f"the engine reports log-probs of temperature {temperature:g}, but draws its tokens with {tempering.words}.",
            remedy=f"Make the engine sample at sampling.temperature = {temperature:g}, not only report it.",
        )
    return Finding.fine(
        NAME,
        f"engine and trainer differ by {gap.mean():.2g} nats on average, {gap.max():.2g} at most, over {len(gap)} tokens at"
        f" temperature {temperature:g} (allowed: {examination.tolerance_nats:.2g}); nothing is truncated",
    )


def _explain_gap(evidence: Evidence, gap: float, temperature: float) -> Finding:
    """Whoever is farther from the plain forward is suspected; a temperature that closes the distance convicts."""
    yardstick = evidence.original(temperature)
    distances = {
        "engine": (evidence.engine - yardstick).abs().mean().item(),
        "trainer": (evidence.trainer - yardstick).abs().mean().item(),
    }
    suspect = "engine" if distances["engine"] >= distances["trainer"] else "trainer"
    said = evidence.engine if suspect == "engine" else evidence.trainer
    fitted, left = _fit(evidence, said, temperature)
    measured = f"engine and trainer differ by {gap:.2g} nats on average"
    distance = distances[suspect]
    if left > min(distance / 2, max(distance / 10, 1.5 * evidence.rounding_nats)):  # rounding is left by any explanation
        return Finding(
            check=NAME,
            detail=f"{measured}; the {suspect} is the one that differs from a plain forward, and no temperature explains it.",
            remedy=(
                f"Compare the {suspect}'s weights, dtype and rope settings with the model directory's config.json;"
                ' engine.dtype = "float32" with trainer.precision = "float32" shows whether it is rounding.'
            ),
        )
    if suspect == "engine":
        return Finding(
            check=NAME,
            detail=f"{measured}: the engine's log-probs are those of temperature {fitted:.3g}, not of {temperature:g}.",
            remedy=f"Make the engine divide its logits by the request's temperature, sampling.temperature = {temperature:g}.",
        )
    return Finding(
        check=NAME,
        detail=f"{measured}: the trainer scores at temperature {fitted:.3g}, but tokens are sampled at {temperature:g}.",
        remedy=f"Score at the temperature of sampling: give pack() temperature = {temperature:g}, and divide the logits by it.",
    )


def _truncations(evidence: Evidence, temperature: float) -> list[Suspect]:
    """Top-p and top-k, each as tight as the tokens allow: what it leaves out is missing from the tokens' total probability."""
    probabilities = (evidence.logits / temperature).softmax(-1)
    of_token = probabilities.gather(-1, evidence.tokens[:, None])
    rank = (probabilities > of_token).sum(-1)  # (n,) tokens that are likelier
    ordered = probabilities.sort(-1, descending=True).values.double()
    above = ordered.cumsum(-1) - ordered  # (n, V) mass of what is likelier than the token at each rank
    largest_mass, largest_rank = above.gather(-1, rank[:, None]).max(), int(rank.max())
    kept_by_mass = torch.where(above <= largest_mass, ordered, 0.0).sum(-1)
    kept_by_rank = ordered[:, : largest_rank + 1].sum(-1)
    return [
        Suspect(words=f"top-p of about {largest_mass.item():.2f}", gain_nats=-kept_by_mass.log().sum().item()),
        Suspect(words=f"top-k of about {largest_rank + 1}", gain_nats=-kept_by_rank.log().sum().item()),
    ]


def _tempering(evidence: Evidence, temperature: float) -> Suspect:
    """The temperature under which the tokens are likeliest. Newton's method: the likelihood is concave in 1/temperature."""
    of_tokens = evidence.logits.gather(-1, evidence.tokens[:, None]).squeeze(-1)
    coldness = 1 / temperature
    for _ in range(_NEWTON_STEPS):
        probabilities = (evidence.logits * coldness).softmax(-1)
        means = (probabilities * evidence.logits).sum(-1)
        variances = (probabilities * evidence.logits.square()).sum(-1) - means.square()
        step = ((of_tokens - means).sum() / variances.sum().clamp(min=1e-9)).item()
        coldness = min(max(coldness + step, coldness / 2), coldness * 2)
        if abs(step) < 1e-2 * coldness:
            break
    gain = (evidence.original(1 / coldness) - evidence.original(temperature)).double().sum().item()
    return Suspect(words=f"temperature {1 / coldness:.2g}", gain_nats=gain)


def _fit(evidence: Evidence, said: Tensor, temperature: float) -> tuple[float, float]:
    """The temperature that explains the log-probs `said` best, and the mean distance that is left, in nats."""
    logits, tokens, said = (each[:_FITTED_TOKENS] for each in (evidence.logits, evidence.tokens, said))

    def distance(tried: float) -> float:
        return (said - logprobs_at(logits, tokens, tried)).abs().mean().item()

    fitted = _minimise(distance, temperature)
    return fitted, distance(fitted)


def _minimise(of: Callable[[float], float], centre: float) -> float:
    """The temperature within a factor of `_RANGE` of `centre` where `of` is least: a bounded search after a coarse grid."""
    steps = 8
    grid = [centre * _RANGE ** (step / steps) for step in range(-steps, steps + 1)]
    best = min(range(len(grid)), key=lambda index: of(grid[index]))
    low, high = math.log(grid[max(0, best - 1)]), math.log(grid[min(len(grid) - 1, best + 1)])
    return math.exp(minimize_scalar(lambda log: of(math.exp(log)), bounds=(low, high), method="bounded").x)
