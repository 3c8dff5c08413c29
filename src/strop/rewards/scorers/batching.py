"""Puts what many callers ask of a scorer at about the same time into one batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from strop.rewards.scorers.protocol import Exchange, Scorer


class BatchingScorer:
    """A `Scorer` before another, for many callers of one event loop. An error of a batch goes to everyone in it.

    Args:
        max_wait_s: how long the first of a batch waits for others.
        max_batch: exchanges at which it no longer does.
    """

    def __init__(self, scorer: Scorer, *, max_wait_s: float, max_batch: int) -> None:
        self._scorer, self._max_wait_s, self._max_batch = scorer, max_wait_s, max_batch
        self._waiting: list[tuple[Exchange, asyncio.Future[float | None]]] = []
        self._is_full = asyncio.Event()
        self._flushing: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def score(self, exchanges: Sequence[Exchange]) -> list[float | None]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in exchanges]
        self._waiting += zip(exchanges, futures, strict=True)
        if len(self._waiting) >= self._max_batch:
            self._is_full.set()
        if self._flushing is None and self._waiting:
            self._flushing = asyncio.create_task(self._flush())
        results = await asyncio.gather(*futures, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def close(self) -> None:
        tasks = [*self._running, *([self._flushing] if self._flushing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, future in self._waiting:
            future.cancel()
        await self._scorer.close()

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_full.wait(), self._max_wait_s)
        waiting, self._waiting = self._waiting, []
        self._is_full.clear()
        self._flushing = None
        for start in range(0, len(waiting), self._max_batch):
            task = asyncio.create_task(self._score(waiting[start : start + self._max_batch]))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _score(self, batch: Sequence[tuple[Exchange, asyncio.Future[float | None]]]) -> None:
        try:
            scores = await self._scorer.score([exchange for exchange, _ in batch])
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    if isinstance(error, asyncio.CancelledError):
                        future.cancel()
                    else:
                        future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), score in zip(batch, scores, strict=True):
            if not future.done():
                future.set_result(score)
