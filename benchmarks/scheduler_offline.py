"""The best schedule of several that know all lengths in advance, to compare the scheduler with."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from strop.rollout.scheduler.admission import Rollout, WaitingGroup, WaitingQueue
from strop.rollout.scheduler.scheduler import RunReason, Scheduler, SchedulerConfig
from strop.simulation.simulate import Outcome, SimulatedMachine, prices_of, simulate, tokens_of
from strop.simulation.trace import Trace, TracedGroup, TracedRollout
from strop.types import RolloutKey

_LONGEST_FIRST = SchedulerConfig(order="longest_first")


class _KnownLengths(WaitingQueue):
    """Ranks each group by the known length of its first rollout."""

    def __init__(self, lengths: Mapping[RolloutKey, float]) -> None:
        super().__init__(is_longest_first=True)
        self._lengths = lengths

    def _expected(self, group: WaitingGroup) -> float:
        return self._lengths[group.waiting[0].key]


class _Informed(Scheduler):
    """Knows how long each rollout will be."""

    def __init__(self, lengths: Mapping[RolloutKey, float]) -> None:
        super().__init__(_LONGEST_FIRST)
        self._queue = _KnownLengths(lengths)

    def _continue(self, rollout: Rollout) -> None:
        self._run(rollout, RunReason.CONTINUE)  # it never moves: what starts in the right place can stay there


def _simulate_informed(trace: Trace, machines: Sequence[SimulatedMachine], *, by_group: bool = False) -> Outcome:
    """Simulate `trace` with the length of each rollout known, so that the longest start first.

    Args:
        by_group: the groups whose rollouts are longest on average start first.
    """
    lengths: dict[RolloutKey, float] = {rollout.key: rollout.response_tokens for rollout in trace.rollouts}
    offers = {key: int(lengths[key]) for key in sorted(lengths, key=lambda key: (key.task_index, -lengths[key]))}
    if by_group:
        for group in trace.groups:
            mean = sum(lengths[rollout.key] for rollout in group.rollouts) / len(group.rollouts)
            lengths |= {rollout.key: mean for rollout in group.rollouts}
    return simulate(trace, machines, _LONGEST_FIRST, offers=offers, scheduler=_Informed(lengths))


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
        outcome = _simulate_informed(trace, fewer)
        found.append((outcome.makespan_s, f"longest first, {share:.0%} of the rows"))
    by_group = _simulate_informed(trace, machines, by_group=True)
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
        _simulate_informed(own_trace, [machine]).makespan_s
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
