"""What the scheduler is told: rollouts offered and ended, turns and tool calls, engines that come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from strop.types import RolloutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """KV memory of one engine. One with slots of a fixed length has blocks, and a `max_tokens`, as long as a slot."""

    name: str  # unique among the engines that ever joined
    kv_blocks: int
    block_tokens: int
    max_conversations: int  # that can hold KV memory at once
    max_tokens: int | None = None  # of the longest conversation; None: as many as the blocks hold

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation that it could ever hold."""
        held = self.kv_blocks * self.block_tokens
        return held if self.max_tokens is None else min(held, self.max_tokens)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOffer:
    """One rollout that waits to be started."""

    key: RolloutKey
    max_tokens: int  # of the whole response: every completion and observation after the prompt
    expected_tokens: float | None = None  # of the response; None: nobody knows, so it is learned from the group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOffered:
    """The rollouts of one task, which share a prompt; their keys share `task_index`."""

    prompt_tokens: int  # 0: their prompts differ and count as part of `max_tokens`; nothing of this task is shared any more
    rollouts: tuple[RolloutOffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFinished:
    """A completion came back, and it may call tools. One that is known to end its rollout is `RolloutEnded` instead."""

    key: RolloutKey
    run: int  # of the `Run` that asked for it; an answer to an older one is ignored and counted
    num_tokens: int  # that were sampled
    recomputed_tokens: int = 0  # ids that the engine had computed before and did not find in its cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStarted:
    """The tools of a turn left the queue of the sandbox, and run."""

    key: RolloutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFinished:
    """The last tool call of the turn is answered."""

    key: RolloutKey
    num_tokens: int  # of the observation


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchAsked:
    """A rollout is to be forked where its newest observation ended, or, before that, where its newest completion did."""

    parent: RolloutKey
    key: RolloutKey  # of the branch
    max_tokens: int  # that it may still add: completions and observations after the fork


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEnded:
    """A rollout is over, whatever ended it and whatever it was doing: answered, at a limit, void, cancelled."""

    key: RolloutKey
    run: int | None = None  # of the `Run` whose completion ended it; None: it was ended from outside, between turns or in one
    num_tokens: int = 0  # of that last completion
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJoined:
    engine: EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDraining:
    """It is to take no new conversation; those that it holds go on there to their end."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDied:
    """What it held is gone; so are the completions under way."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; due when the clock reaches `next_tick_s`."""


Event: TypeAlias = (
    GroupOffered
    | TurnFinished
    | ToolStarted
    | ToolFinished
    | BranchAsked
    | RolloutEnded
    | EngineJoined
    | EngineDraining
    | EngineDied
    | Tick
)
