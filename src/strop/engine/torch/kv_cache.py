"""Keys and values of every conversation, in a fixed number of slots; what a step adds; and which conversation has which slot.

A conversation keeps its slot from its first request until it is released, also while a tool runs. A request that continues
exactly where the last request of a conversation ended takes its slot. Any other request that extends an earlier one is a fork:
it gets its own slot and starts with a copy of the shared columns. Slots are append-only, so a request that was continued can
still be forked, and another conversation with the same prompt can copy the prompt. The content of a released slot stays until
the slot is used again, and a fork of it takes the slot over: a conversation gets the slot that was released longest ago.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strop.engine.model_directory import Architecture
from strop.engine.protocol import CompletionRequest

if TYPE_CHECKING:
    from strop.engine.torch.sampling import DrawLimits

KV_STEP = 128  # decode reads a whole number of these columns


CHUNK_MAX = 128  # largest number of tokens of a prefill chunk
_CONTEXT = 4  # ids that a draft is looked up by, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a prompt or an observation: `ids` from position `start` of `slot`, whose earlier columns are computed."""

    slot: int
    start: int
    ids: Sequence[int]  # at most CHUNK_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The last token of one conversation, or a draft after it, and how the token after it is drawn.

    The rows of a step are in order of slots; drafts follow, those next to the last tokens first, each in order of slots.
    """

    slot: int
    id: int
    position: int
    is_draft: bool = False
    uniform: float = 0.0
    temperature: float = 1.0
    banned: Sequence[int] = ()  # ids that must not be drawn
    limits: DrawLimits | None = None  # None: the whole distribution, as in training


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The sizes in which a step is computed. Sizes above the content are padded."""

    num_tokens: int  # of the products over all tokens
    num_rows: int  # of the products over the rows; at most num_tokens
    num_slots: int  # whose caches the rows' attention covers
    num_columns: int  # of each slot that the rows' attention reads


