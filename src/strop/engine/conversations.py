"""Which conversation holds which slot, and how much of a new request is already there.

A conversation keeps its slot from its first request until it is released, its tool calls included. A request that goes on
where the last one of a conversation ended takes its slot over. Any other request that extends an earlier one is a fork: it
needs a slot of its own and starts with a copy of the columns they share. Since a slot is only ever appended to, a request
that was taken over can still be forked.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

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
    num_computed: int  # columns whose KV is there
    tail: str  # the newest request; releasing it gives the slot back
    lineage: dict[str, Share] = field(default_factory=dict)  # by request
    is_running: bool = True

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

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._conversations.values())

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

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

    def continue_(self, conversation: Conversation, request: CompletionRequest) -> None:
        """Let `request` take over the slot of `conversation`."""
        del self._conversations[conversation.tail]
        self._conversations[request.id] = conversation
        conversation.tail = request.id
        conversation.ids = list(request.ids)
        conversation.lineage[request.id] = Share(num_ids=len(request.ids), num_computed=len(request.ids))
        conversation.is_running = True

    def open(self, request: CompletionRequest, lineage: dict[str, Share]) -> Conversation:
        """Give `request` the lowest free slot; nothing of it is computed yet."""
        conversation = Conversation(
            slot=heapq.heappop(self._free),
            ids=list(request.ids),
            num_computed=0,
            tail=request.id,
            lineage={**lineage, request.id: Share(num_ids=len(request.ids), num_computed=len(request.ids))},
        )
        self._conversations[request.id] = conversation
        return conversation

    def end(self, conversation: Conversation) -> None:
        """The newest request of `conversation` is complete; its slot waits for the next one."""
        num_ids = len(conversation.ids)
        conversation.lineage[conversation.tail] = Share(num_ids=num_ids, num_computed=num_ids - 1)
        conversation.is_running = False

    def close(self, conversation: Conversation) -> None:
        del self._conversations[conversation.tail]
        heapq.heappush(self._free, conversation.slot)

    def close_all(self) -> None:
        for conversation in list(self):
            self.close(conversation)
