"""The static policy: the baseline of rStar2-Agent (arXiv 2508.20722, section 3.2, Figure 7)."""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.errors import EngineLost
from strop.rollout.scheduler.admission import Engine, EngineSpec, Phase, Rollout
from strop.rollout.scheduler.scheduler import CallTools, Release, RunReason, Scheduler, SchedulerConfig
from strop.types import RolloutKey


@dataclass(slots=True, eq=False)
class _Barrier:
    """The rollouts that were dealt to one engine, by what they do in the current turn."""

    engine: Engine
    num_dealt: int = 0
    blocks: int = 0  # that all of them need at their longest, without sharing
    running: dict[RolloutKey, Rollout] = field(default_factory=dict)
    sampled: dict[RolloutKey, Rollout] = field(default_factory=dict)  # their turn is done, others still run
    calling: dict[RolloutKey, Rollout] = field(default_factory=dict)
    answered: dict[RolloutKey, Rollout] = field(default_factory=dict)

    @property
    def num_live(self) -> int:
        return len(self.running) + len(self.sampled) + len(self.calling) + len(self.answered)

    def add(self, rollout: Rollout) -> None:
        rollout.engine = self.engine
        self.num_dealt += 1
        self.blocks += self.engine.spec.blocks_for(rollout.size.total_tokens)
        self.running[rollout.key] = rollout

    def remove(self, rollout: Rollout) -> None:
        self.blocks -= self.engine.spec.blocks_for(rollout.size.total_tokens)
        for phase in (self.running, self.sampled, self.calling, self.answered):
            phase.pop(rollout.key, None)


class StaticScheduler(Scheduler):
    """Deals groups evenly to the engines in advance, with a barrier on each engine at every turn. A baseline.

    Every rollout starts at once. The tool calls of a turn start when its longest completion is done, and the next turn starts
    when the slowest tool has answered. Nothing reserves KV memory, so engines evict. In two ways this is better than the
    paper's baseline: the barrier is per engine and not over all engines, and a group stays on one engine.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._barriers: dict[str, _Barrier] = {}
        self._dealt: dict[int, _Barrier] = {}  # by group

    def is_crowded(self, engine: str) -> bool:
        barrier = self._barriers[engine]
        spec = barrier.engine.spec
        return barrier.num_live > spec.max_conversations or barrier.blocks > spec.kv_blocks

    def _longest_run(self, rollout: Rollout) -> int:
        return rollout.max_tokens

    def _offer(self, rollout: Rollout) -> None:
        fewest = min(self._barriers.values(), key=lambda each: each.num_dealt)
        self._dealt.setdefault(rollout.size.group, fewest).add(rollout)
        self._run(rollout, RunReason.START)

    def _finish_turn(self, rollout: Rollout, num_tokens: int) -> None:
        barrier = self._barrier_of(rollout)
        barrier.sampled[rollout.key] = barrier.running.pop(rollout.key)
        self._pass(barrier)

    def _continue(self, rollout: Rollout) -> None:
        rollout.phase = Phase.WAITING
        barrier = self._barrier_of(rollout)
        barrier.answered[rollout.key] = barrier.calling.pop(rollout.key)
        self._pass(barrier)

    def _branch(self, branch: Rollout, parent: Rollout) -> None:
        self._barrier_of(parent).add(branch)
        self._run(branch, RunReason.BRANCH)

    def _end(self, rollout: Rollout) -> None:
        barrier = self._barrier_of(rollout)
        barrier.remove(rollout)
        self._actions.append(Release(key=rollout.key, engine=barrier.engine.name))
        self._pass(barrier)

    def _add_engine(self, spec: EngineSpec) -> None:
        super()._add_engine(spec)
        self._barriers[spec.name] = _Barrier(self._engines[spec.name])

    def _lose_engine(self, name: str) -> None:
        raise EngineLost(f'{name} is lost. The static policy cannot move its rollouts; scheduler.policy = "scheduler" can.')

    def _pass(self, barrier: _Barrier) -> None:
        """Call the tools of a turn after its last completion; start the next turn after the last tool."""
        if barrier.running:
            return
        if barrier.sampled:
            barrier.calling |= barrier.sampled
            sampled, barrier.sampled = barrier.sampled, {}
            for rollout in sampled.values():
                rollout.called_s = self._now_s
                self._actions.append(CallTools(key=rollout.key))
        elif not barrier.calling:
            answered, barrier.answered = barrier.answered, {}
            for rollout in answered.values():
                barrier.running[rollout.key] = rollout
                self._run(rollout, RunReason.CONTINUE)

    def _barrier_of(self, rollout: Rollout) -> _Barrier:
        assert rollout.engine is not None
        return self._barriers[rollout.engine.name]
