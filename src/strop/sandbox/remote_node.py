"""The front's end of a link: a node that lives in another process, perhaps on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self, TypeVar

from strop.errors import LinkBroken, MachineError, NodeGone, NodeLost, SessionLost, StropError, UserError
from strop.sandbox.link import (
    PROTOCOL_VERSION,
    Answer,
    Call,
    Cancel,
    Channel,
    CloseSession,
    Draining,
    Failed,
    Failure,
    ForkSession,
    Goodbye,
    Hello,
    Judged,
    JudgedAll,
    LinkTiming,
    Message,
    OpenSession,
    Ping,
    Ran,
    Refusal,
    Run,
    SessionIs,
    Slots,
    Verify,
    Welcome,
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

_AnswerT = TypeVar("_AnswerT", Ran, SessionIs)
_EXCEPTIONS: dict[Failure, type[StropError]] = {
    Failure.NODE: NodeLost,
    Failure.MACHINE: MachineError,
    Failure.SESSION: SessionLost,
    Failure.REQUEST: UserError,
}


class RemoteNode(CodeNode):
    """The front's side of a link; created by `accept`. When the link ends, every call in flight raises `NodeLost`."""

    def __init__(self, channel: Channel, hello: Hello, also_close: Callable[[], Awaitable[None]] | None) -> None:
        self.name = hello.name
        self.level = hello.level
        self.num_slots = hello.num_slots
        self._channel = channel
        self._also_close = also_close
        self._last_call = 0
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._judging: dict[int, asyncio.Queue[Judged | JudgedAll | Exception]] = {}
        loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[str] = loop.create_future()
        self._draining: asyncio.Future[bool] = loop.create_future()
        self._pump = loop.create_task(self._run_pump(), name=f"link to {self.name}")

    @classmethod
    async def accept(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        token: str = "",
        timing: LinkTiming | None = None,
        also_close: Callable[[], Awaitable[None]] | None = None,
    ) -> Self:
        """Complete the handshake with a node that has just connected.

        Args:
            token: what the node has to know; empty for a socket pair, which has no other end than ours.
            also_close: what else ends with it, after the link: its process, where that is ours.

        Raises:
            LinkBroken: it is no node, not of this protocol, or does not know the token. The connection is closed.
        """
        channel = Channel(reader, writer, timing or LinkTiming())
        try:
            hello = await channel.first()
            if not isinstance(hello, Hello):
                raise LinkBroken(f"the first message was {hello.kind!r}, not 'hello'")
            refusal = ""
            if hello.protocol != PROTOCOL_VERSION:
                refusal = (
                    f"node {hello.name!r} speaks protocol {hello.protocol}, this front {PROTOCOL_VERSION}; update the older"
                )
            elif not hmac.compare_digest(hello.token.encode(), token.encode()):
                refusal = f"node {hello.name!r} has not the token of this front"
            if refusal:
                channel.send(Refusal(reason=refusal))
                raise LinkBroken(refusal)
        except BaseException:
            channel.close()
            raise
        channel.send(Welcome())
        return cls(channel, hello, also_close)

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

    async def wait_draining(self) -> bool:
        """True when the node asks for no more work and finishes what it has; False if it was lost first."""
        return await asyncio.shield(self._draining)

    async def close(self) -> None:
        """Close the link; the node ends its programs then."""
        if not self.is_lost:
            self._channel.send(Goodbye(reason="the front let it go"))
        self._lose("the front closed the link")
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
            raise NodeGone(f"node {self.name!r} is gone: {self._lost.result()}")
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
            raise NodeLost(f"node {self.name!r} answered {message.kind!r} with {answer.kind!r}; its link was closed")
        return answer

    async def _run_pump(self) -> None:
        try:
            await self._channel.pump(self._on_message)
        except LinkBroken as error:
            self._lose(str(error))
        except asyncio.CancelledError:
            self._lose("the front closed the link")
            raise

    def _on_message(self, message: Message) -> None:
        match message:
            case Ran() | SessionIs() | Failed() | JudgedAll() | Judged():
                self._on_answer(message)
            case Ping():
                pass
            case Slots(num_slots=num_slots):
                self.num_slots = num_slots
            case Draining():
                if not self._draining.done():
                    self._draining.set_result(True)
            case Goodbye(reason=reason):
                raise LinkBroken(f"it said goodbye: {reason}")
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
        if not self._draining.done():
            self._draining.set_result(False)
        awaited, self._awaited = self._awaited, {}
        for future in awaited.values():
            if not future.done():
                future.set_exception(NodeLost(f"node {self.name!r} was lost with the call in flight: {reason}"))
        for judging in self._judging.values():
            judging.put_nowait(NodeLost(f"node {self.name!r} was lost while it compared answers: {reason}"))