class KvCache:
    """Column `p` of a slot holds position `p` of its conversation; which columns are in use, callers know.

    It is stored by blocks of columns, (layers, blocks, slots, kv_heads, columns of a block, head_dim), because a batched
    product on a CPU is 2.5 times slower unless its operands lie in one piece: 64 rows over 192 columns of 4 layers took
    4.6 ms by slots and 1.9 ms by blocks. On an accelerator one block holds all columns.
    """

    def __init__(
        self, architecture: Architecture, *, dtype: torch.dtype, device: torch.device, num_slots: int, num_columns: int
    ) -> None:
        self.num_slots = num_slots
        self.num_columns = -(-num_columns // KV_STEP) * KV_STEP
        self.block = KV_STEP if device.type == "cpu" else self.num_columns
        shape = (architecture.num_layers, self.num_columns // self.block, num_slots, architecture.num_kv_heads)
        self._mappings: list[mmap.mmap] = []  # of the two on a CPU under Linux
        self.keys, self.values = (self._zeros((*shape, self.block, architecture.head_dim), dtype, device) for _ in range(2))
        self._forget_loans()

    def loan(self, slot: int) -> tuple[int, int]:
        """A slot whose first columns are the same as those of `slot`, and how many: rollouts of a prompt may read it there."""
        return self._lender[slot], self._borrowed[slot]

    def note_write(self, slot: int, column: int) -> None:
        """Call before column `column` of `slot` changes: from there on the slot neither lends nor borrows columns."""
        self._borrowed[slot] = min(self._borrowed[slot], column)
        if column < self._lent[slot]:
            self._lent[slot] = column
            for other, lender in enumerate(self._lender):
                if lender == slot:
                    self._borrowed[other] = min(self._borrowed[other], column)

    def place(self, slots: Tensor, columns: Tensor) -> tuple[Tensor | slice, ...]:
        """Where column `columns[n]` of slot `slots[n]` is, in the cache of one layer; both (N,) int64."""
        return columns // self.block, slots, slice(None), columns % self.block

    def first_rows(self, cache: Tensor, num_rows: int, num_columns: int) -> list[Tensor]:
        """Blocks (rows * kv_heads, columns of a block, head_dim) of the first columns of the first slots, without a copy."""
        widths = [min(self.block, num_columns - start) for start in range(0, num_columns, self.block)]
        return [block[:num_rows, :, :width].flatten(0, 1) for block, width in zip(cache, widths, strict=False)]

    def in_one_piece(self, cache: Tensor, slots: Tensor, num_columns: int) -> Tensor:
        """(len(slots) * kv_heads, L, head_dim): copies of the first columns of `slots` in the cache of one layer."""
        width = min(self.block, num_columns)
        blocks = cache[: -(-num_columns // self.block), :, :, :width].index_select(1, slots)
        return blocks.permute(1, 2, 0, 3, 4).reshape(-1, len(blocks) * width, blocks.shape[-1])

    def copy_across(self, source: int, target: int, length: int) -> None:
        """Fill the first `length` columns of `target` from `source`. What comes after them in their blocks is lost."""
        self.note_write(target, 0)
        for cache in (self.keys, self.values):
            cache[self._blocks(target, length)] = cache[self._blocks(source, length)]
        lender = self._lender[source] if self._borrowed[source] >= length else source
        self._lender[target], self._borrowed[target] = lender, length
        self._lent[lender] = max(self._lent[lender], length)

    def clear(self) -> None:
        """Zero the cache: what broken weights left behind (nan) would spoil masked columns. A CPU's memory is given back."""
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTNEED)
        if not self._mappings:
            self.keys.zero_()
            self.values.zero_()
        self._forget_loans()

    def fill(self, generator: torch.Generator, num_layers: int) -> None:
        """Give every slot the same random content in the first layers, to measure with."""
        for cache in (self.keys[:num_layers], self.values[:num_layers]):
            pattern = torch.randn(cache[:, :, :1].shape, generator=generator, dtype=torch.float32)
            cache.copy_(pattern.to(cache.device).expand_as(cache))
        self._forget_loans()

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Under Linux, a CPU's memory comes with the first write to each page, and goes with `clear`."""
        if device.type != "cpu" or sys.platform != "linux":
            return torch.zeros(shape, dtype=dtype, device=device)
        mapping = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mappings.append(mapping)
        return torch.frombuffer(mapping, dtype=dtype).view(shape)

    def _forget_loans(self) -> None:
        self._lender = list(range(self.num_slots))  # of each slot: who has the same first columns
        self._borrowed = [0] * self.num_slots  # how many
        self._lent = [0] * self.num_slots  # the most that anybody has of a slot

    def _blocks(self, slot: int, length: int) -> tuple[slice, slice, int, slice, slice]:
        """Where the blocks of the first `length` columns of `slot` are; of a single block, only those columns."""
        num_blocks = -(-length // self.block)
        columns = slice(length) if num_blocks == 1 else slice(None)
        return slice(None), slice(num_blocks), slot, slice(None), columns


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


class Attempts:
    """The conversations that began with one prompt, and which ids followed which in them."""

    def __init__(self) -> None:
        self._followers: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._num_read: dict[Conversation, int] = {}

    def join(self, conversation: Conversation) -> None:
        """What it has at first is what the others have."""
        self._num_read[conversation] = len(conversation.ids) if self._num_read else 0

    def draft(self, conversation: Conversation, length: int) -> list[int]:
        """Return up to `length` ids: each the most frequent one after the longest context that was seen before."""
        if length:
            self._read()
        ids = conversation.ids[-_CONTEXT:]
        num_given = len(ids)
        while len(ids) < num_given + length:
            contexts = (tuple(ids[-size:]) for size in range(min(_CONTEXT, len(ids)), 0, -1))
            followers = next((self._followers[each] for each in contexts if each in self._followers), None)
            if followers is None:
                break
            ids.append(max(followers, key=followers.__getitem__))
        return ids[num_given:]

    def _read(self) -> None:
        for conversation, num_read in self._num_read.items():
            ids = conversation.ids
            for place in range(num_read, len(ids)):
                for start in range(max(0, place - _CONTEXT), place):
                    self._followers[tuple(ids[start:place])][ids[place]] += 1
            self._num_read[conversation] = len(ids)


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """What one slot holds. The last id sampled has no KV yet: it is computed with whatever follows it."""

    slot: int
    ids: list[int]  # of the newest request, and of its completion as far as it was sampled
    opening: tuple[int, ...]  # the prompt that its first request began with; empty for a fork
    num_computed: int  # columns whose KV is there
    tail: str  # the newest request; releasing it gives the slot back
    attempts: Attempts  # at the prompt that it, or what it was forked from, began with
    lineage: dict[str, Share] = field(default_factory=dict)  # by request
    is_running: bool = True

    @property
    def num_missing(self) -> int:
        """Ids whose KV is still to be computed before the last one's, which is fed when a token after it is drawn."""
        return len(self.ids) - 1 - self.num_computed

    def ids_to_compare(self, request: CompletionRequest) -> list[int]:
        """What the ids of `request`, which extends a request in the lineage, have to begin with."""
        if self.tail == request.extends:
            return self.ids
        num_held = self.lineage[request.extends].num_ids  # a fork may hold less than `request` extends
        return [*self.ids[:num_held], *request.ids[num_held:]][: request.at]

    @property
    def has_opening(self) -> bool:
        """Whether its prompt can be copied, all but the last id."""
        return self.num_computed >= len(self.opening) - 1

    def lineage_of_fork(self, num_ids: int, num_computed: int) -> dict[str, Share]:
        """What a copy of the first `num_ids` ids, with `num_computed` columns, repeats of earlier requests."""
        return {
            request_id: Share(num_ids=min(share.num_ids, num_ids), num_computed=min(share.num_computed, num_computed))
            for request_id, share in self.lineage.items()
        }


class ConversationTable:
    """The slots of one engine."""

    def __init__(self, num_slots: int) -> None:
        self._free = set(range(num_slots))
        self._conversations: dict[str, Conversation] = {}  # by tail
        self._released: dict[int, Conversation] = {}  # whose content is still in its slot, by slot; the first one longest ago

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._conversations.values())

    @property
    def next_slot(self) -> int | None:
        """The lowest free slot; None while all are held."""
        return min(self._free, default=None)

    @property
    def num_open(self) -> int:
        return len(self._conversations)

    @property
    def has_only_released(self) -> bool:
        return bool(self._released) and not self._conversations

    @property
    def highest(self) -> Conversation:
        """The conversation in the highest slot. There must be one."""
        return max(self, key=lambda conversation: conversation.slot)

    def by_tail(self, request_id: str) -> Conversation | None:
        return self._conversations.get(request_id)

    def is_held(self, request_id: str) -> bool:
        """Whether a conversation that is not released holds something of a request."""
        return any(request_id in conversation.lineage for conversation in self)

    def is_released(self, conversation: Conversation) -> bool:
        return self._released.get(conversation.slot) is conversation

    def holder(self, request_id: str) -> Conversation | None:
        """The conversation that holds the most of a request; None when none does, or `request_id` is empty."""
        holders = [each for each in (*self, *self._released.values()) if request_id in each.lineage]
        return max(holders, key=lambda conversation: conversation.lineage[request_id].num_computed, default=None)

    def continued_by(self, request: CompletionRequest) -> Conversation | None:
        """The conversation whose slot `request` takes over: idle, and extended exactly at its end."""
        parent = self.by_tail(request.extends)
        is_continued = parent is not None and not parent.is_running and request.at == len(parent.ids)
        return parent if is_continued else None

    def with_opening(self, opening: tuple[int, ...]) -> Conversation | None:
        """A conversation that begins with this prompt; one that holds it already, if there is one."""
        return max((each for each in self if each.opening == opening), key=lambda each: each.has_opening, default=None)

    def continue_(self, conversation: Conversation, request: CompletionRequest) -> None:
        """Let `request` take over the slot of `conversation`."""
        self._forget(request.id)
        del self._conversations[conversation.tail]
        self._conversations[request.id] = conversation
        conversation.tail = request.id
        conversation.ids = list(request.ids)
        conversation.lineage[request.id] = Share(num_ids=len(request.ids), num_computed=len(request.ids))
        conversation.is_running = True

    def open(
        self,
        request: CompletionRequest,
        lineage: dict[str, Share],
        *,
        opening: tuple[int, ...] = (),
        source: Conversation | None = None,
        slot: int | None = None,
        num_computed: int = 0,
    ) -> Conversation:
        """Give `request` a free slot; or `slot`, of a released conversation whose first `num_computed` columns it needs.

        `source` is the conversation that `request` forks, if it does.
        """
        if slot is None:
            empty = self._free - self._released.keys()
            slot = min(empty) if empty else next(iter(self._released))
        alike = [each for each in (*self, *self._released.values()) if (opening and each.opening == opening) or each is source]
        self._take(slot)
        self._forget(request.id)
        conversation = Conversation(
            slot=slot,
            ids=list(request.ids),
            opening=opening,
            num_computed=num_computed,
            tail=request.id,
            attempts=alike[0].attempts if alike else Attempts(),
            lineage={**lineage, request.id: Share(num_ids=len(request.ids), num_computed=len(request.ids))},
        )
        self._conversations[request.id] = conversation
        conversation.attempts.join(conversation)
        return conversation

    def _take(self, slot: int) -> None:
        self._free.remove(slot)
        self._released.pop(slot, None)

    def _forget(self, request_id: str) -> None:
        """A request of that id comes again, and may be another one."""
        self._released = {slot: each for slot, each in self._released.items() if request_id not in each.lineage}

    def move(self, conversation: Conversation) -> None:
        """Give `conversation` the lowest free slot for its own."""
        slot = min(self._free)
        self._take(slot)
        self._free.add(conversation.slot)
        conversation.slot = slot

    def end(self, conversation: Conversation) -> None:
        """The newest request of `conversation` is complete; its slot waits for the next one."""
        num_ids = len(conversation.ids)
        conversation.lineage[conversation.tail] = Share(num_ids=num_ids, num_computed=num_ids - 1)
        conversation.is_running = False

    def close(self, conversation: Conversation) -> None:
        del self._conversations[conversation.tail]
        self._free.add(conversation.slot)
        if not conversation.is_running:
            self._released[conversation.slot] = conversation

    def forget_columns(self) -> None:
        """Conversations keep their slots and ids, and compute their columns again when they go on."""
        self._released.clear()
        for conversation in self:
            conversation.num_computed = 0
            conversation.lineage = conversation.lineage_of_fork(len(conversation.ids), 0)
            if not conversation.is_running:
                conversation.opening = ()  # those that waited for it would wait until it goes on

    def close_all(self) -> None:
        for conversation in list(self):
            self.close(conversation)
        self._released.clear()
