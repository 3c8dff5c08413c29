"""The engines that are there, and which of them a rollout should go to: the emptiest, unless another holds its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from strop.errors import StropError
from strop.rollout.scheduling.events import EngineSpec
from strop.rollout.scheduling.fit import check_can_oversubscribe
from strop.rollout.scheduling.memory import KvMemory, Prompt
from strop.types import RolloutKey

Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What placing a rollout depends on."""

    group: int
    prompt_tokens: int  # that it shares with others of its group whose prompt is as long; 0: it shares nothing
    total_tokens: int  # that it may become long, prompt included

    @property
    def prompt(self) -> Prompt:
        return (self.group, self.prompt_tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class Engine:
    """One engine and its place in the arrays below."""

    memory: KvMemory
    index: int
    is_draining: bool = False

    @property
    def name(self) -> str:
        return self.memory.spec.name


class EngineFloor:
    """All engines that ever joined. Arrays by engine, so that 512 of them are compared in one go."""

    def __init__(self, *, oversubscription: float, affinity: float) -> None:
        self._oversubscription = oversubscription
        self._affinity = affinity
        self._engines: list[Engine] = []
        self._by_name: dict[str, Engine] = {}
        self._homes: dict[Prompt, set[int]] = {}  # indices of the engines that hold it
        self._capacity: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._block_tokens: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._longest: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # conversation, in tokens
        self._reserved: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._is_open: Mask = np.zeros(0, dtype=np.bool_)  # takes new conversations, as far as their number goes
        self._is_there: Mask = np.zeros(0, dtype=np.bool_)  # takes new conversations, once there is room

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._by_name.values())

    @property
    def specs(self) -> list[EngineSpec]:
        """Of the engines that take new conversations."""
        return [engine.memory.spec for engine in self if not engine.is_draining]

    def find(self, name: str) -> Engine:
        if name not in self._by_name:
            raise StropError(f"engine {name!r} is not there: it never joined, or has drained or died.")
        return self._by_name[name]

    def join(self, spec: EngineSpec) -> Engine:
        if any(engine.name == spec.name for engine in self._engines):
            raise StropError(f"engine {spec.name!r} joined before; whoever comes back needs a new name.")
        check_can_oversubscribe(spec, self._oversubscription)
        capacity = int(spec.kv_blocks * self._oversubscription)
        engine = Engine(memory=KvMemory(spec=spec, capacity=capacity), index=len(self._engines))
        self._engines.append(engine)
        self._by_name[spec.name] = engine
        self._capacity = np.append(self._capacity, capacity)
        self._block_tokens = np.append(self._block_tokens, spec.block_tokens)
        self._longest = np.append(self._longest, spec.longest)  # of what is really there, however often it is reserved
        self._reserved = np.append(self._reserved, 0)
        self._is_open = np.append(self._is_open, True)
        self._is_there = np.append(self._is_there, True)
        return engine

    def drain(self, engine: Engine) -> None:
        engine.is_draining = True
        self._is_open[engine.index] = self._is_there[engine.index] = False

    def remove(self, engine: Engine) -> None:
        """It is gone, with whatever it held."""
        self.drain(engine)
        for prompt in engine.memory.prompts:
            self._leave_home(prompt, engine)
        engine.memory.clear()
        del self._by_name[engine.name]

    def none_of_them(self) -> Mask:
        """The engines that a search leaves out from the start: those that take no new conversations."""
        return ~self._is_there

    def could_ever_hold(self, size: Size) -> Mask:
        """Which of the engines that take conversations hold a rollout of `size`, once nothing else is there."""
        needed = -(-size.total_tokens // self._block_tokens)
        fits: Mask = self._is_there & (needed <= self._capacity) & (size.total_tokens <= self._longest)
        return fits

    def best(self, size: Size, closed: Mask) -> Engine | None:
        """The engine for one more rollout of `size`, none of the `closed` ones; None when it fits nowhere now."""
        needed = -(-size.total_tokens // self._block_tokens)
        fits = self._is_open & ~closed & (needed <= self._capacity - self._reserved) & (size.total_tokens <= self._longest)
        shares = np.where(fits, self._reserved / self._capacity, np.inf)
        emptiest = int(shares.argmin()) if len(shares) else 0
        least = float(shares[emptiest]) if len(shares) else np.inf
        home, home_share = None, np.inf
        for index in self._homes.get(size.prompt, ()):
            engine = self._engines[index]
            if closed[index] or not self._is_open[index] or size.total_tokens > self._longest[index]:
                continue
            share = engine.memory.reserved / engine.memory.capacity
            if share < home_share or (share == home_share and home is not None and index < home.index):
                need = engine.memory.need(size.prompt, size.total_tokens)
                if need <= engine.memory.free:
                    home, home_share = engine, share
        if home is not None and home_share <= least + self._affinity:
            return home
        return self._engines[emptiest] if np.isfinite(least) else None

    def reserve(self, engine: Engine, key: RolloutKey, size: Size) -> None:
        engine.memory.reserve(key, size.prompt, size.total_tokens)
        self._homes.setdefault(size.prompt, set()).add(engine.index)
        self._update(engine)

    def fork(self, engine: Engine, parent: RolloutKey, key: RolloutKey, at: int, total_tokens: int) -> None:
        engine.memory.fork(parent, key, at, total_tokens)
        self._update(engine)

    def release(self, engine: Engine, key: RolloutKey, prompt: Prompt) -> None:
        engine.memory.release(key)
        if prompt not in engine.memory.prompts:
            self._leave_home(prompt, engine)
        self._update(engine)

    def _leave_home(self, prompt: Prompt, engine: Engine) -> None:
        homes = self._homes[prompt]
        homes.discard(engine.index)
        if not homes:
            del self._homes[prompt]

    def _update(self, engine: Engine) -> None:
        self._reserved[engine.index] = engine.memory.reserved
        self._is_open[engine.index] = not engine.is_draining and engine.memory.has_room_for_one
