"""Who has reserved how many KV blocks of one engine, a prefix that several conversations share counted once.

A conversation's columns are a chain of shared segments, oldest first, and a part of its own. The chain begins with the
group's prompt; a fork turns what parent and child have in common into one more segment. Only whole blocks are shared: a
block that is partly prefix belongs to each conversation that goes on in it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from strop.rollout.scheduling.events import EngineSpec
from strop.types import RolloutKey

Prompt: TypeAlias = tuple[int, int]
"""Which prompt a conversation begins with: its group and its tokens. Prompts of one group that differ in length are two."""


@dataclass(slots=True, eq=False)
class Segment:
    """Blocks that `num_users` conversations share."""

    blocks: int
    prompt: Prompt | None  # that it holds; None: the common past of a branch and its parent
    num_users: int = 0


@dataclass(slots=True, eq=False)
class Holding:
    """What one conversation has reserved."""

    chain: list[Segment]
    own_blocks: int

    @property
    def shared_blocks(self) -> int:
        return sum(segment.blocks for segment in self.chain)


@dataclass(slots=True, eq=False)
class KvMemory:
    """The reservations on one engine; `reserved` never exceeds `capacity`."""

    spec: EngineSpec
    capacity: int  # in blocks, over-subscription included
    reserved: int = 0
    holdings: dict[RolloutKey, Holding] = field(default_factory=dict)
    prompts: dict[Prompt, Segment] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.capacity - self.reserved

    @property
    def has_room_for_one(self) -> bool:
        return len(self.holdings) < self.spec.max_conversations

    def need(self, prompt: Prompt, total_tokens: int) -> int:
        """Blocks that one more rollout with `prompt` takes when it may become `total_tokens` long, prompt included."""
        held = self.prompts.get(prompt)
        return self.spec.blocks_for(total_tokens) - (0 if held is None else held.blocks)

    def fits_without(self, leaving: Collection[RolloutKey], prompt: Prompt, total_tokens: int) -> bool:
        """Whether one more rollout would find room if those that are `leaving` held nothing any more."""
        if len(self.holdings) - len(leaving) >= self.spec.max_conversations:
            return False
        free, held = self.free, self.prompts.get(prompt)
        users: dict[int, int] = {}  # by segment: those that stay
        for key in leaving:
            holding = self.holdings[key]
            free += holding.own_blocks
            for segment in holding.chain:
                users[id(segment)] = users.get(id(segment), segment.num_users) - 1
                if users[id(segment)] == 0:
                    free += segment.blocks
                    held = None if segment is held else held
        return self.spec.blocks_for(total_tokens) - (0 if held is None else held.blocks) <= free

    def fork_need(self, at: int, total_tokens: int) -> int:
        """Blocks that a branch takes which shares the first `at` tokens with its parent."""
        return self.spec.blocks_for(total_tokens) - at // self.spec.block_tokens

    def reserve(self, key: RolloutKey, prompt: Prompt, total_tokens: int) -> None:
        self.reserved += self.need(prompt, total_tokens)
        shared = self.prompts.setdefault(prompt, Segment(blocks=prompt[1] // self.spec.block_tokens, prompt=prompt))
        shared.num_users += 1
        self.holdings[key] = Holding(chain=[shared], own_blocks=self.spec.blocks_for(total_tokens) - shared.blocks)

    def fork(self, parent: RolloutKey, key: RolloutKey, at: int, total_tokens: int) -> None:
        holding = self.holdings[parent]
        common = at // self.spec.block_tokens - holding.shared_blocks
        if common > 0:
            holding.chain.append(Segment(blocks=common, prompt=None, num_users=1))
            holding.own_blocks -= common
        chain = list(holding.chain)
        for segment in chain:
            segment.num_users += 1
        own = self.fork_need(at, total_tokens)
        self.reserved += own
        self.holdings[key] = Holding(chain=chain, own_blocks=own)

    def release(self, key: RolloutKey) -> None:
        holding = self.holdings.pop(key)
        self.reserved -= holding.own_blocks
        for segment in holding.chain:
            segment.num_users -= 1
            if segment.num_users == 0:
                self.reserved -= segment.blocks
                if segment.prompt is not None:
                    del self.prompts[segment.prompt]

    def clear(self) -> None:
        """Whatever was held is lost."""
        self.reserved = 0
        self.holdings.clear()
        self.prompts.clear()
