"""Which conversations a server holds for us, and who waits; first come, first served.

A server frees and finds KV memory by itself. The count is kept here so that it is never asked for more at once than it was
set up for: a conversation's prefix then stays cached while its tool runs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from strop.engine.protocol import CompletionRequest
from strop.engine.requests import check_prefix
from strop.errors import StropError


@dataclass(slots=True)
class _Hold:
    ids: tuple[int, ...]  # of the conversation's newest request, and of its completion
    is_running: bool = True


class Conversations:
    """The places of one server. A request that goes on where its conversation ended takes its place; any other needs one."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._holds: dict[str, _Hold] = {}  # by newest request
        self._waiting: dict[str, tuple[asyncio.Future[None], tuple[int, ...]]] = {}  # in order of arrival, with their ids
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
            self._holds[request.id] = _Hold(request.ids)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = (place, request.ids)
        self._grant()
        try:
            await place
        except asyncio.CancelledError:
            self.leave(request.id)  # it may have been granted in the same moment
            raise

    def refuse(self, request: CompletionRequest) -> None:
        """Note that `request` was refused before it entered: releasing it is to release what it would have gone on from."""
        if request.id not in self._holds and self._goes_on_in_place(request):
            self._refused[request.id] = request.extends

    def end(self, request: CompletionRequest, ids: tuple[int, ...]) -> None:
        """`request` is complete; its conversation keeps its place. `ids` were sampled."""
        hold = self._holds.get(request.id)
        if hold is not None:  # it was not released meanwhile
            hold.ids, hold.is_running = (*request.ids, *ids), False

    def leave(self, request_id: str) -> None:
        """Give a conversation's place to whoever waits; a request that waits itself is cancelled. Unknown ids are ignored."""
        request_id = self._refused.pop(request_id, request_id)
        self._holds.pop(request_id, None)
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting[0].cancel()
        self._grant()

    def clear(self) -> None:
        """Forget every conversation: what was cached of them is gone."""
        self._holds.clear()
        self._refused.clear()
        self._grant()

    def _goes_on_in_place(self, request: CompletionRequest) -> bool:
        parent = self._holds.get(request.extends)
        return parent is not None and not parent.is_running and request.at == len(parent.ids)

    def _grant(self) -> None:
        while self._waiting and len(self._holds) < self._num_places:
            request_id = next(iter(self._waiting))
            place, ids = self._waiting.pop(request_id)
            if not place.cancelled():
                self._holds[request_id] = _Hold(ids)
                place.set_result(None)
