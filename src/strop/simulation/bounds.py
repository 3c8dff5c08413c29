"""How good a schedule can be: bounds that no schedule beats."""

from __future__ import annotations

from collections.abc import Sequence

from strop.simulation.engines import EngineTiming
from strop.simulation.simulate import SimulatedMachine
from strop.simulation.trace import Trace, TracedRollout


def lower_bound_s(trace: Trace, machines: Sequence[SimulatedMachine]) -> float:
    """The larger of two bounds: the longest rollout on an empty engine, and all work on engines that are always full."""
    return max(critical_path_s(trace, machines), throughput_bound_s(trace, machines))


def critical_path_s(trace: Trace, machines: Sequence[SimulatedMachine]) -> float:
    """The time of the longest rollout on the best engine for it, with nothing else there and a free prompt."""
    timings = {machine.timing for machine in machines}
    return max(
        min(_unshared_s(rollout, group.prompt_tokens, timing) for timing in timings)
        for group in trace.groups
        for rollout in group.rollouts
    )


def _unshared_s(rollout: TracedRollout, prompt_tokens: int, timing: EngineTiming) -> float:
    seconds, context = 0.0, prompt_tokens
    for turn in rollout.turns:
        seconds += timing.decode_s(turn.num_tokens, 1, context) + turn.tool_s
        seconds += timing.prefill_token_s * turn.observation_tokens
        context += turn.num_tokens + turn.observation_tokens
    return seconds


def throughput_bound_s(trace: Trace, machines: Sequence[SimulatedMachine]) -> float:
    """The time of all tokens at their price in a full batch, however they are spread over the engines.

    An engine needs at least `alpha` seconds a token sampled (its share of a step with all rows), `gamma` a token attended to,
    `delta` a token prefilled. Any prices (u, v, w) of the three give a bound, by duality of the linear program that spreads
    fractions of the work: (u N + v K + w P) / sum over engines of max(u / alpha, v / gamma, w / delta). The prices of each
    engine are tried. Tools and memory are left out.
    """
    sampled = attended = prefilled = 0
    for group in trace.groups:
        prefilled += group.prompt_tokens
        for rollout in group.rollouts:
            tokens = tokens_of(rollout, group.prompt_tokens)
            sampled, attended, prefilled = sampled + tokens[0], attended + tokens[1], prefilled + tokens[2]
    costs = [prices_of(machine) for machine in machines]
    work = (sampled, attended, prefilled)
    return max(
        sum(price * amount for price, amount in zip(prices, work, strict=True))
        / sum(max(price / cost for price, cost in zip(prices, each, strict=True) if cost > 0) for each in costs)
        for prices in set(costs)
    )


def prices_of(machine: SimulatedMachine) -> tuple[float, float, float]:
    """Seconds of a token sampled, attended to and prefilled."""
    timing = machine.timing
    return (timing.step_s / machine.spec.max_conversations + timing.row_s, timing.kv_token_s, timing.prefill_token_s)


def tokens_of(rollout: TracedRollout, prompt_tokens: int) -> tuple[int, int, int]:
    """Tokens sampled, attended to and prefilled; the prompt is not prefilled."""
    sampled = attended = prefilled = 0
    context = prompt_tokens
    for turn in rollout.turns:
        sampled += turn.num_tokens
        attended += turn.num_tokens * context + turn.num_tokens * (turn.num_tokens - 1) // 2
        prefilled += turn.observation_tokens
        context += turn.num_tokens + turn.observation_tokens
    return sampled, attended, prefilled
