"""A batch of rollouts on the engines of a pool. Each rollout has a `Lease`, which asks the engine that the scheduler chose."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from strop.engine.protocol import CompletionRequest, Probe
from strop.errors import EngineLost, MachineError, StropError
from strop.rollout.scheduler.report import BatchReport, EngineReport, Ledger
from strop.rollout.scheduler.scheduler import Action, CallTools, Release, Run, RunReason, make_scheduler
from strop.types import Completion, FinishReason, RolloutKey

if TYPE_CHECKING:
    from strop.rollout.scheduler.engine_pool import EnginePool, PooledEngine

_P = ParamSpec("_P")

RESUME = "Finished rollouts are saved. Run the same command to continue."


class EngineRemovedError(StropError):
    """The engine was lost while it sampled a completion. Another engine samples it again."""


class RolloutBatch:
    """Carries out the scheduler's actions and reports events to it. Everything happens in the thread of the event loop."""

    def __init__(self, pool: EnginePool) -> None:
        self.error: Exception | None = None  # that ended the batch
        self.engines: dict[str, PooledEngine] = {}  # all that ever joined
        self.leases: dict[RolloutKey, Lease] = {}
        self._pool = pool
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._clock()
        self._reported_s = 0.0  # until when, after the start
        self.scheduler = make_scheduler(pool.config)
        self._releasing: set[asyncio.Task[None]] = set()
        self._num_lost_over: Counter[str] = Counter()  # engines that were lost over a turn, by the id of its first request

    async def offer(self, key: RolloutKey, prompt: tuple[int, ...], *, max_tokens: int) -> Lease:
        """Return a lease for a rollout. Waits for replacements if no engine can hold it.

        Raises:
            RequestTooLong: no engine can ever hold it.
            EngineLost: no engine is left, and none is being opened.
        """
        while True:
            if self.error is not None:
                raise self.error
            try:
                if not self._pool.max_request_tokens:
                    raise EngineLost("no engine is left.")
                lease = self.leases[key] = Lease(self, key, num_unread=len(prompt))
                self.handle(self.scheduler.offered, key, prompt=prompt, prompt_tokens=len(prompt), max_tokens=max_tokens)
            except StropError:
                self.leases.pop(key, None)
                if not self._pool.is_replacing:
                    raise
                await self._pool.replacement_settled()
            else:
                return lease

    def handle(self, event: Callable[Concatenate[float, _P], list[Action]], *arguments: _P.args, **named: _P.kwargs) -> None:
        """Report an event to the scheduler, and carry out its actions."""
        for action in event(self._clock() - self._started_s, *arguments, **named):
            lease = self.leases[action.key]
            match action:
                case Run():
                    lease.run = action
                case CallTools():
                    lease.may_call_tools = True
                case Release():
                    lease.free_memory()
            lease.woken.set()

    def join(self, engine: PooledEngine) -> None:
        """Use another engine from now on."""
        self.engines[engine.name] = engine
        self.handle(self.scheduler.engine_joined, engine.spec)

    def engine_lost(self, engine: PooledEngine) -> None:
        """Continue the rollouts of a lost engine on other engines, from their last finished turn or piece of one."""
        try:
            self.handle(self.scheduler.engine_died, engine.name)
        except EngineLost as error:  # the policy cannot continue without it
            self._fail(error)
        self.check_engines()

    def check_engines(self) -> None:
        """End the batch if rollouts wait for an engine that will never join."""
        lost = [engine for engine in self.engines.values() if engine.loss]
        if not lost or self._pool.is_replacing or self.error is not None or not self.leases:
            return
        losses = "; ".join(f"{engine.name}: {engine.loss}" for engine in lost)
        if len(lost) == len(self.engines):
            self._fail(EngineLost(f"no engine is left to sample from. {losses} {RESUME}"))
        elif stranded := self.scheduler.stranded:
            self._fail(
                EngineLost(
                    f"{len(stranded)} rollouts (first: {stranded[0]}) are longer than any engine that is left can hold."
                    f" Lost engines: {losses} {RESUME}"
                )
            )

    def _fail(self, error: Exception) -> None:
        """End the batch: everything that waits raises `error`."""
        self.error = error
        for lease in self.leases.values():
            lease.woken.set()

    async def close(self, *, lost_before: tuple[str, ...]) -> BatchReport:
        """End all rollouts, wait for the engines to free their memory, and return the last report of the batch."""
        for lease in list(self.leases.values()):
            lease.close()
        report = self.report(lost_before=lost_before)
        await asyncio.gather(*(engine.settle() for engine in self.engines.values()), *self._releasing)
        return report

    def report(self, *, lost_before: tuple[str, ...] = ()) -> BatchReport:
        """Return what happened since the last report, and begin another one."""
        scheduler, start_s, ended_s = self.scheduler, self._reported_s, self._clock() - self._started_s
        engines = sorted(self.engines.values(), key=lambda engine: (engine.index, engine.generation))
        present = [each for each in engines if (left := scheduler.usage[each.name].left_s) is None or left >= start_s]
        report = BatchReport(
            policy=self._pool.config.policy,
            duration_s=ended_s - start_s,
            engines=tuple(self._report(engine, start_s, ended_s) for engine in present),
            ledger=scheduler.ledger,
            queue=scheduler.queue_length.since(start_s),
            lost_before=lost_before,
        )
        self._reported_s, scheduler.ledger = ended_s, Ledger()
        for usage in scheduler.usage.values():
            usage.rows.forget()
            usage.kv_share.forget()
        scheduler.queue_length.forget()
        return report

    def _report(self, engine: PooledEngine, start_s: float, ended_s: float) -> EngineReport:
        usage = self.scheduler.usage[engine.name].since(start_s)
        left_s = ended_s - start_s if usage.left_s is None else usage.left_s
        usage.record(left_s, 0, 0.0)
        return EngineReport(spec=engine.spec, usage=usage, left_s=left_s, loss=engine.loss)

    # For leases.

    async def complete(self, engine: PooledEngine, request: CompletionRequest, *, turn: str) -> Completion:
        """Ask an engine for a completion: a turn, or a piece of the one whose first request has the id `turn`.

        Raises:
            EngineRemovedError: the engine was lost over this request or another one.
            MachineError: several engines were lost over this turn, so no other engine is asked.
        """
        pool = self._pool
        # One engine may fail by chance. More may, where more can be replaced.
        if (num_lost := self._num_lost_over[turn]) >= max(2, self._pool.config.max_replacements):
            raise MachineError(f"{num_lost} engines were lost over request {turn}; no other engine is asked.")
        try:
            completion = await engine.complete(request, version=pool.oldest_version, newest=lambda: pool.policy_version)
        except EngineLost as error:
            if not engine.loss:
                self._num_lost_over[turn] += 1
            self._pool.remove(engine, error)
            raise EngineRemovedError(str(error)) from error
        return completion

    def free_memory(self, engine: PooledEngine, request_id: str) -> None:
        """Free the KV memory of a conversation in the background."""
        task = asyncio.ensure_future(engine.release(request_id))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)


