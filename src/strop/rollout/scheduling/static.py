"""The static policy: groups dealt evenly to the engines beforehand, and a barrier on each engine at every turn.

The baseline of rStar2-Agent (arXiv 2508.20722, section 3.2, Figure 7, upper half): every rollout is launched at once on the
engine that it was dealt to; the tool calls of a turn go out together when its longest completion is done, and the next turn
starts when the slowest of them is answered. Nothing watches over KV memory, so engines evict. Two things are kinder to it
than the paper: its barrier holds for one engine, not for all of them, and each group stays on one engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strop.errors import StropError
from strop.rollout.scheduling.actions import Action, Release, Why
from strop.rollout.scheduling.book import RolloutBook
from strop.rollout.scheduling.events import (
    BranchAsked,
    EngineDied,
    EngineDraining,
    EngineJoined,
    Event,
    GroupOffered,
    RolloutEnded,
    Tick,
    ToolFinished,
    ToolStarted,
    TurnFinished,
)
from strop.rollout.scheduling.fit import check_fits
from strop.rollout.scheduling.floor import Engine, EngineFloor
from strop.rollout.scheduling.ledger import Ledger
from strop.rollout.scheduling.rollouts import Phase, Rollout
from strop.rollout.scheduling.usage import EngineUsage
from strop.types import RolloutKey


class _Hand:
    """What was dealt to one engine, and how far its turn is."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_dealt = 0
        self.num_live = 0
        self.blocks = 0  # that those would need to be held to their end, sharing nothing
        self.running: dict[RolloutKey, Rollout] = {}
        self.at_barrier: dict[RolloutKey, Rollout] = {}  # their turn is done, others' is not
        self.calling: dict[RolloutKey, Rollout] = {}
        self.answered: dict[RolloutKey, tuple[Rollout, int]] = {}  # tools and tokens of the observation; others' run

    def deal(self, rollout: Rollout) -> None:
        rollout.engine = self.engine
        self.num_dealt += 1
        self.num_live += 1
        self.blocks += self._blocks_of(rollout)
        self.running[rollout.key] = rollout

    def drop(self, rollout: Rollout) -> None:
        self.num_live -= 1
        self.blocks -= self._blocks_of(rollout)
        key = rollout.key
        self.running.pop(key, None)
        self.at_barrier.pop(key, None)
        self.calling.pop(key, None)
        self.answered.pop(key, None)

    def _blocks_of(self, rollout: Rollout) -> int:
        return self.engine.memory.spec.blocks_for(rollout.size.total_tokens)


class StaticScheduler:
    """See `strop.rollout.scheduling.Scheduler`."""

    def __init__(self) -> None:
        self._book = RolloutBook()
        self._floor = EngineFloor(oversubscription=1.0, affinity=0.0)
        self._hands: dict[str, _Hand] = {}
        self._handlers: Mapping[type[Any], Callable[[Any], None]] = {
            GroupOffered: self._group_offered,
            TurnFinished: self._turn_finished,
            ToolStarted: self._tool_started,
            ToolFinished: self._tool_finished,
            BranchAsked: self._branch_asked,
            RolloutEnded: self._rollout_ended,
            EngineJoined: self._engine_joined,
            EngineDraining: self._engine_lost,
            EngineDied: self._engine_lost,
            Tick: self._tick,
        }

    def handle(self, event: Event, *, now_s: float) -> list[Action]:
        self._book.begin(now_s)
        self._handlers[type(event)](event)
        return self._book.actions

    @property
    def ledger(self) -> Ledger:
        return self._book.ledger

    @property
    def usage(self) -> Mapping[str, EngineUsage]:
        return self._book.usage

    @property
    def live(self) -> frozenset[RolloutKey]:
        return frozenset(self._book.rollouts)

    @property
    def waiting(self) -> tuple[RolloutKey, ...]:
        return ()

    @property
    def num_waiting(self) -> int:
        return 0

    @property
    def stranded(self) -> tuple[RolloutKey, ...]:
        return ()

    def is_crowded(self, engine: str) -> bool:
        hand = self._hands[engine]
        spec = hand.engine.memory.spec
        return hand.num_live > spec.max_conversations or hand.blocks > spec.kv_blocks

    @property
    def next_tick_s(self) -> float | None:
        return None

    @property
    def reserved_blocks(self) -> Mapping[str, int]:
        """Nothing is ever reserved."""
        return dict.fromkeys(self._hands, 0)

    def _group_offered(self, event: GroupOffered) -> None:
        check_fits(event, self._floor.specs)
        hand = min(self._hands.values(), key=lambda each: each.num_dealt)
        is_prompt_there = False
        for rollout in self._book.offer(event):
            hand.deal(rollout)
            self._book.run(rollout, Why.START, prefill_tokens=0 if is_prompt_there else event.prompt_tokens)
            is_prompt_there = True

    def _turn_finished(self, event: TurnFinished) -> None:
        rollout = self._book.turn_finished(event)
        if rollout is None:
            return
        hand = self._hand_of(rollout)
        del hand.running[rollout.key]
        hand.at_barrier[rollout.key] = rollout
        self._go_on(hand)

    def _tool_started(self, event: ToolStarted) -> None:
        self._book.tool_started(event)

    def _tool_finished(self, event: ToolFinished) -> None:
        rollout = self._book.tool_finished(event)
        if rollout is None:
            return
        rollout.phase = Phase.WAITING
        hand = self._hand_of(rollout)
        del hand.calling[rollout.key]
        hand.answered[rollout.key] = (rollout, event.num_tokens)
        self._go_on(hand)

    def _branch_asked(self, event: BranchAsked) -> None:
        self._book.parent_of(event)
        branch = self._book.branch(event)
        hand = self._hand_of(branch)
        hand.deal(branch)
        self._book.run(branch, Why.BRANCH, prefill_tokens=0)

    def _rollout_ended(self, event: RolloutEnded) -> None:
        rollout = self._book.end(event)
        if rollout is None:
            return
        hand = self._hand_of(rollout)
        hand.drop(rollout)
        self._book.actions.append(Release(key=rollout.key, engine=hand.engine.name))
        self._go_on(hand)

    def _engine_joined(self, event: EngineJoined) -> None:
        self._hands[event.engine.name] = _Hand(self._floor.join(event.engine))
        self._book.engine_joined(event.engine.name)

    def _engine_lost(self, event: EngineDraining | EngineDied) -> None:
        raise StropError(
            f"engine {event.name!r} was to leave, but the static policy deals rollouts once and for all."
            ' Use policy = "scheduler" where engines may be lost.'
        )

    def _tick(self, event: Tick) -> None:
        """Nothing here depends on time alone."""

    def _go_on(self, hand: _Hand) -> None:
        """Call the tools of a turn when its last completion is done; begin the next when the last tool is."""
        if hand.running:
            return
        if hand.at_barrier:
            calling, hand.at_barrier = hand.at_barrier, {}
            hand.calling |= calling
            for rollout in calling.values():
                self._book.call_tools(rollout)
        elif not hand.calling:
            answered, hand.answered = hand.answered, {}
            for rollout, num_tokens in answered.values():
                hand.running[rollout.key] = rollout
                self._book.run(rollout, Why.CONTINUE, prefill_tokens=num_tokens)

    def _hand_of(self, rollout: Rollout) -> _Hand:
        assert rollout.engine is not None
        return self._hands[rollout.engine.name]
