"""Which conversations a server holds for us, and who waits; first come, first served.

A server frees and finds KV memory by itself. The count is kept here so that it is never asked for more at once than it was
set up for, and so that it is seen which prefix may be lost while its tool runs: a server frees the blocks of whoever waits for
a tool like those of whoever is gone, and takes first what was used longest ago.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeAlias

from strop.engine.protocol import CompletionRequest
from strop.engine.requests import check_prefix
from strop.errors import StropError

Ids: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class _Hold:
    ids: Ids  # of the conversation's newest request, and of its completion
    num_blocks: int  # that it takes; while it runs, that it may take
    is_running: bool = True
    num_released: int = 0  # blocks that had been released when it was used last


class Conversations:
    """The places of one server. A request that goes on where its conversation ended takes its place; any other needs one."""

    def __init__(self, num_places: int, *, num_blocks: int = 0, block_tokens: int | None = None) -> None:
        """Places, and the KV memory below them, of a server that takes first what was used longest ago.

        Args:
            num_blocks: of its KV memory.
            block_tokens: of a block; None where the server does not tell: then nothing is known of its prefixes.
        """
        self._num_places = num_places
        self._num_blocks, self._block_tokens = num_blocks, block_tokens
        self._num_released = 0  # blocks, of conversations that have left
        self._holds: dict[str, _Hold] = {}  # by newest request
        self._waiting: dict[str, tuple[asyncio.Future[None], CompletionRequest]] = {}  # in order of arrival
        self._refused: dict[str, str] = {}  # a request that was refused -> the conversation that it would have gone on

    @property
    def busy(self) -> list[str]:
        """Requests that run or wait."""
        return [*(request_id for request_id, hold in self._holds.items() if hold.is_running), *self._waiting]

    async def enter(self, request: CompletionRequest) -> None:
        """Take a place; waits for one if it must.

        Raises:
            StropError: the id is in use, or the request does not begin as the conversation that it extends.
        """
        if request.id in self._holds or request.id in self._waiting:
            raise StropError(f"request {request.id}: an earlier request of that id was not released.")
        parent = self._holds.get(request.extends)
        if parent is not None:
            check_prefix(request, parent.ids)
        if self._goes_on_in_place(request):
            del self._holds[request.extends]
            self._holds[request.id] = self._hold_of(request)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = (place, request)
        self._grant()
        try:
            await place
            if request.id not in self._holds:
                raise asyncio.CancelledError  # it left in the moment of its turn
        except asyncio.CancelledError:
            self.leave(request.id)  # it may have been granted in the same moment
            raise

    def refuse(self, request: CompletionRequest) -> None:
        """Note that `request` was refused before it entered: releasing it is to release what it would have gone on from."""
        if request.id not in self._holds and self._goes_on_in_place(request):
            self._refused[request.id] = request.extends

    def end(self, request: CompletionRequest, ids: Ids) -> None:
        """`request` is complete; its conversation keeps its place. `ids` were sampled."""
        hold = self._holds.get(request.id)
        if hold is not None:  # it was not released meanwhile
            hold.ids, hold.is_running = (*request.ids, *ids), False
            hold.num_blocks, hold.num_released = self._blocks_of(len(hold.ids)), self._num_released

    def leave(self, request_id: str) -> None:
        """Give a conversation's place to whoever waits; a request that waits itself is cancelled. Unknown ids are ignored."""
        request_id = self._refused.pop(request_id, request_id)
        if (hold := self._holds.pop(request_id, None)) is not None:
            self._num_released += hold.num_blocks
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting[0].cancel()
        self._grant()

    def endangered(self) -> list[Ids]:
        """Prefixes that the server may evict for those who run, though their conversations go on: use each of them now.

        A conversation's blocks are safe while the memory holds everybody's, and all that was released after they were last
        used: nobody else's can have been taken from behind them. Whoever is told is believed to use them.
        """
        if self._block_tokens is None:
            return []
        # A use takes a block for a moment, and everybody may be used at once.
        spare = self._num_blocks - self._num_places - sum(hold.num_blocks for hold in self._holds.values())
        found = []
        for hold in self._holds.values():
            whole = (len(hold.ids) - 1) // self._block_tokens * self._block_tokens  # the last id was never fed
            num_since = self._num_released - hold.num_released
            if whole and not hold.is_running and num_since > max(0, spare):
                hold.num_released = self._num_released
                found.append(hold.ids[: whole + 1])
        return found

    def clear(self) -> None:
        """Forget every conversation: what was cached of them is gone."""
        self._holds.clear()
        self._refused.clear()
        self._num_released = 0
        self._grant()

    def _goes_on_in_place(self, request: CompletionRequest) -> bool:
        parent = self._holds.get(request.extends)
        return parent is not None and not parent.is_running and request.at == len(parent.ids)

    def _grant(self) -> None:
        while self._waiting and len(self._holds) < self._num_places:
            request_id = next(iter(self._waiting))
            place, request = self._waiting.pop(request_id)
            if not place.cancelled():
                self._holds[request_id] = self._hold_of(request)
                place.set_result(None)

    def _hold_of(self, request: CompletionRequest) -> _Hold:
        return _Hold(request.ids, self._blocks_of(len(request.ids) + request.max_tokens))

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens) if self._block_tokens is not None else 0
