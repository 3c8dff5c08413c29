"""Which conversation holds which slot, and how much of a new request is already there.

A conversation keeps its slot from its first request until it is released, its tool calls included. A request that goes on
where the last one of a conversation ended takes its slot over. Any other request that extends an earlier one is a fork: it
needs a slot of its own and starts with a copy of the columns they share. Since a slot is only ever appended to, a request
that was taken over can still be forked, and whoever opens with the same prompt can copy that. A free slot keeps what it held
until it is opened again, so a group's prompt outlives the first of its rollouts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from strop.engine.protocol import CompletionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How much of one request and its completion a conversation repeats.

    `num_computed` counts the columns that were there when that request ended. Its last id came later, in whatever chunk its
    successor was computed; a fork computes it again, so that its bits do not depend on who else went on from there.
    """

    num_ids: int
    num_computed: int

    def reusable_by(self, request: CompletionRequest) -> int:
        """How many columns `request`, which extends the shared one, may copy; at least one id is left to compute."""
        return min(request.at, self.num_computed, len(request.ids) - 1)


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """What one slot holds. The last id sampled has no KV yet: it is computed with whatever follows it."""

    slot: int
    ids: list[int]  # of the newest request, and of its completion as far as it was sampled
    opening: tuple[int, ...]  # the prompt that its first request began with; empty for a fork
    num_computed: int  # columns whose KV is there
    tail: str  # the newest request; releasing it gives the slot back
    lineage: dict[str, Share] = field(default_factory=dict)  # by request
    is_running: bool = True

    @property
    def num_missing(self) -> int:
        """Ids whose KV is still to be computed before the last one's, which is fed when a token after it is drawn."""
        return len(self.ids) - 1 - self.num_computed

    @property
    def has_opening(self) -> bool:
        """Whether its prompt can be copied, all but the last id."""
        return bool(self.opening) and self.num_computed >= len(self.opening) - 1

    def lineage_of_fork(self, num_ids: int, num_computed: int) -> dict[str, Share]:
        """What a copy of the first `num_ids` ids, with `num_computed` columns, repeats of earlier requests."""
        return {
            request_id: Share(num_ids=min(share.num_ids, num_ids), num_computed=min(share.num_computed, num_computed))
            for request_id, share in self.lineage.items()
        }


class ConversationTable:
    """The slots of one engine. Lowest free slot first, so that few conversations sit in few rows."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._conversations: dict[str, Conversation] = {}  # by tail
        self._left: dict[int, tuple[int, ...]] = {}  # the openings that free slots still hold

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._conversations.values())

    @property
    def next_slot(self) -> int | None:
        """The slot that the next conversation gets; None while all are held."""
        return self._free[0] if self._free else None

    @property
    def num_open(self) -> int:
        return len(self._conversations)

    @property
    def highest(self) -> Conversation:
        """The conversation in the highest slot. There must be one."""
        return max(self, key=lambda conversation: conversation.slot)

    def by_tail(self, request_id: str) -> Conversation | None:
        return self._conversations.get(request_id)

    def holder(self, request_id: str) -> Conversation | None:
        """The conversation that holds the most of a request; None when none does, or `request_id` is empty."""
        holders = [conversation for conversation in self if request_id in conversation.lineage]
        return max(holders, key=lambda conversation: conversation.lineage[request_id].num_computed, default=None)

    def continued_by(self, request: CompletionRequest) -> Conversation | None:
        """The conversation whose slot `request` takes over: idle, and extended exactly at its end."""
        parent = self.by_tail(request.extends)
        is_continued = parent is not None and not parent.is_running and request.at == len(parent.ids)
        return parent if is_continued else None

    def slot_with(self, opening: tuple[int, ...]) -> int | None:
        """A slot that holds all of `opening` but its last id."""
        held = (each.slot for each in self if each.opening == opening and each.has_opening)
        left = (slot for slot, held in self._left.items() if held == opening)
        return next(chain(held, left), None) if opening else None

    def computing(self, opening: tuple[int, ...]) -> Conversation | None:
        """A conversation that is about to hold `opening`."""
        return next((each for each in self if each.opening == opening and not each.has_opening), None)

    def only_opening(self, slot: int) -> tuple[int, ...]:
        """The opening that would be lost if this free slot were written to; empty when there is none."""
        opening = self._left.get(slot, ())
        is_elsewhere = any(held == opening for other, held in self._left.items() if other != slot)
        return () if is_elsewhere or any(each.opening == opening and each.has_opening for each in self) else opening

    def continue_(self, conversation: Conversation, request: CompletionRequest) -> None:
        """Let `request` take over the slot of `conversation`."""
        del self._conversations[conversation.tail]
        self._conversations[request.id] = conversation
        conversation.tail = request.id
        conversation.ids = list(request.ids)
        conversation.lineage[request.id] = Share(num_ids=len(request.ids), num_computed=len(request.ids))
        conversation.is_running = True

    def open(self, request: CompletionRequest, lineage: dict[str, Share], *, is_fork: bool) -> Conversation:
        """Give `request` the next free slot; nothing of it is computed yet."""
        slot = heapq.heappop(self._free)
        self._left.pop(slot, None)
        conversation = Conversation(
            slot=slot,
            ids=list(request.ids),
            opening=() if is_fork else request.ids,
            num_computed=0,
            tail=request.id,
            lineage={**lineage, request.id: Share(num_ids=len(request.ids), num_computed=len(request.ids))},
        )
        self._conversations[request.id] = conversation
        return conversation

    def move(self, conversation: Conversation) -> None:
        """Give `conversation` the next free slot for its own."""
        slot = heapq.heappop(self._free)
        self._left.pop(slot, None)
        heapq.heappush(self._free, conversation.slot)
        conversation.slot = slot

    def end(self, conversation: Conversation) -> None:
        """The newest request of `conversation` is complete; its slot waits for the next one."""
        num_ids = len(conversation.ids)
        conversation.lineage[conversation.tail] = Share(num_ids=num_ids, num_computed=num_ids - 1)
        conversation.is_running = False

    def close(self, conversation: Conversation) -> None:
        del self._conversations[conversation.tail]
        heapq.heappush(self._free, conversation.slot)
        if conversation.has_opening:
            self._left[conversation.slot] = conversation.opening

    def close_all(self) -> None:
        """Free every slot, and forget what was in them."""
        for conversation in list(self):
            self.close(conversation)
        self._left.clear()
