"""One engine of a fleet: its memory as the scheduler counts it, the completions under way, and why it was given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from strop.engine.protocol import Capacity, CompletionRequest, InferenceEngine
from strop.engine.requests import check_completion
from strop.errors import DeadlineExceeded, EngineLost, StropError
from strop.rollout.fleet.pulse import Pulse
from strop.rollout.scheduling import EngineSpec
from strop.types import Completion

_BLOCK_TOKENS = 32  # of an engine that has no slots and does not say; small ones are rounded up, which is safe
_PATIENCE = 0.5  # of a deadline: an engine that answers somebody within it is slow and not hung
_SETTLE_S = 5.0  # how long an engine may take to notice that nobody waits for a completion any more


class GivenUpError(StropError):
    """The engine was given up while it was asked; the scheduler says where the turn is sampled again."""


def spec_of(name: str, capacity: Capacity, block_tokens: int | None) -> EngineSpec:
    """An engine's memory in blocks. Slots of a fixed length, as the embedded engine has, are blocks of that length."""
    if block_tokens is None:
        has_slots = capacity.total_tokens == capacity.max_running * capacity.max_request_tokens
        block_tokens = capacity.max_request_tokens if has_slots else min(_BLOCK_TOKENS, capacity.total_tokens)
    return EngineSpec(
        name=name,
        kv_blocks=capacity.total_tokens // block_tokens,
        block_tokens=block_tokens,
        max_conversations=capacity.max_running,
        max_tokens=capacity.max_request_tokens,
    )


class Member:
    """An engine under a name that no other engine of the fleet ever had."""

    def __init__(
        self,
        name: str,
        engine: InferenceEngine,
        *,
        place: int | None,
        block_tokens: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.place = place  # which of the engines that the fleet began with it is, or stands for
        self.engine = engine
        self.spec = spec_of(name, engine.capacity, block_tokens)
        self.loss = ""  # why it was given up; empty while it was not
        self.is_draining = False
        self._pulse = Pulse(name, engine, clock)
        self._asked: dict[asyncio.Future[Completion], asyncio.Task[Completion]] = {}
        self._let_go: set[asyncio.Task[Completion]] = set()

    @property
    def tolerated_tokens(self) -> int:
        """Of a prefix, how many an engine may compute again without having lost them: the rest of a block."""
        has_slots = self.spec.block_tokens == self.spec.max_tokens
        return 1 if has_slots else self.spec.block_tokens

    async def ask(self, request: CompletionRequest, *, version: int, deadline_s: float) -> Completion:
        """A completion from the weights of `version`.

        Raises:
            EngineLost: the engine died, hangs, broke, or what it answered cannot be true.
            DeadlineExceeded: this completion is not done, but the engine answers others, or would.
            GivenUpError: the engine was given up meanwhile.
        """
        if self.loss:
            raise GivenUpError(self.loss)
        try:
            completion = await self._answer(request, deadline_s)
            check_completion(request, completion, vocab_size=None, policy_version=version)
        except DeadlineExceeded as error:  # the engine's own, or ours
            await self._require_pulse(error, deadline_s)
            raise
        except StropError:
            raise
        except Exception as error:  # whatever it is, nobody may sample from an engine that does this
            raise EngineLost(f"engine {self.name} failed: {type(error).__name__}: {error}") from error
        if self.loss:  # as this answer came: the scheduler has the turn sampled again, and waits for that
            raise GivenUpError(self.loss)
        self._pulse.felt()
        return completion

    def give_up(self, reason: str) -> None:
        """Whoever waits for it waits no longer."""
        self.loss = reason
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(GivenUpError(reason))
        self._pulse.stop()

    async def settle(self) -> None:
        """Wait, but not long, until completions that nobody waits for have ended."""
        self._pulse.stop()
        if ending := {*self._let_go, *self._pulse.tasks}:
            await asyncio.wait(ending, timeout=_SETTLE_S)

    async def _answer(self, request: CompletionRequest, deadline_s: float) -> Completion:
        """What the engine says, or `DeadlineExceeded`; raises whatever the engine raises."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        asked = asyncio.ensure_future(self.engine.complete(request))
        asked.add_done_callback(partial(_hand_over, answer))
        self._asked[answer] = asked
        timer = asyncio.get_running_loop().call_later(deadline_s, self._miss, answer, request, deadline_s)
        try:
            return await answer
        finally:
            timer.cancel()
            del self._asked[answer]
            if not asked.done():
                asked.cancel()
                self._let_go.add(asked)
                asked.add_done_callback(self._let_go.discard)

    async def _require_pulse(self, error: DeadlineExceeded, deadline_s: float) -> None:
        """Raises `EngineLost` where the engine answers nobody; the completion that missed its deadline proves nothing alone."""
        within_s = _PATIENCE * deadline_s
        is_felt = await self._pulse.is_felt(within_s=within_s)
        if self.loss:
            raise GivenUpError(self.loss)
        if not is_felt:
            said = self._pulse.last_words or f"no answer within another {within_s:g} s"
            raise EngineLost(
                f"it hangs: {error} It answered nobody in the last {within_s:g} s, and then to a request of one token: {said}"
            ) from error

    def _miss(self, answer: asyncio.Future[Completion], request: CompletionRequest, deadline_s: float) -> None:
        if not answer.done():
            answer.set_exception(
                DeadlineExceeded(f"engine {self.name} did not complete request {request.id} within {deadline_s:g} s.")
            )


def _hand_over(answer: asyncio.Future[Completion], asked: asyncio.Task[Completion]) -> None:
    if asked.cancelled():
        if not answer.done():
            answer.set_exception(EngineLost("it cancelled a completion that nobody had aborted."))
        return
    error = asked.exception()
    if answer.done():
        return
    if error is None:
        answer.set_result(asked.result())
    else:
        answer.set_exception(error)
