"""The best schedule of several that know all lengths in advance, to compare the scheduler with."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from strop.rollout.scheduler.events import GroupOffered
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.simulation.simulate import SimulatedMachine, offers_of, prices_of, simulate, tokens_of
from strop.simulation.trace import Trace, TracedGroup, TracedRollout

_LONGEST_FIRST = SchedulerConfig(order="longest_first")


def informed(trace: Trace, *, by_group: bool = False) -> list[GroupOffered]:
    """Return the offers of `trace` with the length of each rollout, so that the longest start first.

    Args:
        by_group: the groups whose rollouts are longest on average start first.
    """
    found = []
    for offer, group in zip(offers_of(trace), trace.groups, strict=True):
        lengths = [rollout.response_tokens for rollout in group.rollouts]
        mean = sum(lengths) / len(lengths)
        rollouts = tuple(
            replace(each, max_tokens=length, expected_tokens=mean if by_group else length)
            for each, length in zip(offer.rollouts, lengths, strict=True)
        )
        found.append(replace(offer, rollouts=rollouts))
    return found


def best_offline_s(
    trace: Trace, machines: Sequence[SimulatedMachine], *, row_shares: Sequence[float] = (1.0, 0.75, 0.5)
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
        outcome = simulate(trace, fewer, _LONGEST_FIRST, offers=informed(trace))
        found.append((outcome.makespan_s, f"longest first, {share:.0%} of the rows"))
    by_group = simulate(trace, machines, _LONGEST_FIRST, offers=informed(trace, by_group=True))
    found.append((by_group.makespan_s, "longest groups first"))
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
        simulate(own_trace, [machine], _LONGEST_FIRST, offers=informed(own_trace)).makespan_s
        for machine, own in zip(machines, dealt, strict=True)
        if own
        for own_trace in [_trace_of(trace, own)]
    )


def _trace_of(trace: Trace, dealt: Sequence[tuple[TracedGroup, TracedRollout]]) -> Trace:
    prompts: dict[int, int] = {}
    rollouts: dict[int, list[TracedRollout]] = defaultdict(list)
    for group, rollout in dealt:
        prompts[rollout.key.task_index] = group.prompt_tokens
        rollouts[rollout.key.task_index].append(rollout)
    groups = tuple(TracedGroup(prompt_tokens=prompts[index], rollouts=tuple(each)) for index, each in rollouts.items())
    return replace(trace, groups=groups)


def _work_s(rollout: TracedRollout, prompt_tokens: int, machine: SimulatedMachine) -> float:
    """Time of an engine whose rows are all in use that a rollout takes, without its prompt."""
    return sum(price * amount for price, amount in zip(prices_of(machine), tokens_of(rollout, prompt_tokens), strict=True))
