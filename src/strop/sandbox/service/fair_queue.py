"""A queue that is fair by client: clients take turns, and within one client the oldest work is next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class FairQueue(Generic[ItemT]):
    """A lone item of a client waits for at most one item of every other client, however many they have.

    Every operation takes constant time, removal from the middle included. An item is in the queue at most once.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, OrderedDict[ItemT, None]] = OrderedDict()  # next turn first; none is empty
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, client: str, item: ItemT, *, is_first: bool = False) -> None:
        """Put it behind, or with `is_first` before, what the client has in the queue."""
        if (items := self._clients.get(client)) is None:
            items = self._clients[client] = OrderedDict()
        items[item] = None
        if is_first:
            items.move_to_end(item, last=False)
        self._length += 1

    def pop(self) -> ItemT:
        """Take the next. Raises `IndexError` when there is none."""
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

    def first_of(self, client: str) -> ItemT | None:
        """The oldest work of one client, left where it is."""
        return next(iter(self._clients.get(client, ())), None)

    def remove(self, client: str, item: ItemT) -> bool:
        """Take it out of the middle; False when it is not there any more."""
        items = self._clients.get(client)
        if items is None or item not in items:
            return False
        del items[item]
        self._length -= 1
        if not items:
            del self._clients[client]
        return True

    def firsts(self) -> list[ItemT]:
        """The oldest work of every client."""
        return [next(iter(items)) for items in self._clients.values()]

    def __iter__(self) -> Iterator[ItemT]:
        return iter([item for items in self._clients.values() for item in items])
