"""A queue in which clients take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class FairQueue(Generic[ItemT]):
    """Clients take turns, and within one client the oldest item is next.

    An item waits for at most one item of every other client, however many these have. Every operation takes constant time. An
    item is in the queue at most once.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, OrderedDict[ItemT, None]] = OrderedDict()  # next turn first; none is empty
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, client: Hashable, item: ItemT, *, is_first: bool = False) -> None:
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

    def remove(self, client: Hashable, item: ItemT) -> bool:
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
