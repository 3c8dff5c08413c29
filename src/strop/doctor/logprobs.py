"""Do sampler and trainer mean the same distribution, and is it the one that was sampled from?

Two questions, two instruments. The gap |engine - trainer| compares what is said of each token. The tokens themselves tell,
whatever was said of them, which distribution they were drawn from: each suspect (another temperature, top-p, top-k) is fitted,
and convicted when it makes them likelier by more than chance would.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from strop.doctor.examination import Evidence, Examination, logprobs_at
from strop.doctor.finding import Problem

_CONVICTING_NATS = 12.0  # a fit to tokens that were drawn as they should be gains this much once in e^12 times
_FITTED_TOKENS = 96  # of a large vocabulary, more would take long
_RANGE = 8.0  # temperatures are looked for from 1/8 of the recipe's to 8 times it


async def check_logprobs(examination: Examination) -> str:
    """Measure both; when something is wrong, say who is wrong and how."""
    evidence, temperature = examination.evidence, examination.parts.temperature
    gap = (evidence.engine - evidence.trainer).abs()
    gain_nats, truncation = max(_truncations(evidence, temperature))
    drawn_at = _best_temperature(lambda tried: -evidence.original(tried).double().sum().item(), temperature)
    tempering_nats = (evidence.original(drawn_at) - evidence.original(temperature)).double().sum().item()
    is_gap = not gap.mean().item() <= examination.tolerance_nats
    if gain_nats > max(_CONVICTING_NATS, tempering_nats):
        said = f" Reported log-probs are {gap.mean():.2g} nats from the trainer's." if is_gap else ""
        raise Problem(
            f"sampling is truncated: all {len(gap)} tokens look drawn with {truncation}.{said}",
            "Switch top-p and top-k off in the engine: the policy gradient needs tokens of the whole distribution.",
        )
    if is_gap:
        raise _explained_gap(evidence, gap.mean().item(), temperature)
    if tempering_nats > _CONVICTING_NATS:
        raise Problem(
            f"the engine reports log-probs of temperature {temperature:g}, but draws its tokens with temperature"
            f" {drawn_at:.2g}.",
            f"Make the engine sample at sampling.temperature = {temperature:g}, not only report it.",
        )
    return (
        f"engine and trainer differ by {gap.mean():.2g} nats on average, {gap.max():.2g} at most, over {len(gap)} tokens at"
        f" temperature {temperature:g} (allowed: {examination.tolerance_nats:.2g}); nothing is truncated"
    )


def _explained_gap(evidence: Evidence, gap: float, temperature: float) -> Problem:
    """Suspect the one that is farther from the plain forward; a temperature that closes the distance convicts."""
    yardstick = evidence.original(temperature)
    distances = {each: (said - yardstick).abs().mean().item() for each, said in evidence.said.items()}
    suspect = max(distances, key=lambda each: distances[each])
    said, logits, tokens = (each[:_FITTED_TOKENS] for each in (evidence.said[suspect], evidence.logits, evidence.tokens))

    def distance_at(tried: float) -> float:
        return (said - logprobs_at(logits, tokens, tried)).abs().mean().item()

    fitted = _best_temperature(distance_at, temperature)
    measured, distance = f"engine and trainer differ by {gap:.2g} nats on average", distances[suspect]
    # Rounding is left by any explanation.
    if distance_at(fitted) > min(distance / 2, max(distance / 10, 1.5 * evidence.rounding_nats)):
        return Problem(
            f"{measured}; the {suspect} is the one that differs from a plain forward, and no temperature explains it.",
            f"Compare the {suspect}'s weights, dtype and rope settings with the model directory's config.json;"
            ' engine.dtype = "float32" with trainer.precision = "float32" shows whether it is rounding.',
        )
    if suspect == "engine":
        return Problem(
            f"{measured}: the engine's log-probs are those of temperature {fitted:.3g}, not of {temperature:g}.",
            f"Make the engine divide its logits by the request's temperature, sampling.temperature = {temperature:g}.",
        )
    return Problem(
        f"{measured}: the trainer scores at temperature {fitted:.3g}, but tokens are sampled at {temperature:g}.",
        f"Score at the temperature of sampling: give pack() temperature = {temperature:g}, and divide the logits by it.",
    )


def _truncations(evidence: Evidence, temperature: float) -> list[tuple[float, str]]:
    """Return by how many nats top-p and top-k, each as tight as the tokens allow, make the tokens likelier.

    What a truncation leaves out is missing from the tokens' total probability.
    """
    probabilities = (evidence.logits / temperature).softmax(-1)
    of_token = probabilities.gather(-1, evidence.tokens[:, None])
    rank = (probabilities > of_token).sum(-1)  # (n,) tokens that are likelier
    ordered = probabilities.sort(-1, descending=True).values.double()
    above = ordered.cumsum(-1) - ordered  # (n, V) mass of what is likelier than the token at each rank
    largest_mass, largest_rank = above.gather(-1, rank[:, None]).max(), int(rank.max())
    kept_by_mass = torch.where(above <= largest_mass, ordered, 0.0).sum(-1)
    kept_by_rank = ordered[:, : largest_rank + 1].sum(-1)
    return [
        (_nats(kept_by_mass), f"top-p of about {largest_mass.item():.2f}"),
        (_nats(kept_by_rank), f"top-k of about {largest_rank + 1}"),
    ]


def _nats(kept: Tensor) -> float:
    return -kept.log().sum().item()


def _best_temperature(loss: Callable[[float], float], centre: float) -> float:
    """Return where `loss` is least within a factor of `_RANGE` of `centre`: a bounded search after a coarse grid."""
    steps = 8
    grid = [centre * _RANGE ** (step / steps) for step in range(-steps, steps + 1)]
    best = min(range(len(grid)), key=lambda index: loss(grid[index]))
    low, high = math.log(grid[max(0, best - 1)]), math.log(grid[min(len(grid) - 1, best + 1)])
    return math.exp(minimize_scalar(lambda log: loss(math.exp(log)), bounds=(low, high), method="bounded").x)
