"""The supervisor in its process, as a `CodeNode` of this process: its calls go over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from strop.errors import LinkBroken, MachineError, NodeGone, NodeLost, SessionLost, StropError, UserError
from strop.sandbox.link import (
    Answer,
    Call,
    Cancel,
    Channel,
    CloseSession,
    Failed,
    Failure,
    ForkSession,
    Hello,
    Judged,
    JudgedAll,
    LinkTiming,
    Message,
    OpenSession,
    Ping,
    Ran,
    Run,
    SessionIs,
    Slots,
    Verify,
)
from strop.sandbox.protocol import (
    CodeNode,
    PairVerdict,
    RunOutcome,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
)

_START_S = 120.0  # imports, fork servers and a self-test, on a machine that may be busy

_AnswerT = TypeVar("_AnswerT", Ran, SessionIs)
_EXCEPTIONS: dict[Failure, type[StropError]] = {
    Failure.NODE: NodeLost,
    Failure.MACHINE: MachineError,
    Failure.SESSION: SessionLost,
    Failure.REQUEST: UserError,
}


class NodeProcess(CodeNode):
    """A node in another process, at the other end of a link. When the link ends, every call in flight raises `NodeLost`."""

    def __init__(self, channel: Channel, hello: Hello, name: str, also_close: Callable[[], Awaitable[None]] | None) -> None:
        self.name = name
        self.level = hello.level
        self.num_slots = hello.num_slots
        self._channel = channel
        self._also_close = also_close
        self._last_call = 0
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._judging: dict[int, asyncio.Queue[Judged | JudgedAll | Exception]] = {}
        loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[str] = loop.create_future()
        self._pump = loop.create_task(self._run_pump(), name="link to the supervisor")

    @classmethod
    async def connect(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        name: str,
        *,
        timing: LinkTiming | None = None,
        also_close: Callable[[], Awaitable[None]] | None = None,
    ) -> NodeProcess:
        """Wait until the node is ready.

        Args:
            also_close: ends its process, after the link.

        Raises:
            LinkBroken: it ended, or was not ready in time. The connection is closed.
        """
        channel = Channel(reader, writer, timing or LinkTiming())
        try:
            hello = await channel.first(within_s=_START_S)
            if not isinstance(hello, Hello):
                raise LinkBroken(f"the first message was {hello.kind!r}, not 'hello'")
        except BaseException:
            channel.close()
            raise
        return cls(channel, hello, name, also_close)

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    async def run(self, request: RunRequest) -> RunResult:
        call = self._next_call()
        try:
            return (await self._ask(Run(call=call, request=request), Ran)).result
        except UserError as error:
            return RunResult.not_run(RunOutcome.REJECTED, str(error), level=self.level)

    async def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        call = self._next_call()
        self._send(Verify(call=call, request=request))
        answers = self._judging[call] = asyncio.Queue()
        is_open = True
        try:
            while isinstance(answer := await answers.get(), Judged):
                yield answer.index, answer.verdict
            is_open = False
            if isinstance(answer, Exception):
                raise answer
        finally:
            self._judging.pop(call, None)
            if is_open:
                self._channel.send(Cancel(call=call))

    async def open_session(self, limits: SessionLimits) -> str:
        return (await self._ask(OpenSession(call=self._next_call(), limits=limits), SessionIs)).session

    async def fork_session(self, session: str) -> str:
        return (await self._ask(ForkSession(call=self._next_call(), session=session), SessionIs)).session

    async def close_session(self, session: str) -> None:
        if self.is_lost:
            return  # and its sessions with it
        with contextlib.suppress(NodeLost):
            await self._ask(CloseSession(call=self._next_call(), session=session), SessionIs)

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Close the link; the node ends its programs then."""
        self._lose("the link was closed")
        self._channel.close()
        self._pump.cancel()
        await asyncio.wait({self._pump})
        if self._also_close is not None:
            await self._also_close()

    def _next_call(self) -> int:
        self._last_call += 1
        return self._last_call

    def _send(self, message: Call) -> None:
        if self._lost.done():
            raise NodeGone(f"the supervisor is gone: {self._lost.result()}")
        try:
            self._channel.send(message)
        except ValueError as error:
            raise UserError(f"the request cannot be sent: {error}") from error

    async def _ask(self, message: Call, expected: type[_AnswerT]) -> _AnswerT:
        self._send(message)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited[message.call] = future
        try:
            answer = await future
        except asyncio.CancelledError:
            # After this, an answer with this number is dropped.
            if self._awaited.pop(message.call, None) is not None:
                self._channel.send(Cancel(call=message.call))
            raise
        if not isinstance(answer, expected):
            self._channel.break_off(f"{message.kind!r} was answered with {answer.kind!r}")
            raise NodeLost(f"the supervisor answered {message.kind!r} with {answer.kind!r}; its link was closed")
        return answer

    async def _run_pump(self) -> None:
        try:
            await self._channel.pump(self._on_message)
        except LinkBroken as error:
            self._lose(str(error))
        except asyncio.CancelledError:
            self._lose("the link was closed")
            raise

    def _on_message(self, message: Message) -> None:
        match message:
            case Ran() | SessionIs() | Failed() | JudgedAll() | Judged():
                self._on_answer(message)
            case Ping():
                pass
            case Slots(num_slots=num_slots):
                self.num_slots = num_slots
            case _:
                raise LinkBroken(f"a node does not say {message.kind!r}")

    def _on_answer(self, answer: Answer) -> None:
        if (future := self._awaited.pop(answer.call, None)) is not None:
            if future.done():
                return  # its call was cancelled
            if isinstance(answer, Failed):
                future.set_exception(_EXCEPTIONS[answer.failure](answer.reason))
            else:
                future.set_result(answer)
        elif (judging := self._judging.get(answer.call)) is not None:
            if isinstance(answer, Ran | SessionIs):
                raise LinkBroken(f"'verify' was answered with {answer.kind!r}")
            judging.put_nowait(_EXCEPTIONS[answer.failure](answer.reason) if isinstance(answer, Failed) else answer)
        elif not 0 < answer.call <= self._last_call:  # else its call was cancelled
            raise LinkBroken(f"an answer came for call {answer.call}, which was never made")

    def _lose(self, reason: str) -> None:
        if self._lost.done():
            return
        self._lost.set_result(reason)
        awaited, self._awaited = self._awaited, {}
        for future in awaited.values():
            if not future.done():
                future.set_exception(NodeLost(f"the supervisor was lost with the call in flight: {reason}"))
        for judging in self._judging.values():
            judging.put_nowait(NodeLost(f"the supervisor was lost while it compared answers: {reason}"))
