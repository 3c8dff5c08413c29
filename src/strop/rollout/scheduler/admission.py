"""What decides when a waiting rollout starts: the KV memory that engines have left, and the order of the waiting rollouts.

**Memory.** A rollout reserves blocks for its largest possible length. It holds a chain of shared segments, oldest first, and
blocks of its own. The chain begins with the prompt of the group. A fork adds a segment with everything that parent and
branch have in common. Only whole blocks are shared: each rollout has its own copy of a block that is only partly prefix.

**Order.** A rollout that lost its engine, or a branch, goes before all rollouts that have not started: the longest
first, so that a branch finds what it shares in the memory of one that was forked later. With `longest_first`, the first
`_NUM_PROBES` rollouts of every group come next, and then the group that is expected to be longest: a long rollout that starts
last keeps everything else waiting at the end of the step. The expected length is estimated from the tokens sampled so far,
those of running rollouts included, per ended rollout of the group; the mean over all groups counts as `_PRIOR` ended rollouts.
Estimates are rounded to powers of the square root of 2, so that groups of about the same length are equals: one of them starts
completely before the next, on the engines that have computed its prompt.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Container, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from strop.rollout.scheduler.report import EngineUsage
from strop.types import RolloutKey

MAX_ATTEMPTS = 1024  # attempt numbers are counted modulo this
_NUM_PROBES = 2
_PRIOR = 1.0

Prompt: TypeAlias = tuple[int, Hashable]
"""The prompt of a rollout: its group, and a value that is equal for equal prompts of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """KV memory of one engine. For an engine with slots, `block_tokens` and `max_tokens` are the length of a slot."""

    name: str  # unique among all engines that ever join
    kv_blocks: int
    block_tokens: int
    max_conversations: int  # that hold KV memory at the same time
    max_tokens: int | None = None  # of the longest conversation; None: limited only by the number of blocks
    keeps_rollouts: bool = False  # none moves to another engine: its log-probs are to repeat bit for bit, or it has an adapter

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation that the engine can hold."""
        held = self.kv_blocks * self.block_tokens
        return held if self.max_tokens is None else min(held, self.max_tokens)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


class Size(NamedTuple):
    """What the placement of a rollout depends on."""

    prompt: Prompt
    prompt_tokens: int
    total_tokens: int  # largest possible length, prompt included

    @property
    def group(self) -> int:
        return self.prompt[0]


@dataclass(slots=True, eq=False)
class Segment:
    """Blocks that `num_users` rollouts share."""

    blocks: int
    prompt: Prompt | None  # None: the common past of a branch and its parent
    num_users: int = 0


@dataclass(slots=True, eq=False)
class Holding:
    """What one rollout has reserved."""

    chain: list[Segment]
    own_blocks: int


class Engine:
    """An engine that has joined, with the reservations in its KV memory. `reserved` never exceeds `capacity`."""

    def __init__(self, spec: EngineSpec, *, oversubscription: float, joined_s: float) -> None:
        self.spec = spec
        self.name = spec.name
        self.longest = spec.longest
        self.capacity = int(spec.kv_blocks * oversubscription)  # in blocks
        self.reserved = 0
        self.holdings: dict[RolloutKey, Holding] = {}
        self.prompts: dict[Prompt, Segment] = {}
        self.tokens: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)  # one number: of its rollouts' contexts, if known
        self.num_running = 0
        self.usage = EngineUsage(joined_s=joined_s)
        self.started: npt.NDArray[np.int64] = np.zeros(MAX_ATTEMPTS, dtype=np.int64)  # rollouts, by attempt number

    @property
    def free(self) -> int:
        return self.capacity - self.reserved

    @property
    def has_free_row(self) -> bool:
        return len(self.holdings) < self.spec.max_conversations

    @property
    def fill(self) -> float:
        return self.reserved / self.capacity

    @property
    def room(self) -> int:
        """Tokens of the longest rollout that can start now and shares nothing; -1 if none can."""
        return min(self.free * self.spec.block_tokens, self.longest) if self.has_free_row else -1

    def has_room(self, size: Size) -> bool:
        """Whether a rollout of `size` can start now, with a prompt that is there shared."""
        shared = self.prompts.get(size.prompt)
        needed = self.spec.blocks_for(size.total_tokens) - (0 if shared is None else shared.blocks)
        return self.has_free_row and size.total_tokens <= self.longest and needed <= self.free

    def fork_need(self, at: int, total_tokens: int) -> int:
        """Blocks that a branch needs which shares the first `at` tokens with its parent."""
        return self.spec.blocks_for(total_tokens) - at // self.spec.block_tokens

    def reserve(self, key: RolloutKey, size: Size) -> None:
        if (prompt := self.prompts.get(size.prompt)) is None:
            prompt = self.prompts[size.prompt] = Segment(size.prompt_tokens // self.spec.block_tokens, size.prompt)
            self.reserved += prompt.blocks
        prompt.num_users += 1
        own = self.spec.blocks_for(size.total_tokens) - prompt.blocks
        self.reserved += own
        self.holdings[key] = Holding(chain=[prompt], own_blocks=own)
        self.started[key.attempt % MAX_ATTEMPTS] += 1

    def fork(self, parent: RolloutKey, key: RolloutKey, at: int, total_tokens: int) -> None:
        holding = self.holdings[parent]
        common = at // self.spec.block_tokens - sum(segment.blocks for segment in holding.chain)
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


class Phase(StrEnum):
    """What a rollout is doing."""

    WAITING = "waiting"  # for an engine
    RUNNING = "running"  # a completion
    CALLING = "calling"  # tools


@dataclass(slots=True, eq=False, kw_only=True)
class Rollout:
    """One rollout from its offer to its end. It has an engine while KV memory is reserved for it."""

    key: RolloutKey
    size: Size
    context_tokens: int  # prompt, whole completions and observations so far
    is_branch: bool = False
    holder: Rollout | None = None  # of a branch that waits: whose memory begins with what the branch shares
    branches: list[Rollout] = field(default_factory=list)  # that wait, and whose holder this is
    phase: Phase = Phase.WAITING
    engine: Engine | None = None
    num_runs: int = 0
    known_tokens: int = 0  # of the context, computed by an engine before
    offered_s: float = 0.0
    started_s: float | None = None
    called_s: float = 0.0
    tool_started_s: float | None = None

    @property
    def max_tokens(self) -> int:
        """Tokens that are left of the response."""
        return self.size.total_tokens - self.context_tokens


Rank: TypeAlias = tuple[int, float, int]  # those that are alone first; then the longest; then the first to come


@dataclass(slots=True, eq=False)
class WaitingGroup:
    """The rollouts of one task that wait, or a single rollout that lost its engine, or a single branch."""

    number: int
    is_alone: bool = False
    waiting: deque[Rollout] = field(default_factory=deque)
    num_started: int = 0
    num_live: int = 0  # offered and not ended
    num_ended: int = 0
    tokens_seen: int = 0
    rank: Rank = (0, 0.0, 0)

    @property
    def equals(self) -> list[Rollout]:
        """The first rollout and those after it that differ from it only in their attempt number."""
        return list(takewhile(lambda each: each.size == self.waiting[0].size, self.waiting))


class WaitingQueue:
    """A heap of groups. Entries whose rank is out of date are dropped when they come to the top."""

    def __init__(self, *, is_longest_first: bool) -> None:
        self._is_longest_first = is_longest_first
        self._heap: list[tuple[Rank, WaitingGroup]] = []
        self._groups: dict[int, WaitingGroup] = {}
        self._alone: dict[RolloutKey, WaitingGroup] = {}
        self._num_created = 0
        self._num_ended = 0
        self._tokens_seen = 0
        self.num_waiting = 0
        self.has_changed = False  # since the last refill: another rollout may be first

    def offer(self, rollout: Rollout) -> None:
        """Add a rollout to its group."""
        number = rollout.size.group
        group = self._groups[number] = self._groups.get(number) or self._create()
        group.num_live += 1
        self._add(group, rollout)

    def offer_first(self, rollout: Rollout) -> None:
        """Add a rollout that lost its engine, or a branch."""
        group = self._alone[rollout.key] = self._create(is_alone=True)
        self._add(group, rollout)

    def first(self, *, skipped: Container[WaitingGroup] = ()) -> WaitingGroup | None:
        """The group whose first rollout is next, without those `skipped`. It stays in the queue."""
        found, passed = None, []
        while self._heap and found is None:
            rank, group = self._heap[0]
            if not group.waiting or rank != group.rank:
                heapq.heappop(self._heap)
            elif group in skipped:
                passed.append(heapq.heappop(self._heap))
            else:
                found = group
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def alone(self, rollout: Rollout) -> WaitingGroup:
        """The group of a rollout that `offer_first` added."""
        return self._alone[rollout.key]

    def take(self, group: WaitingGroup, rollout: Rollout) -> None:
        """Remove one of the equals of a group: it starts."""
        group.waiting.remove(rollout)
        self.num_waiting -= 1
        if group.is_alone:
            del self._alone[rollout.key]
        else:
            group.num_started += 1
            self._rerank(group)

    def drop(self, rollout: Rollout) -> None:
        """Remove a rollout that ended while it waited."""
        group = self._alone.pop(rollout.key, None) or self._groups[rollout.size.group]
        group.waiting.remove(rollout)
        self.num_waiting -= 1
        self.has_changed = True

    def grew(self, number: int, num_tokens: int) -> None:
        """A rollout of a group sampled `num_tokens` more."""
        group = self._groups[number]
        group.tokens_seen += num_tokens
        self._tokens_seen += num_tokens
        self._rerank(group)

    def ended(self, number: int) -> None:
        """A rollout of a group ended."""
        group = self._groups[number]
        group.num_ended += 1
        group.num_live -= 1
        self._num_ended += 1
        if group.num_live:
            self._rerank(group)
        else:
            del self._groups[number]

    def waiting(self) -> list[Rollout]:
        return [each for group in (*self._alone.values(), *self._groups.values()) for each in group.waiting]

    def _create(self, *, is_alone: bool = False) -> WaitingGroup:
        self._num_created += 1
        return WaitingGroup(number=self._num_created - 1, is_alone=is_alone)

    def _add(self, group: WaitingGroup, rollout: Rollout) -> None:
        group.waiting.append(rollout)
        self.num_waiting += 1
        self._push(group, self._rank(group))

    def _rerank(self, group: WaitingGroup) -> None:
        if group.waiting and (rank := self._rank(group)) != group.rank:
            self._push(group, rank)

    def _push(self, group: WaitingGroup, rank: Rank) -> None:
        group.rank, self.has_changed = rank, True
        heapq.heappush(self._heap, (rank, group))

    def _rank(self, group: WaitingGroup) -> Rank:
        if group.is_alone:
            return (0, -float(group.waiting[0].context_tokens), group.number)
        return (1, -self._expected(group) if self._is_longest_first else 0.0, group.number)

    def _expected(self, group: WaitingGroup) -> float:
        if group.num_started < _NUM_PROBES:
            return math.inf
        mean = self._tokens_seen / max(1, self._num_ended)
        expected = (_PRIOR * mean + group.tokens_seen) / (_PRIOR + group.num_ended)
        return math.exp2(round(2 * math.log2(max(1.0, expected))) / 2)
