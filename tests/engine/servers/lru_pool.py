"""KV memory as vLLM keeps it: blocks that nobody uses wait in a queue, from which the one that was freed first is taken."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field


@dataclass
class _Running:
    ids: list[int]
    blocks: list[int]


@dataclass
class LruPool:
    """Prompts are allotted at the start of a request, and its completion when it ends."""

    num_blocks: int
    block_tokens: int
    _users: dict[int, int] = field(default_factory=dict)  # by block
    _prefix_of: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of the blocks that can be found again
    _blocks_of: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # who computes at once has a copy each
    _running: dict[str, _Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = OrderedDict.fromkeys(range(self.num_blocks))

    def start(self, name: str, ids: list[int]) -> int:
        """Tokens that were found."""
        found = []
        for end in range(self.block_tokens, len(ids), self.block_tokens):  # the last id is always computed
            if not (copies := self._blocks_of.get(tuple(ids[:end]))):
                break
            found.append(copies[0])
        for block in found:
            self._free.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        self._running[name] = _Running(list(ids), list(found))
        self._grow(self._running[name])
        return len(found) * self.block_tokens

    def end(self, name: str, completion: list[int]) -> None:
        running = self._running.pop(name)
        running.ids += completion
        self._grow(running)
        for index, block in enumerate(running.blocks, start=1):
            prefix = tuple(running.ids[: index * self.block_tokens])
            if index * self.block_tokens < len(running.ids) and block not in self._prefix_of:
                self._blocks_of.setdefault(prefix, []).append(block)
                self._prefix_of[block] = prefix
        nameless = deque[int]()
        for block in reversed(running.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if block not in self._prefix_of:
                    nameless.append(block)
        for block in nameless:
            self._free.move_to_end(block, last=False)

    def _grow(self, running: _Running) -> None:
        while len(running.blocks) * self.block_tokens < len(running.ids):
            block, _ = self._free.popitem(last=False)
            if (prefix := self._prefix_of.pop(block, None)) is not None:
                self._blocks_of[prefix].remove(block)
            self._users[block] = 1
            running.blocks.append(block)
