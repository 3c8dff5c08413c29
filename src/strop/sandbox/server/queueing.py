"""How much work the service accepts, in all and from each client, and whose work is next."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from strop.sandbox.server.config import DispatchConfig

ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class Held:
    """Work that is accepted and not answered yet."""

    num: int = 0
    num_bytes: int = 0

    def add(self, num: int, num_bytes: int) -> None:
        self.num += num
        self.num_bytes += num_bytes


class Admission:
    """Counts held work. Each successful `admit` needs one `release`."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self.held = Held()
        self._refusal = ""
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._by_client: defaultdict[str, Held] = defaultdict(Held)

    @property
    def num_clients(self) -> int:
        return len(self._by_client)

    def stop(self, reason: str) -> None:
        """Admit nothing from now on."""
        self._refusal = reason

    def admit(self, client: str, num_bytes: int) -> str:
        """Count the work and return "", or return why it is refused."""
        share = self._config.client_share
        own = self._by_client[client]
        refusal = (
            self._refusal
            or self._over(self.held, num_bytes, who="the service", share=1.0)
            or self._over(own, num_bytes, who="this client", share=share)
        )
        if refusal:
            if not own.num:
                del self._by_client[client]
            return refusal
        self.held.add(1, num_bytes)
        own.add(1, num_bytes)
        self._is_empty.clear()
        return ""

    def release(self, client: str, num_bytes: int) -> None:
        own = self._by_client[client]
        self.held.add(-1, -num_bytes)
        own.add(-1, -num_bytes)
        if not own.num:
            del self._by_client[client]
            if not self.held.num:
                self._is_empty.set()

    async def wait_empty(self) -> None:
        """Return when nothing is held."""
        await self._is_empty.wait()

    def _over(self, held: Held, num_bytes: int, *, who: str, share: float) -> str:
        if held.num >= share * self._config.max_held:
            return f"{who} has {held.num} calls in the queue, which is the limit"
        if held.num_bytes + num_bytes > (most := share * self._config.max_held_bytes):
            return f"{who} has {held.num_bytes} bytes of calls in the queue, the limit is {most:.0f}"
        return ""


class FairQueue(Generic[ItemT]):
    """Clients take turns, and within one client the oldest item is next.

    An item waits for at most one item of every other client, however many these have. Every operation takes constant time. An
    item is in the queue at most once.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, OrderedDict[ItemT, None]] = OrderedDict()  # next turn first; none is empty
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, client: str, item: ItemT, *, is_first: bool = False) -> None:
        """Put the item after the others of its client, or with `is_first` before them."""
        if (items := self._clients.get(client)) is None:
            items = self._clients[client] = OrderedDict()
        items[item] = None
        if is_first:
            items.move_to_end(item, last=False)
        self._length += 1

    def pop(self) -> ItemT:
        """Remove the next item. Raises `IndexError` if there is none."""
        if not self._length:
            raise IndexError("pop from an empty queue")
        client, items = next(iter(self._clients.items()))
        item, _ = items.popitem(last=False)
        self._length -= 1
        if items:
            self._clients.move_to_end(client)
        else:
            del self._clients[client]
        return item

    def remove(self, client: str, item: ItemT) -> bool:
        """Remove one item; False if it is not in the queue."""
        items = self._clients.get(client)
        if items is None or item not in items:
            return False
        del items[item]
        self._length -= 1
        if not items:
            del self._clients[client]
        return True

    def firsts(self) -> list[ItemT]:
        """The oldest item of every client."""
        return [next(iter(items)) for items in self._clients.values()]

    def __iter__(self) -> Iterator[ItemT]:
        return iter([item for items in self._clients.values() for item in items])
