"""The scheduler: a pure state machine that the live engine pool and the simulator drive.

`handle` takes one event with the time at which it happened and returns the actions that follow, to be carried out in this
order. A scheduler never waits and never reads a clock. `events.py` lists all events and actions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from strop.config import Config
from strop.errors import RequestTooLong, StropError
from strop.rollout.scheduler.admission import Engine, Phase, Rollout, Size, WaitingGroup, WaitingQueue
from strop.rollout.scheduler.events import (
    Action,
    BranchRequested,
    CallTools,
    EngineDied,
    EngineJoined,
    Event,
    Release,
    RolloutEnded,
    RolloutOffered,
    Run,
    RunReason,
    ToolFinished,
    ToolStarted,
    TurnFinished,
)
from strop.rollout.scheduler.placement import Placement
from strop.rollout.scheduler.report import EngineUsage, Ledger, StepFunction
from strop.types import RolloutKey

_MAX_SKIPPED = 16  # groups of the queue that a refill looks past


class SchedulerConfig(Config):
    """Which rollout starts next, on which engine, and how much KV memory is reserved for it."""

    policy: Literal["scheduler", "static"] = Field(
        default="scheduler",
        description="`scheduler` balances load by KV memory. `static` deals groups evenly in advance and waits for all"
        " rollouts of an engine at every turn: the baseline of rStar2-Agent (arXiv 2508.20722, Figure 7).",
    )
    order: Literal["fifo", "longest_first"] = Field(
        default="longest_first",
        description="Order in which waiting rollouts start. `longest_first` starts the group with the largest expected length.",
    )
    oversubscription: float = Field(
        default=1.0,
        ge=1,
        le=1000,
        description="How many times KV memory may be reserved. Above 1, engines may evict conversations.",
    )
    max_replacements: int = Field(default=2, ge=0, le=10**6, description="Engines that a step opens in place of lost ones.")


class Scheduler:
    """The load-balanced scheduler of rStar2-Agent (arXiv 2508.20722, section 3.2).

    It starts a rollout where its largest possible length can be held, so that no engine has to evict. A rollout stays on its
    engine to its end, and waits for no other rollout. Whenever memory is freed the next one starts.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.ledger = Ledger()
        self.usage: dict[str, EngineUsage] = {}  # by engine, lost ones included
        self.queue_length = StepFunction()
        self._queue = WaitingQueue(is_longest_first=config.order == "longest_first")
        self._engines: dict[str, Engine] = {}  # that are present
        self._placement: Placement | None = None  # None: there is at most one engine
        self._rollouts: dict[RolloutKey, Rollout] = {}
        self._actions: list[Action] = []
        self._now_s = 0.0

    def handle(self, event: Event, *, now_s: float) -> list[Action]:
        """Return the actions that follow from `event`, which happened at `now_s`, in the order in which to do them.

        Raises:
            RequestTooLong: no engine can ever hold an offered rollout, which is not accepted.
            StropError: the event names a rollout or an engine that does not exist.
        """
        self._now_s, self._actions = now_s, []
        match event:
            case TurnFinished():
                self._handle_turn_finished(event)
            case ToolStarted():
                self._handle_tool_started(event)
            case ToolFinished():
                self._handle_tool_finished(event)
            case RolloutEnded():
                self._handle_rollout_ended(event)
            case RolloutOffered():
                self._handle_rollout_offered(event)
            case BranchRequested():
                self._handle_branch_requested(event)
            case EngineJoined():
                self._handle_engine_joined(event)
            case EngineDied():
                self._handle_engine_died(event)
        self._refill()
        if not self.queue_length.changes or self.queue_length.changes[-1][1] != self._queue.num_waiting:
            self.queue_length.set(now_s, self._queue.num_waiting)
        return self._actions

    @property
    def live(self) -> frozenset[RolloutKey]:
        """Rollouts that were offered or branched and have not ended."""
        return frozenset(self._rollouts)

    @property
    def waiting(self) -> tuple[RolloutKey, ...]:
        """Live rollouts that wait for an engine."""
        return tuple(each.key for each in self._queue.waiting())

    @property
    def stranded(self) -> tuple[RolloutKey, ...]:
        """Waiting rollouts that none of the present engines can ever hold."""
        engines = self._engines.values()
        return tuple(each.key for each in self._queue.waiting() if not any(engine.can_hold(each.size) for engine in engines))

    def is_crowded(self, engine: str) -> bool:
        """Whether an engine was given more than it holds, so that conversations cannot keep their memory between turns."""
        return False

    # What another policy decides differently.

    def _offer(self, rollout: Rollout) -> None:
        self._queue.offer(rollout)

    def _finish_turn(self, rollout: Rollout, num_tokens: int) -> None:
        """Call the tools of a turn of `num_tokens`, now or later."""
        if not rollout.is_branch:
            self._queue.grew(rollout.size.group, num_tokens)
        self._actions.append(CallTools(key=rollout.key))

    def _continue(self, rollout: Rollout) -> None:
        """Continue after an observation, now or later."""
        if rollout.engine is None:  # lost while the tools ran
            self._restart(rollout)
        else:
            self._run(rollout, RunReason.CONTINUE)

    def _branch(self, event: BranchRequested, parent: Rollout) -> None:
        engine, at = parent.engine, parent.context_tokens
        branch = self._add_branch(event, parent)
        total = branch.size.total_tokens
        if engine is None or not engine.has_free_row or engine.fork_need(at, total) > engine.free:
            self.ledger.branches_queued += 1
            self._hold(parent, branch)
            self._queue.offer_first(branch)
            return
        engine.fork(parent.key, event.key, at, total)
        self._update(engine, parent.size)
        branch.engine = engine
        self._run(branch, RunReason.BRANCH)

    def _end(self, rollout: Rollout) -> None:
        """Free what the rollout holds."""
        if rollout.phase is Phase.WAITING:
            self._queue.drop(rollout)
            self._let_go(rollout)
        if (engine := rollout.engine) is not None:
            engine.release(rollout.key)
            self._update(engine, rollout.size)
            self._record_usage(engine)
            self._actions.append(Release(key=rollout.key, engine=engine.name))
        if not rollout.is_branch:
            self._queue.ended(rollout.size.group)
        self._pass_on(rollout)

    def _pass_on(self, ended: Rollout) -> None:
        """Start the longest branch that waits for `ended` in the memory that is free now. It holds what the others share."""
        waiting, ended.branches = ended.branches, []
        for branch in waiting:
            branch.holder = None
        first = max(waiting, key=lambda branch: branch.context_tokens, default=None)
        if first is not None and ended.engine is not None and ended.engine.has_room(first.size):
            for branch in waiting:
                if branch is not first:
                    self._hold(first, branch)
            self._start(self._queue.alone(first), ended.engine)

    def _hold(self, holder: Rollout, branch: Rollout) -> None:
        """Let `branch` wait for `holder`, whose memory begins with what the branch shares."""
        branch.holder = holder
        holder.branches.append(branch)

    def _let_go(self, branch: Rollout) -> None:
        if branch.holder is not None:
            branch.holder.branches.remove(branch)
            branch.holder = None

    def _refill(self) -> None:
        """Start waiting rollouts in order. A rollout overtakes another only on an engine that could never hold the other."""
        if not self._queue.num_waiting or not self._engines:
            return
        if self._placement is not None:
            self._placement.open_all()
        skipped: list[WaitingGroup] = []
        while (group := self._queue.first(skipped=skipped)) is not None:
            first = group.waiting[0]
            engine = self._best_engine(first, turn=group.number)
            if engine is not None:
                self._start(group, engine)
            elif self._is_blocked(first.size) or len(skipped) == _MAX_SKIPPED:
                break
            else:
                skipped.append(group)

    # Engines.

    def _best_engine(self, rollout: Rollout, *, turn: int) -> Engine | None:
        if rollout.holder is not None and (engine := rollout.holder.engine) is not None and engine.has_room(rollout.size):
            return engine
        if self._placement is not None:
            return self._placement.best(rollout, turn=turn)
        [engine] = self._engines.values()
        return engine if engine.has_room(rollout.size) else None

    def _is_blocked(self, size: Size) -> bool:
        """Whether every engine now waits for room, also for a rollout of `size`."""
        if self._placement is not None:
            return self._placement.close_for(size)
        [engine] = self._engines.values()
        return engine.can_hold(size)

    def _start(self, group: WaitingGroup, engine: Engine) -> None:
        rollout = group.waiting[0] if self._placement is None else self._placement.least_started(engine, group)
        self._queue.take(group, rollout)
        cached = rollout.size.prompt_tokens if rollout.size.prompt in engine.prompts else 0
        engine.reserve(rollout.key, rollout.size)
        self._update(engine, rollout.size)
        rollout.engine = engine
        if rollout.is_branch and not rollout.num_runs:
            self._let_go(rollout)
            self._run(rollout, RunReason.BRANCH)
            return
        if rollout.num_runs:
            self.ledger.recomputed_tokens += max(0, rollout.known_tokens - cached)
        self._run(rollout, RunReason.RESTART if rollout.num_runs else RunReason.START)

    def _restart(self, rollout: Rollout) -> None:
        rollout.phase = Phase.WAITING
        self._queue.offer_first(rollout)

    def _handle_engine_joined(self, event: EngineJoined) -> None:
        engine = Engine(event.engine, oversubscription=self.config.oversubscription, joined_s=self._now_s)
        self._engines[engine.name], self.usage[engine.name] = engine, engine.usage
        self._place()

    def _handle_engine_died(self, event: EngineDied) -> None:
        if event.name not in self._engines:
            raise StropError(f"there is no engine {event.name!r}: it never joined, or it was lost.")
        engine = self._engines.pop(event.name)
        self._place()
        engine.reserved, engine.usage.left_s = 0, self._now_s
        for rollout in [self._find(key) for key in engine.holdings]:
            if rollout.phase is Phase.RUNNING:
                self._stop_running(rollout)
                self.ledger.lost_turns += 1
                self._restart(rollout)
            rollout.engine = None

    def _place(self) -> None:
        """Engines have joined or left."""
        self._placement = Placement(list(self._engines.values())) if len(self._engines) > 1 else None

    def _update(self, engine: Engine, size: Size) -> None:
        """The reservations of `engine` have changed."""
        if self._placement is not None:
            self._placement.update(engine, size.prompt)

    def _record_usage(self, engine: Engine) -> None:
        share = engine.reserved / engine.spec.kv_blocks  # of real memory: above 1 if over-subscribed
        engine.usage.record(self._now_s, min(engine.num_running, engine.spec.max_conversations), share)

    # Rollouts.

    def _run(self, rollout: Rollout, reason: RunReason) -> None:
        """Request the next completion of a rollout from its engine."""
        engine = rollout.engine
        assert engine is not None
        if rollout.started_s is None:
            rollout.started_s = self._now_s
            self.ledger.queue_wait_s += self._now_s - rollout.offered_s
        rollout.phase = Phase.RUNNING
        rollout.num_runs += 1
        rollout.known_tokens = rollout.context_tokens
        engine.num_running += 1
        self._record_usage(engine)
        self.ledger.runs[reason] += 1
        run = Run(key=rollout.key, engine=engine.name, run=rollout.num_runs, reason=reason, max_tokens=rollout.max_tokens)
        self._actions.append(run)

    def _stop_running(self, rollout: Rollout) -> None:
        """The completion under way will not come back, or does not count."""
        assert rollout.engine is not None
        rollout.engine.num_running -= 1
        self._record_usage(rollout.engine)

    def _find(self, key: RolloutKey) -> Rollout:
        if key not in self._rollouts:
            raise StropError(f"rollout {key} was never offered, or has ended.")
        return self._rollouts[key]

    def _add_branch(self, event: BranchRequested, parent: Rollout) -> Rollout:
        """Record a fork of the parent's context."""
        total = parent.context_tokens + event.max_tokens
        branch = self._rollouts[event.key] = Rollout(
            key=event.key,
            size=replace(parent.size, total_tokens=total),
            context_tokens=parent.context_tokens,
            is_branch=True,
            offered_s=self._now_s,
        )
        self.ledger.branched += 1
        return branch

    def _handle_rollout_offered(self, event: RolloutOffered) -> None:
        total = event.prompt_tokens + event.max_tokens
        self._check_fits(event, total)
        if event.key in self._rollouts:
            raise StropError(f"rollout {event.key} was offered twice.")
        prompt = (event.key.task_index, event.prompt)
        rollout = self._rollouts[event.key] = Rollout(
            key=event.key,
            size=Size(prompt=prompt, prompt_tokens=event.prompt_tokens, total_tokens=total),
            context_tokens=event.prompt_tokens,
            offered_s=self._now_s,
        )
        self.ledger.offered += 1
        self._offer(rollout)

    def _check_fits(self, event: RolloutOffered, total_tokens: int) -> None:
        """Check that an otherwise empty engine can hold the rollout at its longest."""
        largest = max((engine.spec for engine in self._engines.values()), key=lambda spec: spec.longest, default=None)
        if largest is None:
            raise StropError("a rollout was offered, but there is no engine to run it.")
        if total_tokens > largest.longest:
            raise RequestTooLong(
                f"rollout {event.key}: a prompt of {event.prompt_tokens} tokens and a response of up to {event.max_tokens}"
                f" are {total_tokens} tokens, but the largest engine, {largest.name}, holds conversations of up to"
                f" {largest.longest}. Lower sampling.max_tokens, leave out long prompts, or give an engine more KV memory."
            )

    def _handle_turn_finished(self, event: TurnFinished) -> None:
        rollout = self._rollouts.get(event.key)
        if rollout is None or rollout.phase is not Phase.RUNNING or rollout.num_runs != event.run:
            self.ledger.stale_answers += 1
            return
        if event.num_tokens > rollout.max_tokens:
            raise StropError(f"rollout {event.key} has {rollout.max_tokens} tokens left, but sampled {event.num_tokens}.")
        rollout.context_tokens += event.num_tokens
        rollout.known_tokens = rollout.context_tokens
        self.ledger.turns += 1
        self.ledger.sampled_tokens += event.num_tokens
        self.ledger.recomputed_tokens += event.recomputed_tokens
        self._stop_running(rollout)
        rollout.phase = Phase.CALLING
        rollout.called_s, rollout.tool_started_s = self._now_s, None
        self._finish_turn(rollout, event.num_tokens)

    def _handle_tool_started(self, event: ToolStarted) -> None:
        rollout = self._rollouts.get(event.key)
        if rollout is not None and rollout.phase is Phase.CALLING:
            rollout.tool_started_s = self._now_s
            self.ledger.tool_wait_s += self._now_s - rollout.called_s

    def _handle_tool_finished(self, event: ToolFinished) -> None:
        rollout = self._rollouts.get(event.key)
        if rollout is None:  # it was ended in the meantime
            return
        if rollout.phase is not Phase.CALLING:
            raise StropError(f"rollout {event.key} is {rollout.phase}, but its tool call was answered.")
        if event.num_tokens > rollout.max_tokens:
            raise StropError(f"rollout {event.key} has {rollout.max_tokens} tokens left, but observed {event.num_tokens}.")
        self.ledger.tool_turns += 1
        self.ledger.observation_tokens += event.num_tokens
        if rollout.tool_started_s is not None:
            self.ledger.tool_run_s += self._now_s - rollout.tool_started_s
        rollout.context_tokens += event.num_tokens
        self._continue(rollout)

    def _handle_branch_requested(self, event: BranchRequested) -> None:
        if event.key in self._rollouts or event.key.task_index != event.parent.task_index:
            raise StropError(f"branch {event.key} of {event.parent} already exists or belongs to another task.")
        self._branch(event, self._find(event.parent))

    def _handle_rollout_ended(self, event: RolloutEnded) -> None:
        rollout = self._find(event.key)
        if rollout.phase is Phase.RUNNING:
            self._stop_running(rollout)
        del self._rollouts[rollout.key]
        ledger, response_tokens = self.ledger, rollout.context_tokens - rollout.size.prompt_tokens
        ledger.ended += 1
        ledger.longest_rollout_tokens = max(ledger.longest_rollout_tokens, response_tokens)
        if rollout.started_s is not None:
            ledger.longest_rollout_s = max(ledger.longest_rollout_s, self._now_s - rollout.started_s)
        self._end(rollout)


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    if config.policy == "static":
        from strop.rollout.scheduler.static import StaticScheduler

        return StaticScheduler(config)
    return Scheduler(config)
