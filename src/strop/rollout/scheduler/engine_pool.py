"""The engines that a run samples from: they hold the same published weights, and lost engines are replaced."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

from strop import user_code
from strop.engine.protocol import (
    Capabilities,
    CompletionRequest,
    InferenceEngine,
    SleepingEngine,
    check_completion,
)
from strop.engine.publication import Publication
from strop.errors import EngineLost, MachineError, StropError, WeightsNotProven
from strop.rollout.environment import all_of, end
from strop.rollout.scheduler.admission import EngineSpec
from strop.rollout.scheduler.batch import RESUME, EngineRemovedError, RolloutBatch
from strop.rollout.scheduler.report import BatchReport
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.types import Completion

logger = logging.getLogger(__name__)

STALL_TIMEOUT_S = 600.0
_LOOKS = 4  # at an engine's progress in that time
_BLOCK_TOKENS = 32  # for an engine that has no slots and does not report its block size; a small block is the safe choice
_RELEASE_S = 10.0
_SETTLE_S = 5.0  # for cancelled completions to end
_CLOSE_S = 60.0
_OPEN_S = 900.0

Publish: TypeAlias = Callable[[Capabilities], AbstractAsyncContextManager[Publication]]
"""Offers the current weights as engines of these capabilities take them, as long as the context lasts."""

OpenEngine: TypeAlias = Callable[[int, str], Awaitable[InferenceEngine]]
"""Opens an engine in place of the one with this index. The second argument is the name that it will have."""


class EngineObserver:
    """Is called when engines are lost and replaced. The methods of this class do nothing."""

    def engine_joined(self, name: str, *, replaces: str) -> None:
        """Engine `name` was opened in place of engine `replaces`."""

    def engine_lost(self, name: str, *, reason: str) -> None:
        """Engine `name` was removed."""

    def engine_not_replaced(self, name: str, *, reason: str) -> None:
        """Engine `name` was lost and no engine could be opened in its place."""


class EnginePool:
    """Engines of any sizes behind the scheduler that `config` describes. One batch of rollouts runs at a time.

    An engine that dies, hangs, gives an invalid answer or holds other weights than the published ones is removed: it is
    reported to `observer`, closed, and replaced with `open_another`, up to `config.max_replacements` times a step. Later
    steps replace the rest. Its rollouts continue on other engines from their last finished turn or piece.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        config: SchedulerConfig | None = None,
        *,
        open_another: OpenEngine | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        publish_deadline_s: float | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        """
        Args:
            stall_timeout_s: an engine that computes nothing for this long while a request waits is lost.
            publish_deadline_s: how long a publication may take; None: `stall_timeout_s`.
        """
        self.config = SchedulerConfig() if config is None else config
        self._observer = EngineObserver() if observer is None else observer
        self._may_send = asyncio.Event()  # whether the current weights may be sent to a replacement
        self._may_send.set()
        self._sending = asyncio.Lock()
        self._first_loss: EngineLost | None = None  # since the last publication
        self.stall_timeout_s = stall_timeout_s
        self.publish_deadline_s = stall_timeout_s if publish_deadline_s is None else publish_deadline_s
        self._engines: dict[str, PooledEngine] = {}
        self.num_generations: Counter[int] = Counter()  # by index: engines that had it
        self._batch: RolloutBatch | None = None
        self._is_shared = False  # the batch that runs
        self._num_sharing = 0
        self._turn = asyncio.Condition()
        self._report: BatchReport | None = None
        self._lost_before: list[str] = []  # engines that were lost since the last batch
        self.policy_version = engines[0].policy_version if engines else -1  # of the newest weights, proven or on their way
        self.oldest_version = self.policy_version  # that an engine may sample from, while a newer one is on its way
        self._checksum = ""  # of the last publication
        self._publish: Publish | None = None  # of the current weights; None: engines were opened with them
        self._closing: set[asyncio.Task[None]] = set()
        self._open_another = open_another
        self._opening: set[asyncio.Task[None]] = set()  # replacements
        self._num_replaced = 0  # in this step
        self._missing: dict[int, str] = {}  # lost engines that were not replaced, by index
        for index, engine in enumerate(engines):
            self._join(PooledEngine(self, engine, index=index))

    @property
    def engines(self) -> dict[str, InferenceEngine]:
        """By name."""
        return {name: pooled.engine for name, pooled in self._engines.items()}

    @property
    def max_request_tokens(self) -> int:
        """The longest conversation that any engine holds, prompt included."""
        return max((engine.spec.longest for engine in self._engines.values()), default=0)

    @property
    def last_batch(self) -> BatchReport:
        """The report of the last batch. Raises `StropError` before the first."""
        if self._report is None:
            raise StropError("this engine pool has run no batch yet.")
        return self._report

    async def publish(self, publish: Publish, *, version: int) -> str:
        """Send the weights of `version`, which `publish` offers, to every engine, and return their checksum.

        Engines that cannot prove the weights are removed and replaced ("weights are proven").

        Raises:
            WeightsNotProven, EngineLost: no engine holds them, and no replacement does.
        """
        self._may_send.clear()
        async with self._sending:
            self._publish, self.policy_version, self._checksum, self._first_loss = publish, version, "", None
            try:
                failed = await self._send(publish, list(self._engines.values())) if self._engines else {}
            finally:
                self.oldest_version = version
        self._may_send.set()
        if self._batch is not None:  # which may last as long as its stage
            self._replace_missing()
        for engine, error in failed.items():
            if engine.name in self._engines:  # else the pool was closed in the meantime
                self.remove(engine, error)
        while not self._engines and self.is_replacing:
            await self.replacement_settled()
        self._check_not_empty()
        return self._checksum

    async def sleep(self) -> None:
        """Let all engines leave their devices to the trainer until the next publication.

        Raises:
            EngineLost: an engine did not. In its place none is opened, since there would be no memory for it.
        """
        engines = [pooled.engine for pooled in self._engines.values()]
        await asyncio.gather(*(engine.sleep() for engine in engines if isinstance(engine, SleepingEngine)))

    @asynccontextmanager
    async def batch(self, *, shared: bool = False) -> AsyncIterator[RolloutBatch]:
        """Run a batch of rollouts. Afterwards `last_batch` is its report.

        Args:
            shared: join the batch that runs if it is shared, too. `last_batch` is then of the time since the last one left.
                Shared batches wait for those that are not, and the other way round.

        Raises:
            EngineLost: there is no engine.
            StropError: another batch is running, and neither is shared.
        """
        async with self._turn:
            if shared:
                await self._turn.wait_for(lambda: self._batch is None or self._num_sharing > 0)
            else:
                await self._turn.wait_for(lambda: not self._is_shared)
                if self._batch is not None:
                    raise StropError("this engine pool is already running a batch. Run one batch at a time.")
            batch = self._batch or self._open_batch()
            self._is_shared, self._num_sharing = shared, self._num_sharing + shared
        try:
            yield batch
        finally:
            self._num_sharing -= shared
            if self._num_sharing:
                self._report = batch.report()
            else:
                await self._close_batch(batch)

    def _open_batch(self) -> RolloutBatch:
        self._may_send.set()  # weights do not change while they are sampled from
        self._replace_missing()
        self._check_not_empty()
        batch = RolloutBatch(self)
        for engine in self._engines.values():
            batch.join(engine)
        self._batch = batch
        return batch

    async def _close_batch(self, batch: RolloutBatch) -> None:
        if self._publish is not None:
            self._may_send.clear()  # the trainer may now change the weights
            async with self._sending:
                pass
        lost_before, self._lost_before = self._lost_before, []
        self._report = await batch.close(lost_before=tuple(lost_before))
        self._batch, self._is_shared = None, False
        async with self._turn:
            self._turn.notify_all()

    async def close(self) -> None:
        """Close every engine, and cancel replacements."""
        for engine in list(self._engines.values()):
            self._close_later(engine)
        self._open_another = None
        await end(list(self._opening))
        await asyncio.gather(*self._closing)

    def remove(self, engine: PooledEngine, error: EngineLost) -> None:
        """`engine` is lost. Repeated calls do nothing."""
        if engine.loss:
            return
        engine.remove(str(error))
        self._first_loss = self._first_loss or error
        logger.warning("%s is lost: %s", engine.name, engine.loss)
        self._observer.engine_lost(engine.name, reason=engine.loss)
        self._close_later(engine)
        self._replace(engine.name, engine.index)
        if self._batch is None:
            self._lost_before.append(engine.name)
        else:
            self._batch.engine_lost(engine)

    @property
    def is_replacing(self) -> bool:
        """Whether an engine is being opened in place of a lost one."""
        return bool(self._opening)

    async def replacement_settled(self) -> None:
        """Return when a replacement has joined or failed."""
        if self.is_replacing:
            await asyncio.wait(self._opening, return_when=asyncio.FIRST_COMPLETED)

    def _replace_missing(self) -> None:
        """A new step may replace engines again: first those that were lost before."""
        self._num_replaced = 0
        for index, lost in list(self._missing.items())[: self.config.max_replacements]:
            self._replace(lost, index)

    def _replace(self, lost: str, index: int) -> None:
        """Open another engine in place of `lost`, unless this step has done so too often."""
        if self._open_another is None:
            return
        if self._num_replaced >= self.config.max_replacements:
            self._missing[index] = lost
            self._not_replaced(
                lost, f"this step has replaced {self._num_replaced} engines already (scheduler.max_replacements)."
            )
            return
        self._missing.pop(index, None)
        self._num_replaced += 1
        task = asyncio.ensure_future(self._open(lost, index, self._open_another))
        self._opening.add(task)
        task.add_done_callback(self._settle)

    async def _open(self, lost: str, index: int, open_another: OpenEngine) -> None:
        pooled: PooledEngine | None = None
        try:
            async with asyncio.timeout(_OPEN_S):
                name = engine_name(index, self.num_generations[index] + 1)
                pooled = PooledEngine(self, await open_another(index, name), index=index)
            await self._admit(pooled, replaces=lost)
        except BaseException as error:
            if pooled is not None:
                await pooled.close()
            if not isinstance(error, Exception):
                raise
            reason = f"not open after {_OPEN_S:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            self._not_replaced(lost, reason)
            self._replace(lost, index)

    async def _admit(self, engine: PooledEngine, *, replaces: str) -> None:
        """Send the current weights to a new engine as soon as they may be sent, and let it join."""
        while True:
            await self._may_send.wait()
            async with self._sending:
                if not self._may_send.is_set():
                    continue
                if self._publish is not None and (failed := await self._send(self._publish, [engine])):
                    raise failed[engine]
                if (held := engine.engine.policy_version) != self.policy_version:
                    raise WeightsNotProven(f"it holds policy version {held}, not {self.policy_version}.")
                logger.info("%s replaces %s", engine.name, replaces)
                self._observer.engine_joined(engine.name, replaces=replaces)
                self._join(engine)
                return

    def _not_replaced(self, lost: str, reason: str) -> None:
        logger.warning("%s could not be replaced: %s", lost, reason)
        self._first_loss = self._first_loss or EngineLost(reason)
        self._observer.engine_not_replaced(lost, reason=reason)

    def _settle(self, done: asyncio.Task[None]) -> None:
        """A replacement has joined or failed."""
        self._opening.discard(done)
        if self._batch is not None:
            self._batch.check_engines()

    def _join(self, engine: PooledEngine) -> None:
        self.num_generations[engine.index] += 1
        self._engines[engine.name] = engine
        if self._batch is not None:
            self._batch.join(engine)

    async def _send(self, publish: Publish, engines: Sequence[PooledEngine]) -> dict[PooledEngine, EngineLost]:
        """Send the current weights. Return the engines that did not prove them, and why.

        Raises:
            WeightsNotProven: the weights differ from those that were published as this version before.
        """
        async with publish(engines[0].engine.capabilities) as publication:
            errors = await all_of([engine.load_weights(publication) for engine in engines])
            checksum = await publication.checksum()
        if self._checksum not in ("", checksum):
            raise WeightsNotProven(
                f"the trainer's weights were changed since version {self.policy_version} was published: their checksum is"
                f" {checksum}, and was {self._checksum}. An engine can join after the next publication."
            )
        self._checksum = checksum
        return {engine: error for engine, error in zip(engines, errors, strict=True) if error is not None}

    def _close_later(self, engine: PooledEngine) -> None:
        del self._engines[engine.name]
        task = asyncio.ensure_future(engine.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _check_not_empty(self) -> None:
        if self._engines or self.is_replacing:
            return
        kind = WeightsNotProven if isinstance(self._first_loss, WeightsNotProven) else EngineLost
        raise kind(f"no engine is left to sample from. {self._first_loss or ''} {RESUME}") from self._first_loss


class PooledEngine:
    """The `generation`-th engine that has had index `index` in its pool. It keeps its name for its whole life."""

    def __init__(self, pool: EnginePool, engine: InferenceEngine, *, index: int) -> None:
        self.engine, self.index, self.generation = engine, index, pool.num_generations[index] + 1
        self.name = engine_name(index, self.generation)
        self.spec = make_spec(self.name, engine)
        self.loss = ""  # why the engine was removed; empty while it is in use
        self._pool = pool
        self._running: set[asyncio.Task[Completion]] = set()

    @property
    def tolerated_tokens(self) -> int:
        """Tokens of a cached prefix that the engine may compute again without an eviction: the rest of a block."""
        has_slots = self.spec.block_tokens == self.spec.max_tokens
        return 1 if has_slots else self.spec.block_tokens

    async def complete(self, request: CompletionRequest, *, version: int, newest: Callable[[], int]) -> Completion:
        """Return a completion from the weights of `version` up to the `newest`.

        Raises:
            EngineLost: the engine died, hangs or failed, or its answer is invalid.
            EngineRemovedError: the engine was removed for another reason in the meantime.
        """
        if self.loss:
            raise EngineRemovedError(self.loss)
        asked = asyncio.ensure_future(self.engine.complete(request))
        self._running.add(asked)
        asked.add_done_callback(self._ended)
        try:
            await self._wait_for(asked, request)
            if self.loss:
                raise EngineRemovedError(self.loss)
            if asked.cancelled():
                raise EngineLost(f"{self.name} cancelled request {request.id}, which was not aborted.")
            completion = user_code.expect(asked.result(), Completion, self.engine.complete, what=self.name)
            check_completion(request, completion, vocab_size=None, policy_version=version, newest=newest())
        except StropError:
            raise
        except Exception as error:  # an engine that fails in any other way cannot be trusted either
            why = user_code.blame(error) or f"{type(error).__name__}: {error}"
            raise EngineLost(f"{self.name} failed: {why}") from error
        finally:
            asked.cancel()
        return completion

    async def _wait_for(self, asked: asyncio.Task[Completion], request: CompletionRequest) -> None:
        """Wait while the engine computes, for this request or for others. Raises `EngineLost` when it does not."""
        loop, within_s, seen, why = asyncio.get_running_loop(), self._pool.stall_timeout_s, -1, ""
        since_s = loop.time()
        while not (await asyncio.wait({asked}, timeout=within_s / _LOOKS))[0]:
            now = seen
            try:
                async with asyncio.timeout(within_s / _LOOKS):
                    now = await self.engine.progress()
            except (TimeoutError, MachineError) as error:
                why = f" {error}" if str(error) else ""
            if self.loss or asked.done():
                return
            if now != seen:
                seen, since_s = now, loop.time()
            elif loop.time() - since_s >= within_s:
                raise EngineLost(
                    f"it hangs: it has computed nothing for {within_s:g} s, while request {request.id} waits for it"
                    f" (engine.stall_timeout_s).{why}"
                )

    async def release(self, request_id: str) -> None:
        """Free the KV memory of a conversation. A failure shows again at the next completion, so it is only logged."""
        if self.loss:
            return
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self.engine.release(request_id)
        except (TimeoutError, MachineError, OSError) as error:
            logger.warning("%s did not release %s: %s", self.name, request_id, error or f"waited {_RELEASE_S:g} s")

    async def load_weights(self, publication: Publication) -> EngineLost | None:
        """Take weights. Return a failure of the engine; raise an error of the trainer."""
        within_s = self._pool.publish_deadline_s
        timeout = asyncio.timeout(within_s)
        try:
            async with timeout:
                await self.engine.load_weights(publication)
        except Exception as error:
            if publication.error is not None:
                raise publication.error from None
            if timeout.expired():
                return EngineLost(
                    f"it hangs: the weights of version {publication.version} were not taken within {within_s:g} s."
                )
            if isinstance(error, EngineLost):
                return error
            if isinstance(error, MachineError | MemoryError | OSError):
                return EngineLost(f"it could not take weights: {type(error).__name__}: {error}")
            raise
        return None

    def remove(self, reason: str) -> None:
        """End all running completions with `EngineRemovedError`."""
        self.loss = reason
        self._cancel()

    async def settle(self) -> None:
        """Cancel what still runs and wait a few seconds for it to end."""
        self._cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=_SETTLE_S)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.engine.close()
        except (MachineError, OSError) as error:  # TimeoutError is an OSError
            logger.warning("%s could not be closed: %s", self.name, error or f"waited {_CLOSE_S:g} s")

    def _ended(self, task: asyncio.Task[Completion]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not log the error of a task that nothing waits for

    def _cancel(self) -> None:
        for task in self._running:
            task.cancel()


def make_spec(name: str, engine: InferenceEngine) -> EngineSpec:
    """Return an engine's memory in blocks. A slot of fixed length, as in the embedded engine, is one block."""
    capacity, abilities = engine.capacity, engine.capabilities
    block_tokens = capacity.block_tokens
    if block_tokens is None:
        has_slots = capacity.total_tokens == capacity.max_running * capacity.max_request_tokens
        block_tokens = capacity.max_request_tokens if has_slots else min(_BLOCK_TOKENS, capacity.total_tokens)
    return EngineSpec(
        name=name,
        kv_blocks=capacity.total_tokens // block_tokens,
        block_tokens=block_tokens,
        max_conversations=capacity.max_running,
        max_tokens=capacity.max_request_tokens,
        keeps_rollouts=abilities.is_deterministic or abilities.takes_adapters,
    )


def engine_name(index: int, generation: int = 1) -> str:
    """`engine-1` is the first engine with index 1; `engine-1.2` replaces it, and `engine-1.3` replaces that."""
    return f"engine-{index}" if generation == 1 else f"engine-{index}.{generation}"
