"""How good a schedule can be: bounds that no schedule beats, and the best schedule that knows all lengths in advance."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.simulation.engines import EngineTiming
from strop.simulation.simulate import SimulatedMachine, simulate
from strop.simulation.trace import Trace, TracedGroup, TracedRollout

_LONGEST_FIRST = SchedulerConfig(order="longest_first")


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
            tokens = _tokens_of(rollout, group.prompt_tokens)
            sampled, attended, prefilled = sampled + tokens[0], attended + tokens[1], prefilled + tokens[2]
    costs = [_prices(machine) for machine in machines]
    work = (sampled, attended, prefilled)
    return max(
        sum(price * amount for price, amount in zip(prices, work, strict=True))
        / sum(max(price / cost for price, cost in zip(prices, each, strict=True) if cost > 0) for each in costs)
        for prices in set(costs)
    )


def _work_s(rollout: TracedRollout, prompt_tokens: int, machine: SimulatedMachine) -> float:
    """Time of an engine whose rows are all in use that a rollout takes, without its prompt."""
    return sum(price * amount for price, amount in zip(_prices(machine), _tokens_of(rollout, prompt_tokens), strict=True))


def _prices(machine: SimulatedMachine) -> tuple[float, float, float]:
    """Seconds of a token sampled, attended to and prefilled."""
    timing = machine.timing
    return (timing.step_s / machine.spec.max_conversations + timing.row_s, timing.kv_token_s, timing.prefill_token_s)


def _tokens_of(rollout: TracedRollout, prompt_tokens: int) -> tuple[int, int, int]:
    """Tokens sampled, attended to and prefilled; the prompt is not prefilled."""
    sampled = attended = prefilled = 0
    context = prompt_tokens
    for turn in rollout.turns:
        sampled += turn.num_tokens
        attended += turn.num_tokens * context + turn.num_tokens * (turn.num_tokens - 1) // 2
        prefilled += turn.observation_tokens
        context += turn.num_tokens + turn.observation_tokens
    return sampled, attended, prefilled


def best_offline_s(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    *,
    tool_workers: int | None = None,
    row_shares: Sequence[float] = (1.0, 0.75, 0.5),
) -> tuple[float, str]:
    """Return the shortest makespan of several schedules that know all lengths in advance, and the name of that schedule.

    All of them reserve exactly what each rollout will need and start the longest first. That is within 4/3 of the optimum on
    identical machines that run one job each (Graham, 1969), and far closer with many jobs a machine. Variants: fewer rows an
    engine, which makes each step faster and so helps the longest rollout; whole groups, the longest first, so that prompts are
    computed on fewer engines; and all work dealt to the engines in advance in equal parts. A policy that is compared with them
    may turn out shorter. The optimum itself is out of reach; `lower_bound_s` bounds the distance to it.
    """
    found = []
    for share in row_shares:
        fewer = [_with_rows(machine, share) for machine in machines]
        outcome = simulate(trace, fewer, _LONGEST_FIRST, tool_workers=tool_workers, foresight="rollouts")
        found.append((outcome.makespan_s, f"longest first, {share:.0%} of the rows"))
    by_group = simulate(trace, machines, _LONGEST_FIRST, tool_workers=tool_workers, foresight="groups")
    found.append((by_group.makespan_s, "longest groups first"))
    if tool_workers is None:
        found.append((_dealt_s(trace, machines), "longest first, work dealt evenly in advance"))
    return min(found)


def _with_rows(machine: SimulatedMachine, share: float) -> SimulatedMachine:
    rows = max(1, round(machine.spec.max_conversations * share))
    return replace(machine, spec=replace(machine.spec, max_conversations=rows))


def _dealt_s(trace: Trace, machines: Sequence[SimulatedMachine]) -> float:
    """Deal each rollout to the engine with the least work so far, the most work first; every engine then runs its own."""
    jobs = [(group, rollout) for group in trace.groups for rollout in group.rollouts]
    jobs.sort(key=lambda job: -_work_s(job[1], job[0].prompt_tokens, machines[0]))
    loads = [(0.0, index) for index in range(len(machines))]
    dealt: list[list[tuple[TracedGroup, TracedRollout]]] = [[] for _ in machines]
    for group, rollout in jobs:
        load, index = heapq.heappop(loads)
        dealt[index].append((group, rollout))
        heapq.heappush(loads, (load + _work_s(rollout, group.prompt_tokens, machines[index]), index))
    return max(
        simulate(_trace_of(trace, own), [machine], _LONGEST_FIRST, foresight="rollouts").makespan_s
        for machine, own in zip(machines, dealt, strict=True)
        if own
    )


def _trace_of(trace: Trace, dealt: Sequence[tuple[TracedGroup, TracedRollout]]) -> Trace:
    prompts: dict[int, int] = {}
    rollouts: dict[int, list[TracedRollout]] = defaultdict(list)
    for group, rollout in dealt:
        prompts[rollout.key.task_index] = group.prompt_tokens
        rollouts[rollout.key.task_index].append(rollout)
    groups = tuple(TracedGroup(prompt_tokens=prompts[index], rollouts=tuple(each)) for index, each in rollouts.items())
    return replace(trace, groups=groups)