class _Once:
    """Tells a probe of the first entropies that come: another engine may sample the turn again."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._is_done = False
        self._error: Exception | None = None  # of the probe, which an engine tells where nothing could catch it
        self.probe = Probe(num_tokens=probe.num_tokens, tell=self.tell)

    def tell(self, entropies: tuple[float, ...]) -> None:
        if not self._is_done:
            self._is_done = True
            try:
                self._probe.tell(entropies[: self._probe.num_tokens])
            except Exception as error:  # noqa: BLE001 - `finish` raises it
                self._error = error

    def finish(self, entropies: tuple[float, ...]) -> None:
        """Tell of a completion that has ended. Raises what the probe raised."""
        self.tell(entropies)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Tell nothing from now on."""
        self._is_done = True


def _rest(request: CompletionRequest, piece: Completion, *, turn: str) -> CompletionRequest:
    """What is left of `request`, of the turn with the id `turn`, after its first `piece`."""
    num, num_before = len(piece.ids), request.num_before + len(piece.ids)
    return replace(
        request,
        id=f"{turn}+{num_before}",
        ids=(*request.ids, *piece.ids),
        max_tokens=request.max_tokens - num,
        min_tokens=max(0, request.min_tokens - num),
        num_before=num_before,
    )


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A request whose cached context the next request may extend."""

    engine: PooledEngine
    request_id: str
    is_own: bool  # whether the lease frees this memory; a new branch extends its parent's


class Lease:
    """One rollout's right to engines: waits until the scheduler grants an engine, and asks another one if that is lost.

    `RolloutBatch.offer` makes it. Call `close` however the rollout ends.
    """

    def __init__(self, batch: RolloutBatch, key: RolloutKey, *, num_unread: int) -> None:
        self.key = key
        self.num_unread = num_unread  # tokens that the next completion reads first; 0 while none is requested or waited for
        self.generated_tokens = self.prefilled_tokens = 0  # of its turns, without what was in the cache
        self.num_tokens = 0  # of the newest request and its completion, which the engine has computed
        self.run: Run | None = None  # the next turn's, once an engine is granted
        self.may_call_tools = False
        self.woken = asyncio.Event()
        self.is_independent = asyncio.Event()  # set when a branch needs nothing more of its parent's memory
        self._batch = batch
        self._prefix: _Prefix | None = None

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample the next turn of the rollout. Returns when its tools may be called. Sets `extends` and `at` of the request.

        Where there are several engines, a turn is sampled a piece at a time, and the rollout may move after each; one with a
        probe or stop strings, which may lie across two pieces, is sampled at once. If an engine is lost, another one samples
        what that had begun again from the same seed. The probe of the request is called once, with all entropies if there
        are fewer; `branch` then forks before the completion.

        Raises:
            EngineLost: no engine is left.
            MachineError: several engines were lost over this turn.
        """
        if request.probe is None:
            return await self._complete(request, None)
        once = _Once(request.probe)
        try:
            return await self._complete(replace(request, probe=once.probe), once)
        finally:
            once.close()

    async def _complete(self, request: CompletionRequest, once: _Once | None) -> Completion:
        batch, scheduler, rest, pieces = self._batch, self._batch.scheduler, request, list[Completion]()
        has_pieces = request.probe is None and not request.stop_strings
        while True:
            run, completion, recomputed = await self._ask(rest, turn=request.id, has_pieces=has_pieces)
            pieces.append(completion)
            num = len(completion.ids)
            if completion.finish_reason is not FinishReason.LENGTH or num == rest.max_tokens:
                break
            rest = _rest(rest, completion, turn=request.id)
            self.num_tokens = len(rest.ids)
            batch.handle(scheduler.piece_finished, self.key, run=run.run, num_tokens=num, recomputed_tokens=recomputed)
        completion = Completion.joined(pieces)
        scheduler.ledger.count(request, completion)
        self.generated_tokens += len(completion.ids)
        self.prefilled_tokens += len(request.ids) - completion.cached_tokens
        if once is not None:
            once.finish(tuple(completion.entropies))
        self.num_tokens, self.num_unread = len(rest.ids) + num, 0
        if scheduler.is_crowded(run.engine):
            self.free_memory()
        self.may_call_tools = False
        batch.handle(scheduler.turn_finished, self.key, run=run.run, num_tokens=num, recomputed_tokens=recomputed)
        while not self.may_call_tools:
            await self._wait()
        batch.handle(scheduler.tool_started, self.key)
        return completion

    async def _ask(self, request: CompletionRequest, *, turn: str, has_pieces: bool) -> tuple[Run, Completion, int]:
        """One completion of the engine that is granted, and how many tokens of its context were computed a second time."""
        batch = self._batch
        while True:
            while self.run is None:
                await self._wait()
            run, self.run = self.run, None
            engine = batch.engines[run.engine]
            extended, before, num_known = request, self._prefix, self.num_tokens
            if has_pieces and run.max_tokens < request.max_tokens:
                num = run.max_tokens
                extended = replace(request, max_tokens=num, min_tokens=min(request.min_tokens, num))
            if before is not None and before.engine is engine:
                extended = replace(extended, extends=before.request_id, at=num_known)
            self._prefix, self.num_tokens = _Prefix(engine, request.id, is_own=True), len(request.ids)
            try:
                completion = await batch.complete(engine, extended, turn=turn)
            except EngineRemovedError:
                self._prefix = None
                self.is_independent.set()
            except BaseException:
                self._release(before)  # the engine may not have accepted the request
                raise
            else:
                break
        self.is_independent.set()
        recomputed, ledger = 0, batch.scheduler.ledger
        missing = num_known - 1 - completion.cached_tokens  # the last id that was sampled is never in the cache yet
        if run.reason is RunReason.CONTINUE and missing > engine.tolerated_tokens:
            recomputed = missing
            ledger.evictions += 1
        if run.reason is RunReason.BRANCH:
            ledger.branch_tokens += num_known - 1
            ledger.branch_cached_tokens += min(num_known - 1, completion.cached_tokens)
        return run, completion, recomputed

    def observed(self, num_tokens: int) -> None:
        """The tools have answered with `num_tokens` tokens, and the rollout continues."""
        self.num_unread = num_tokens + 1  # the last id that was sampled is not in the cache yet
        self._batch.handle(self._batch.scheduler.tool_finished, self.key, num_tokens=num_tokens)
        self._batch.check_engines()  # the engine may have been lost while the tools ran

    def branch(self, key: RolloutKey, *, max_tokens: int) -> Lease:
        """Fork the rollout after its newest observation or completion. The branch waits if its engine has no room for it."""
        batch = self._batch
        branch = batch.leases[key] = Lease(batch, key, num_unread=1)
        branch.num_tokens = self.num_tokens
        branch._prefix = None if self._prefix is None else replace(self._prefix, is_own=False)
        batch.handle(batch.scheduler.branch_requested, key, parent=self.key, max_tokens=max_tokens)
        return branch

    def close(self) -> None:
        """End the rollout and free its memory. Repeated calls do nothing."""
        batch, self.num_unread = self._batch, 0
        if batch.leases.get(self.key) is self:
            batch.handle(batch.scheduler.ended, self.key)
            self.free_memory()
            self.is_independent.set()
            del batch.leases[self.key]

    def free_memory(self) -> None:
        """Free the KV memory of the conversation; the next turn computes its context again."""
        self._release(self._prefix)
        self._prefix = None

    def _release(self, prefix: _Prefix | None) -> None:
        if prefix is not None and prefix.is_own:
            self._batch.free_memory(prefix.engine, prefix.request_id)

    async def _wait(self) -> None:
        if self._batch.error is None:
            self.woken.clear()
            await self.woken.wait()
        if self._batch.error is not None:
            raise self._batch.error
