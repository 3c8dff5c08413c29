"""The rollouts that are there, what they do, and what that adds up to: the part that every policy keeps alike."""

from __future__ import annotations

from strop.errors import StropError
from strop.rollout.scheduling.actions import Action, CallTools, RefuseBranch, Run, Why
from strop.rollout.scheduling.events import BranchAsked, GroupOffered, RolloutEnded, ToolFinished, ToolStarted, TurnFinished
from strop.rollout.scheduling.floor import Engine, Size
from strop.rollout.scheduling.ledger import Ledger
from strop.rollout.scheduling.rollouts import Phase, Rollout
from strop.rollout.scheduling.usage import EngineUsage
from strop.types import RolloutKey


class RolloutBook:
    """Rollouts by key, the ledger, the engines' use, and the actions of the event that is being handled."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.usage: dict[str, EngineUsage] = {}
        self.rollouts: dict[RolloutKey, Rollout] = {}
        self.actions: list[Action] = []
        self.now_s = 0.0
        self._num_running: dict[str, int] = {}
        self._mixed: set[int] = set()  # groups whose prompts are known to differ

    def begin(self, now_s: float) -> None:
        """Another event is handled."""
        self.now_s = now_s
        self.actions = []

    def engine_joined(self, name: str) -> None:
        self._num_running[name] = 0
        self.usage[name] = EngineUsage(since_s=self.now_s)

    def meter(self, engine: Engine) -> None:
        """What the engine does or holds has changed."""
        share = engine.memory.reserved / engine.memory.spec.kv_blocks  # that are there; above 1 where over-subscribed
        self.usage[engine.name].move(self.now_s, self._num_running[engine.name], share)

    def offer(self, event: GroupOffered) -> list[Rollout]:
        keys = [offer.key for offer in event.rollouts]
        tasks = {key.task_index for key in keys}
        if len(tasks) != 1 or len(set(keys)) < len(keys) or not self.rollouts.keys().isdisjoint(keys):
            raise StropError(f"a group is rollouts of one task, each offered once, but it was offered {keys}.")
        offered = []
        [group] = tasks
        if event.prompt_tokens == 0:
            self._mixed.add(group)
        shared_tokens = 0 if group in self._mixed else event.prompt_tokens
        for offer in event.rollouts:
            total_tokens = event.prompt_tokens + offer.max_tokens
            rollout = Rollout(
                key=offer.key,
                size=Size(group=group, prompt_tokens=shared_tokens, total_tokens=total_tokens),
                expected_tokens=offer.expected_tokens,
                context_tokens=event.prompt_tokens,
                offered_s=self.now_s,
            )
            self.rollouts[offer.key] = rollout
            offered.append(rollout)
        self.ledger.offered += len(offered)
        return offered

    def branch(self, event: BranchAsked) -> Rollout:
        """A fork of the parent's context, on its engine."""
        parent = self.find(event.parent)
        size = Size(
            group=parent.size.group,
            prompt_tokens=parent.size.prompt_tokens,
            total_tokens=parent.context_tokens + event.max_tokens,
        )
        branch = Rollout(
            key=event.key,
            size=size,
            expected_tokens=None,
            context_tokens=parent.context_tokens,
            engine=parent.engine,
            is_branch=True,
            offered_s=self.now_s,
        )
        self.rollouts[event.key] = branch
        self.ledger.branched += 1
        return branch

    def parent_of(self, event: BranchAsked) -> Rollout:
        """Raises `StropError` for a branch that exists already, or of another task."""
        if event.key in self.rollouts or event.key.task_index != event.parent.task_index:
            raise StropError(f"branch {event.key} of {event.parent}: it exists already, or belongs to another task.")
        return self.find(event.parent)

    def refuse(self, event: BranchAsked, *, needed: int, free: int) -> None:
        self.ledger.branches_refused += 1
        self.actions.append(RefuseBranch(parent=event.parent, key=event.key, needed_blocks=needed, free_blocks=free))

    def run(self, rollout: Rollout, why: Why, *, prefill_tokens: int) -> None:
        """Its next completion, on the engine that it has."""
        engine = rollout.engine
        assert engine is not None
        if rollout.started_s is None:
            rollout.started_s = self.now_s
            self.ledger.queue_wait_s += self.now_s - rollout.offered_s
        rollout.phase, rollout.has_lost_engine = Phase.RUNNING, False
        rollout.num_runs += 1
        rollout.known_tokens = rollout.context_tokens
        self._num_running[engine.name] += 1
        self.meter(engine)
        self.ledger.runs[why] += 1
        self.actions.append(
            Run(
                key=rollout.key,
                engine=engine.name,
                run=rollout.num_runs,
                why=why,
                prefill_tokens=prefill_tokens,
                max_tokens=rollout.max_tokens,
            )
        )

    def turn_finished(self, event: TurnFinished) -> Rollout | None:
        """The rollout, which now waits for its tools; None for an answer that nobody waits for any more."""
        rollout = self._answered(event.key, event.run)
        if rollout is not None:
            self._count_turn(rollout, event.num_tokens, event.recomputed_tokens)
            rollout.phase = Phase.CALLING
            rollout.called_s, rollout.tool_started_s = self.now_s, None
        return rollout

    def call_tools(self, rollout: Rollout) -> None:
        rollout.called_s = self.now_s
        self.actions.append(CallTools(key=rollout.key))

    def tool_started(self, event: ToolStarted) -> Rollout | None:
        """The rollout; None when it was ended meanwhile."""
        rollout = self.rollouts.get(event.key)
        if rollout is None or rollout.phase is not Phase.CALLING:
            return None
        rollout.tool_started_s = self.now_s
        self.ledger.tool_wait_s += self.now_s - rollout.called_s
        return rollout

    def tool_finished(self, event: ToolFinished) -> Rollout | None:
        """The rollout, whose context has the observation now; None when it was ended meanwhile."""
        rollout = self.rollouts.get(event.key)
        if rollout is None:
            return None
        if rollout.phase is not Phase.CALLING:
            raise StropError(f"rollout {event.key} is {rollout.phase}, but a tool call of it was answered.")
        if event.num_tokens > rollout.max_tokens:
            raise StropError(
                f"rollout {event.key} has room for {rollout.max_tokens} tokens, but was answered with {event.num_tokens}."
            )
        self.ledger.tool_turns += 1
        self.ledger.observation_tokens += event.num_tokens
        if rollout.tool_started_s is not None:
            self.ledger.tool_run_s += self.now_s - rollout.tool_started_s
        rollout.context_tokens += event.num_tokens
        return rollout

    def end(self, event: RolloutEnded) -> Rollout | None:
        """The rollout, as it was when it ended; None for an answer that nobody waits for any more."""
        if event.run is None:
            rollout = self.find(event.key)
            if rollout.phase is Phase.RUNNING:
                self.stop(rollout)
        else:
            answered = self._answered(event.key, event.run)
            if answered is None:
                return None
            rollout = answered
            self._count_turn(rollout, event.num_tokens, event.recomputed_tokens)
        del self.rollouts[rollout.key]
        self.ledger.ended += 1
        self.ledger.longest_rollout_tokens = max(self.ledger.longest_rollout_tokens, rollout.response_tokens)
        if rollout.started_s is not None:
            self.ledger.longest_rollout_s = max(self.ledger.longest_rollout_s, self.now_s - rollout.started_s)
        return rollout

    def stop(self, rollout: Rollout) -> None:
        """Its completion will not come back, or will not count."""
        assert rollout.engine is not None
        self._num_running[rollout.engine.name] -= 1
        self.meter(rollout.engine)

    def lose_engine(self, rollout: Rollout) -> None:
        if rollout.phase is Phase.RUNNING:
            self.stop(rollout)
            self.ledger.lost_turns += 1
        rollout.engine, rollout.has_lost_engine = None, True

    def find(self, key: RolloutKey) -> Rollout:
        if key not in self.rollouts:
            raise StropError(f"rollout {key} was never offered, or has ended.")
        return self.rollouts[key]

    def _answered(self, key: RolloutKey, run: int) -> Rollout | None:
        rollout = self.rollouts.get(key)
        if rollout is None or rollout.phase is not Phase.RUNNING or rollout.num_runs != run:
            self.ledger.stale_answers += 1
            return None
        return rollout

    def _count_turn(self, rollout: Rollout, num_tokens: int, recomputed_tokens: int) -> None:
        if num_tokens > rollout.max_tokens:
            raise StropError(
                f"rollout {rollout.key} was to sample {rollout.max_tokens} tokens at most, and sampled {num_tokens}."
            )
        rollout.context_tokens += num_tokens
        rollout.known_tokens = rollout.context_tokens
        self.ledger.turns += 1
        self.ledger.sampled_tokens += num_tokens
        self.ledger.recomputed_tokens += recomputed_tokens
        self.stop(rollout)
