"""Opens engines in place of lost ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from strop.engine.protocol import InferenceEngine
from strop.errors import EngineLost

if TYPE_CHECKING:
    from strop.rollout.scheduler.engine_pool import EnginePool, PooledEngine

logger = logging.getLogger(__name__)

_OPEN_S = 900.0

OpenEngine = Callable[[int, str], Awaitable[InferenceEngine]]
"""Opens an engine in place of the one with this index. The second argument is the name that it will have."""


class EngineObserver:
    """Is called when engines are lost and replaced. The methods of this class do nothing."""

    def engine_joined(self, name: str, *, replaces: str) -> None:
        """Engine `name` was opened in place of engine `replaces`."""

    def engine_lost(self, name: str, *, reason: str) -> None:
        """Engine `name` was removed."""

    def engine_not_replaced(self, name: str, *, reason: str) -> None:
        """Engine `name` was lost and no engine could be opened in its place."""


class Replacements:
    """Opens engines in place of lost ones, at most `max_replacements` in a batch."""

    def __init__(self, pool: EnginePool, open_another: OpenEngine | None) -> None:
        self.num_opened = 0  # in this batch
        self.missing: dict[int, str] = {}  # lost engines that were not replaced, by index
        self.running: set[asyncio.Task[None]] = set()
        self._pool, self._open_another = pool, open_another

    def replace_missing(self) -> None:
        """A batch begins: replace engines that earlier batches did not."""
        for index, lost in list(self.missing.items())[: self._pool.config.max_replacements]:
            self.replace(lost, index)

    def replace(self, lost: str, index: int) -> None:
        """Open another engine in place of `lost`, unless this batch has done so too often."""
        if self._open_another is None:
            return
        if self.num_opened >= self._pool.config.max_replacements:
            self.missing[index] = lost
            self._not_replaced(lost, f"this step has replaced {self.num_opened} engines already (scheduler.max_replacements).")
            return
        self.missing.pop(index, None)
        self.num_opened += 1
        task = asyncio.ensure_future(self._open(lost, index, self._open_another))
        self.running.add(task)
        task.add_done_callback(self._settle)

    async def close(self) -> None:
        self._open_another = None
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    async def _open(self, lost: str, index: int, open_another: OpenEngine) -> None:
        pooled: PooledEngine | None = None
        try:
            async with asyncio.timeout(_OPEN_S):
                pooled = self._pool.pooled(await open_another(index, self._pool.next_name(index)), index)
            await self._admit(pooled, replaces=lost)
        except BaseException as error:
            if pooled is not None:
                await pooled.close()
            if not isinstance(error, Exception):
                raise
            reason = f"not open after {_OPEN_S:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            self._not_replaced(lost, reason)
            self.replace(lost, index)

    async def _admit(self, engine: PooledEngine, *, replaces: str) -> None:
        """Send the current weights to a new engine as soon as they may be sent, and let it join."""
        pool = self._pool
        while True:
            await pool.may_send.wait()
            async with pool.sending:
                if not pool.may_send.is_set():
                    continue
                await pool.send_current(engine)
                logger.info("%s replaces %s", engine.name, replaces)
                pool.observer.engine_joined(engine.name, replaces=replaces)
                pool.join(engine)
                return

    def _not_replaced(self, lost: str, reason: str) -> None:
        logger.warning("%s could not be replaced: %s", lost, reason)
        self._pool.first_loss = self._pool.first_loss or EngineLost(reason)
        self._pool.observer.engine_not_replaced(lost, reason=reason)

    def _settle(self, done: asyncio.Task[None]) -> None:
        self.running.discard(done)
        self._pool.check_engines()
