"""The scheduler: a pure state machine that the live engine pool and the simulator drive.

A driver reports each event by a call, with the time at which it happened, and carries out the actions that are returned, in
this order. A scheduler never waits and never reads a clock.

| the driver sees                    | it calls           | the actions that may follow                                  |
| ---------------------------------- | ------------------ | ------------------------------------------------------------ |
| an engine is ready                 | `engine_joined`    | `Run` of rollouts that wait                                  |
| a rollout is ready to start        | `offered`          | `Run(reason=START)` if it fits                               |
| a turn came back                   | `turn_finished`    | `CallTools`, at once or at static's barrier                  |
| a piece of a turn came back        | `piece_finished`   | `Run(reason=CONTINUE)`; or `Release`, and `Run(reason=MOVE)` |
| the sandbox starts the tool calls  | `tool_started`     | none                                                         |
| the observation is complete        | `tool_finished`    | `Run(reason=CONTINUE)`; or `Release`, and `Run(reason=MOVE)` |
| the method wants to fork a rollout | `branch_requested` | `Run(reason=BRANCH)`, now or when it fits                    |
| the rollout ended, for any reason  | `ended`            | `Release`, and `Run` of rollouts that wait                   |
| an engine is lost                  | `engine_died`      | `Run(reason=RESTART)` on another engine                      |

A `Run` is one call of `InferenceEngine.complete` with at most `max_tokens` new tokens. With several engines it is for a piece
of a turn at most, after which the rollout may move. `Run.run` is reported back with the answer. The scheduler counts and
ignores an answer to an older run: its engine was lost, or its rollout has ended. A rollout that loses its engine keeps its
finished turns and pieces; another engine samples the lost one again from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, wraps
from typing import Concatenate, Literal, ParamSpec, TypeAlias

from pydantic import Field

from strop.config import Config
from strop.errors import RequestTooLong, StropError
from strop.rollout.scheduler.admission import Engine, EngineSpec, Phase, Rollout, Size, WaitingGroup, WaitingQueue
from strop.rollout.scheduler.placement import Placement
from strop.rollout.scheduler.report import EngineUsage, Ledger, StepFunction
from strop.types import RolloutKey

_MAX_SKIPPED = 16  # groups of the queue that a refill looks past
_PIECE_TOKENS = 1024  # of a turn


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


class RunReason(StrEnum):
    """Why a completion is requested. The reason decides how much of its context the engine has in its cache."""

    START = "start"  # the first turn: the prompt
    BRANCH = "branch"  # the first turn of a branch: all but its last ids are cached for its parent
    CONTINUE = "continue"  # everything but the newest observation is cached
    MOVE = "move"  # another engine has less to compute: nothing but the prompt may be cached there
    RESTART = "restart"  # the rollout lost its engine: nothing but the prompt may be cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Request the next completion of a rollout from `engine`."""

    key: RolloutKey
    engine: str
    run: int  # number of this run, reported back with its answer
    reason: RunReason
    max_tokens: int  # left of the response, or those of a piece


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTools:
    """Send the tool calls of the newest turn to the tools."""

    key: RolloutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Abort what the rollout may be running on `engine` and free its KV memory."""

    key: RolloutKey
    engine: str


Action: TypeAlias = Run | CallTools | Release


_P = ParamSpec("_P")


def _event(change: Callable[Concatenate[Scheduler, _P], None]) -> Callable[Concatenate[Scheduler, float, _P], list[Action]]:
    """Let `change` be called with the time of its event, and return the actions that follow, in their order."""

    @wraps(change)
    def handle(scheduler: Scheduler, now_s: float, /, *arguments: _P.args, **named: _P.kwargs) -> list[Action]:
        scheduler._now_s, scheduler._actions = now_s, []
        change(scheduler, *arguments, **named)
        scheduler._refill()
        scheduler._record_queue()
        return scheduler._actions

    return handle


class Scheduler:
    """The load-balanced scheduler of rStar2-Agent (arXiv 2508.20722, section 3.2).

    It starts a rollout where its largest possible length can be held, so that no engine has to evict. A rollout stays on its
    engine, unless another one has much less to compute when a turn or a piece of it begins, and waits for no other rollout.
    Whenever memory is freed the next one starts.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.ledger = Ledger()
        self.usage: dict[str, EngineUsage] = {}  # by engine, lost ones included
        self.queue_length = StepFunction()
        self._queue = WaitingQueue(is_longest_first=config.order == "longest_first")
        self._engines: dict[str, Engine] = {}  # that are present
        self._rollouts: dict[RolloutKey, Rollout] = {}
        self._actions: list[Action] = []
        self._now_s = 0.0

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
        longest = max((engine.longest for engine in self._engines.values()), default=0)
        return tuple(each.key for each in self._queue.waiting() if each.size.total_tokens > longest)

    def is_crowded(self, engine: str) -> bool:
        """Whether an engine was given more than it holds, so that conversations cannot keep their memory between turns."""
        return False

    # Events.

    @_event
    def offered(self, key: RolloutKey, *, prompt: Hashable = None, prompt_tokens: int, max_tokens: int) -> None:
        """A rollout is ready to start. The rollouts of one task are its group.

        Args:
            prompt: equal for equal prompts of a task.
            max_tokens: of the whole response: every completion and observation after the prompt.

        Raises:
            RequestTooLong: no engine can ever hold it; it is not accepted.
            StropError: it was offered before, or there is no engine.
        """
        total = prompt_tokens + max_tokens
        self._check_fits(key, prompt_tokens, max_tokens)
        if key in self._rollouts:
            raise StropError(f"rollout {key} was offered twice.")
        rollout = self._rollouts[key] = Rollout(
            key=key,
            size=Size(prompt=(key.task_index, prompt), prompt_tokens=prompt_tokens, total_tokens=total),
            context_tokens=prompt_tokens,
            offered_s=self._now_s,
        )
        self.ledger.offered += 1
        self._offer(rollout)

    @_event
    def turn_finished(self, key: RolloutKey, *, run: int, num_tokens: int, recomputed_tokens: int = 0) -> None:
        """A completion came back. After the last one of a rollout, `ended` follows instead of tool events.

        Args:
            run: of the `Run` that it answers.
            num_tokens: sampled.
            recomputed_tokens: computed before by this engine, but no longer in its cache.
        """
        if (rollout := self._answered(key, run, num_tokens, recomputed_tokens)) is not None:
            self.ledger.turns += 1
            rollout.phase = Phase.CALLING
            rollout.called_s, rollout.tool_started_s = self._now_s, None
            self._finish_turn(rollout, num_tokens)

    @_event
    def piece_finished(self, key: RolloutKey, *, run: int, num_tokens: int, recomputed_tokens: int = 0) -> None:
        """A completion came back that has the `max_tokens` of its `Run`, and the turn goes on. See `turn_finished`."""
        if (rollout := self._answered(key, run, num_tokens, recomputed_tokens)) is not None:
            if not rollout.is_branch:
                self._queue.grew(rollout.size.group, num_tokens)
            self._continue(rollout)

    @_event
    def tool_started(self, key: RolloutKey) -> None:
        """The tool calls of a turn left the queue of the sandbox and run."""
        rollout = self._rollouts.get(key)
        if rollout is not None and rollout.phase is Phase.CALLING:
            rollout.tool_started_s = self._now_s
            self.ledger.tool_wait_s += self._now_s - rollout.called_s

    @_event
    def tool_finished(self, key: RolloutKey, *, num_tokens: int) -> None:
        """The last tool call of a turn has its result, an observation of `num_tokens`."""
        rollout = self._rollouts.get(key)
        if rollout is None:  # it was ended in the meantime
            return
        if rollout.phase is not Phase.CALLING:
            raise StropError(f"rollout {key} is {rollout.phase}, but its tool call was answered.")
        if num_tokens > rollout.max_tokens:
            raise StropError(f"rollout {key} has {rollout.max_tokens} tokens left, but observed {num_tokens}.")
        self.ledger.tool_turns += 1
        self.ledger.observation_tokens += num_tokens
        if rollout.tool_started_s is not None:
            self.ledger.tool_run_s += self._now_s - rollout.tool_started_s
        self._grow(rollout, num_tokens)
        self._continue(rollout)

    @_event
    def branch_requested(self, key: RolloutKey, *, parent: RolloutKey, max_tokens: int) -> None:
        """Fork `parent` after its newest observation, or after its newest completion if that has no observation yet.

        A branch for which the rollout's engine has no room goes before all rollouts that have not started.

        Args:
            key: of the branch.
            max_tokens: of completions and observations after the fork.
        """
        if key in self._rollouts or key.task_index != parent.task_index:
            raise StropError(f"branch {key} of {parent} already exists or belongs to another task.")
        found = self._find(parent)
        branch = self._rollouts[key] = Rollout(
            key=key,
            size=found.size._replace(total_tokens=found.context_tokens + max_tokens),
            context_tokens=found.context_tokens,
            is_branch=True,
            offered_s=self._now_s,
        )
        self.ledger.branched += 1
        self._branch(branch, found)

    @_event
    def ended(self, key: RolloutKey) -> None:
        """A rollout is over: answered, at a limit, void or cancelled."""
        rollout = self._find(key)
        if rollout.phase is Phase.RUNNING:
            self._stop_running(rollout)
        del self._rollouts[key]
        ledger, response_tokens = self.ledger, rollout.context_tokens - rollout.size.prompt_tokens
        ledger.ended += 1
        ledger.longest_rollout_tokens = max(ledger.longest_rollout_tokens, response_tokens)
        if rollout.started_s is not None:
            ledger.longest_rollout_s = max(ledger.longest_rollout_s, self._now_s - rollout.started_s)
        self._end(rollout)

    @_event
    def engine_joined(self, spec: EngineSpec) -> None:
        """Rollouts may run on another engine."""
        self._add_engine(spec)

    @_event
    def engine_died(self, name: str) -> None:
        """The engine is lost, with its KV memory and the completions that it was sampling."""
        if name not in self._engines:
            raise StropError(f"there is no engine {name!r}: it never joined, or it was lost.")
        self._lose_engine(name)

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
        elif (engine := self._lighter_engine(rollout)) is not None:
            self._leave(rollout)
            self.ledger.moved_tokens += self._enter(rollout, engine)
            self._run(rollout, RunReason.MOVE)
        else:
            self._run(rollout, RunReason.CONTINUE)

    def _branch(self, branch: Rollout, parent: Rollout) -> None:
        engine, at, total = parent.engine, parent.context_tokens, branch.size.total_tokens
        if engine is None or not engine.has_free_row or engine.fork_need(at, total) > engine.free:
            self.ledger.branches_queued += 1
            self._hold(parent, branch)
            self._queue.offer_first(branch)
            return
        engine.fork(parent.key, branch.key, at, total)
        engine.tokens[0] += branch.context_tokens
        self._placement.update(engine, parent.size.prompt)
        branch.engine = engine
        self._run(branch, RunReason.BRANCH)

    def _end(self, rollout: Rollout) -> None:
        """Free what the rollout holds."""
        if rollout.phase is Phase.WAITING:
            self._queue.drop(rollout)
            self._let_go(rollout)
        self._leave(rollout)
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
        queue = self._queue
        if not queue.num_waiting or not (queue.has_changed or self._placement.has_changed):
            return
        placement = self._placement
        placement.open_all()
        skipped: list[WaitingGroup] = []
        while placement.accepting and (group := queue.first(skipped=skipped)) is not None:
            first = group.waiting[0]
            engine = self._best_engine(first, turn=group.number)
            if engine is not None:
                self._start(group, engine)
            elif placement.close_for(first.size) or len(skipped) == _MAX_SKIPPED:
                break
            else:
                skipped.append(group)
        queue.has_changed = placement.has_changed = False

    # Engines.

    def _best_engine(self, rollout: Rollout, *, turn: int) -> Engine | None:
        if rollout.holder is not None and (engine := rollout.holder.engine) is not None and engine.has_room(rollout.size):
            return engine
        return self._placement.best(rollout, turn=turn)

    def _start(self, group: WaitingGroup, engine: Engine) -> None:
        rollout = group.waiting[0] if len(self._engines) == 1 else self._placement.least_started(engine, group)
        self._queue.take(group, rollout)
        num_known = self._enter(rollout, engine)
        if rollout.is_branch and not rollout.num_runs:
            self._let_go(rollout)
            self._run(rollout, RunReason.BRANCH)
            return
        if rollout.num_runs:
            self.ledger.recomputed_tokens += num_known
        self._run(rollout, RunReason.RESTART if rollout.num_runs else RunReason.START)

    def _lighter_engine(self, rollout: Rollout) -> Engine | None:
        """The engine to which a rollout moves, if that is worth it. One that branches wait for stays: they share its memory."""
        assert rollout.engine is not None
        if rollout.branches or rollout.engine.spec.keeps_rollouts:
            return None
        return self._placement.lighter(rollout)

    def _enter(self, rollout: Rollout, engine: Engine) -> int:
        """Reserve memory on an engine that has room. Return the tokens that it computes though another engine did before."""
        cached = rollout.size.prompt_tokens if rollout.size.prompt in engine.prompts else 0
        engine.reserve(rollout.key, rollout.size)
        engine.tokens[0] += rollout.context_tokens
        self._placement.update(engine, rollout.size.prompt)
        rollout.engine = engine
        return max(0, rollout.known_tokens - cached)

    def _leave(self, rollout: Rollout) -> None:
        """Free what the rollout holds of its engine, if it has one."""
        if (engine := rollout.engine) is not None:
            engine.release(rollout.key)
            engine.tokens[0] -= rollout.context_tokens
            self._placement.update(engine, rollout.size.prompt)
            self._record_usage(engine)
            self._actions.append(Release(key=rollout.key, engine=engine.name))

    def _restart(self, rollout: Rollout) -> None:
        rollout.phase = Phase.WAITING
        self._queue.offer_first(rollout)

    def _add_engine(self, spec: EngineSpec) -> None:
        engine = Engine(spec, oversubscription=self.config.oversubscription, joined_s=self._now_s)
        self._engines[engine.name], self.usage[engine.name] = engine, engine.usage
        vars(self).pop("_placement", None)

    def _lose_engine(self, name: str) -> None:
        engine = self._engines.pop(name)
        vars(self).pop("_placement", None)
        engine.reserved, engine.usage.left_s = 0, self._now_s
        for rollout in [self._find(key) for key in engine.holdings]:
            if rollout.phase is Phase.RUNNING:
                self._stop_running(rollout)
                self.ledger.lost_turns += 1
                self._restart(rollout)
            rollout.engine = None

    @cached_property
    def _placement(self) -> Placement:
        """The present engines. Made when it is first needed after one joined or left: hundreds may join at once."""
        return Placement(list(self._engines.values()))

    def _record_queue(self) -> None:
        if not self.queue_length.changes or self.queue_length.changes[-1][1] != self._queue.num_waiting:
            self.queue_length.set(self._now_s, self._queue.num_waiting)

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
        max_tokens = self._longest_run(rollout)
        self._actions.append(
            Run(key=rollout.key, engine=engine.name, run=rollout.num_runs, reason=reason, max_tokens=max_tokens)
        )

    def _longest_run(self, rollout: Rollout) -> int:
        """Tokens of the next completion at most."""
        assert rollout.engine is not None
        is_whole = len(self._engines) == 1 or rollout.engine.spec.keeps_rollouts
        return rollout.max_tokens if is_whole else min(rollout.max_tokens, _PIECE_TOKENS)

    def _answered(self, key: RolloutKey, run: int, num_tokens: int, recomputed_tokens: int) -> Rollout | None:
        """Count a completion. Return its rollout, or None if that waits for another one or has ended."""
        rollout = self._rollouts.get(key)
        if rollout is None or rollout.phase is not Phase.RUNNING or rollout.num_runs != run:
            self.ledger.stale_answers += 1
            return None
        if num_tokens > rollout.max_tokens:
            raise StropError(f"rollout {key} has {rollout.max_tokens} tokens left, but sampled {num_tokens}.")
        self._grow(rollout, num_tokens)
        rollout.known_tokens = rollout.context_tokens
        self.ledger.sampled_tokens += num_tokens
        self.ledger.recomputed_tokens += recomputed_tokens
        self._stop_running(rollout)
        return rollout

    def _stop_running(self, rollout: Rollout) -> None:
        """The completion under way will not come back, or does not count."""
        assert rollout.engine is not None
        rollout.engine.num_running -= 1
        self._record_usage(rollout.engine)

    def _grow(self, rollout: Rollout, num_tokens: int) -> None:
        rollout.context_tokens += num_tokens
        if rollout.engine is not None:
            rollout.engine.tokens[0] += num_tokens

    def _find(self, key: RolloutKey) -> Rollout:
        if key not in self._rollouts:
            raise StropError(f"rollout {key} was never offered, or has ended.")
        return self._rollouts[key]

    def _check_fits(self, key: RolloutKey, prompt_tokens: int, max_tokens: int) -> None:
        """Check that an otherwise empty engine can hold the rollout at its longest."""
        largest = self._placement.largest
        if largest is None:
            raise StropError("a rollout was offered, but there is no engine to run it.")
        if prompt_tokens + max_tokens > largest.longest:
            raise RequestTooLong(
                f"rollout {key}: a prompt of {prompt_tokens} tokens and a response of up to {max_tokens}"
                f" are {prompt_tokens + max_tokens} tokens, but the largest engine, {largest.name}, holds conversations of up"
                f" to {largest.longest}. Lower sampling.max_tokens, leave out long prompts, or give an engine more KV memory."
            )


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    if config.policy == "static":
        from strop.rollout.scheduler.static import StaticScheduler

        return StaticScheduler(config)
    return Scheduler(config)
