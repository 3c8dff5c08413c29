"""Tells an engine that hangs from one completion that takes long: by what it answers, or else by asking it for one token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from strop.engine.protocol import CompletionRequest, InferenceEngine
from strop.errors import MachineError, StropError

_RELEASE_S = 10.0  # how long it may take to give the memory of that one token back


class Pulse:
    """When an engine last answered anybody.

    A token is asked for, and not a ping: a server's front door, or the thread that answers pings, may be well while the model
    behind it is stuck. What is sampled of others does not depend on it any more than on other company.
    """

    def __init__(self, name: str, engine: InferenceEngine, clock: Callable[[], float]) -> None:
        self._name, self._engine, self._clock = name, engine, clock
        self._last_s = clock()
        self._num_asked = 0
        self.last_words = ""  # what it said instead of a token, when it was asked for one last
        self._asking: asyncio.Task[None] | None = None
        self.tasks: set[asyncio.Task[None]] = set()  # that have not ended

    def felt(self) -> None:
        """It answered somebody."""
        self._last_s = self._clock()

    async def is_felt(self, *, within_s: float) -> bool:
        """Whether it answered anybody in the last `within_s`, or else does so in as long a time from now. However many ask,
        the engine is asked once."""
        if not self._was_felt(within_s):
            if self._asking is None or self._asking.done():
                self._asking = self._start(self._ask(within_s))
            await asyncio.wait({self._asking})
        return self._was_felt(within_s)

    def stop(self) -> None:
        """Nobody needs to know any more."""
        for task in self.tasks:
            task.cancel()

    def _was_felt(self, within_s: float) -> bool:
        return self._clock() - self._last_s < within_s

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _ask(self, within_s: float) -> None:
        self._num_asked += 1
        self.last_words = ""
        request_id = f"sign of life {self._num_asked} of {self._name}"
        request = CompletionRequest(id=request_id, ids=(0,), max_tokens=1, stop_ids=frozenset(), temperature=1.0, seed=0)
        answering = self._start(self._answer(request))
        try:
            await asyncio.wait({answering}, timeout=within_s)
        finally:
            answering.cancel()

    async def _answer(self, request: CompletionRequest) -> None:
        try:
            await self._engine.complete(request)
        except MachineError as error:
            self.last_words = str(error)
            return
        except StropError:
            pass  # it does not like the question, but it answers
        except Exception as error:  # noqa: BLE001 - an engine that breaks over one token is no better than one that hangs
            self.last_words = f"{type(error).__name__}: {error}"
            return
        self.felt()
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self._engine.release(request.id)
        except (MachineError, OSError):
            return
