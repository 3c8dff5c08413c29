"""The best schedule found by one who knows every length beforehand: what a policy that learns them too late is held against."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from strop.rollout.scheduling import SchedulerConfig
from strop.rollout.simulation.bounds import work_of
from strop.rollout.simulation.simulate import SimulatedMachine, simulate
from strop.rollout.simulation.trace import Trace, TracedGroup, TracedRollout

_LONGEST_FIRST = SchedulerConfig(order="longest_first")


def best_offline_s(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    *,
    tool_workers: int | None = None,
    row_shares: Sequence[float] = (1.0, 0.75, 0.5),
) -> tuple[float, str]:
    """The shortest makespan of several schedules that know all lengths, and which of them it was.

    All of them reserve just what each rollout will need and start the longest first. That is within 4/3 of the optimum on
    identical machines that run one job each (Graham, 1969), and far closer with many jobs a machine. Variants: fewer rows an
    engine, which makes each step faster and so helps the longest rollout; whole groups, the longest first, so that prompts are
    computed on fewer engines; and all work dealt to the engines beforehand so that each has the same. The policies that are
    held against it are none of them, so theirs may turn out shorter. The optimum itself is out of reach;
    `bounds.lower_bound_s` says how far it is at most.
    """
    found = []
    for share in row_shares:
        fewer = [_with_rows(machine, share) for machine in machines]
        outcome = simulate(trace, fewer, _LONGEST_FIRST, tool_workers=tool_workers, foresight="rollouts")
        found.append((outcome.makespan_s, f"longest first, {share:.0%} of the rows"))
    by_group = simulate(trace, machines, _LONGEST_FIRST, tool_workers=tool_workers, foresight="groups")
    found.append((by_group.makespan_s, "longest groups first"))
    if tool_workers is None:
        found.append((_dealt_s(trace, machines), "longest first, work dealt evenly beforehand"))
    return min(found)


def _with_rows(machine: SimulatedMachine, share: float) -> SimulatedMachine:
    rows = max(1, round(machine.spec.max_conversations * share))
    return replace(machine, spec=replace(machine.spec, max_conversations=rows))


def _dealt_s(trace: Trace, machines: Sequence[SimulatedMachine]) -> float:
    """Each rollout goes to the engine with the least work so far, the most work first; every engine then plays its own."""
    jobs = [(group, rollout) for group in trace.groups for rollout in group.rollouts]
    jobs.sort(key=lambda job: -work_of(job[1], job[0].prompt_tokens, machines[0]))
    loads = [(0.0, index) for index in range(len(machines))]
    dealt: list[list[tuple[TracedGroup, TracedRollout]]] = [[] for _ in machines]
    for group, rollout in jobs:
        load, index = heapq.heappop(loads)
        dealt[index].append((group, rollout))
        heapq.heappush(loads, (load + work_of(rollout, group.prompt_tokens, machines[index]), index))
    longest = 0.0
    for machine, hand in zip(machines, dealt, strict=True):
        if hand:
            outcome = simulate(_trace_of(trace, hand), [machine], _LONGEST_FIRST, foresight="rollouts")
            longest = max(longest, outcome.makespan_s)
    return longest


def _trace_of(trace: Trace, hand: Sequence[tuple[TracedGroup, TracedRollout]]) -> Trace:
    prompts: dict[int, int] = {}
    rollouts: dict[int, list[TracedRollout]] = defaultdict(list)
    for group, rollout in hand:
        prompts[rollout.key.task_index] = group.prompt_tokens
        rollouts[rollout.key.task_index].append(rollout)
    groups = tuple(TracedGroup(prompt_tokens=prompts[index], rollouts=tuple(each)) for index, each in rollouts.items())
    return replace(trace, groups=groups)
