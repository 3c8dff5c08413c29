"""The node's end of a link: answers the calls of a front with a `CodeNode`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from strop.errors import LinkBroken, MachineError, NodeLost, SessionLost, UserError
from strop.sandbox.link import (
    LOCAL_NODE_TIMING,
    NODE_TIMING,
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
from strop.sandbox.protocol import CodeNode

_NUM_BUSY = 16  # open calls from which on an answer waits a moment, so that several leave in one write
_GATHER_S = 0.003
_SLOTS_S = 0.05  # how often the number of slots is looked at

_log = logging.getLogger(__name__)


async def serve_node(
    node: CodeNode,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    token: str = "",
    timing: LinkTiming | None = None,
    draining: asyncio.Event | None = None,
) -> str:
    """Answer the calls of the front at the other end until it says goodbye, and return what it said.

    On every way out the link is closed, every call that came through it is cancelled, and its sessions are closed. The node
    itself is not.

    Args:
        draining: once set, the front sends nothing new, and says goodbye when the rest is done.

    Raises:
        UserError: the front refused this node: another protocol, or a wrong token.
        LinkBroken: the front is gone, or sent an invalid message.
        NodeLost: the node itself is gone; the front knows it.
    """
    is_local = writer.get_extra_info("socket").family == socket.AF_UNIX
    channel = Channel(reader, writer, timing or (LOCAL_NODE_TIMING if is_local else NODE_TIMING))
    try:
        channel.send(Hello(protocol=PROTOCOL_VERSION, token=token, name=node.name, level=node.level, num_slots=node.num_slots))
        welcome = await channel.first()
        if isinstance(welcome, Refusal):
            raise UserError(f"the front refused this node: {welcome.reason}.")
        if not isinstance(welcome, Welcome):
            raise LinkBroken(f"the front answered 'hello' with {welcome.kind!r}")
        if not is_local:
            host, port, *_ = writer.get_extra_info("peername")
            _log.info("joined %s:%d as %s (L%d)", host, port, node.name, node.level.rank)
        return await _NodeSide(node, channel).serve(draining)
    finally:
        channel.close()


class _NodeSide:
    """The calls of one link, as tasks by their number."""

    def __init__(self, node: CodeNode, channel: Channel) -> None:
        self._node = node
        self._channel = channel
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sessions: set[str] = set()
        self._goodbye = ""

    async def serve(self, draining: asyncio.Event | None) -> str:
        pump = asyncio.create_task(self._channel.pump(self._on_message))
        lost = asyncio.create_task(self._node.wait_lost())
        helpers = {pump, lost, asyncio.create_task(self._announce_slots())}
        if draining is not None:
            helpers.add(asyncio.create_task(self._announce_draining(draining)))
        try:
            await asyncio.wait({pump, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                self._channel.send(Goodbye(reason=lost.result()))
                raise NodeLost(f"node {self._node.name!r} is gone: {lost.result()}")
            try:
                pump.result()
            except LinkBroken:
                if self._goodbye:
                    return self._goodbye
                raise
        finally:
            for task in (*helpers, *self._tasks.values()):
                task.cancel()
            await asyncio.wait({*helpers, *self._tasks.values()})
            for session in self._sessions:
                with contextlib.suppress(MachineError):  # a node that is going down has closed it already
                    await self._node.close_session(session)
        raise AssertionError("a pump ends by raising")

    async def _announce_slots(self) -> None:
        announced = self._node.num_slots
        while True:
            await asyncio.sleep(_SLOTS_S)
            if self._node.num_slots != announced:
                announced = self._node.num_slots
                self._channel.send(Slots(num_slots=announced))

    async def _announce_draining(self, draining: asyncio.Event) -> None:
        await draining.wait()
        self._channel.send(Draining())

    def _on_message(self, message: Message) -> None:
        match message:
            case Run() | Verify() | OpenSession() | ForkSession() | CloseSession():
                if message.call in self._tasks:
                    raise LinkBroken(f"call {message.call} came twice")
                self._tasks[message.call] = asyncio.create_task(self._answer(message))
            case Cancel(call=call):
                if task := self._tasks.get(call):
                    task.cancel()
            case Ping():
                pass
            case Goodbye(reason=reason):
                self._goodbye = reason
                raise LinkBroken(f"the front said goodbye: {reason}")
            case _:
                raise LinkBroken(f"a front does not send {message.kind!r}")

    async def _answer(self, message: Call) -> None:
        call = message.call
        try:
            answer = await self._do(message)
        except SessionLost as error:
            answer = self._failed(call, Failure.SESSION, str(error))
        except NodeLost as error:
            answer = self._failed(call, Failure.NODE, str(error))
        except MachineError as error:
            answer = self._failed(call, Failure.MACHINE, str(error))
        except UserError as error:
            answer = self._failed(call, Failure.REQUEST, str(error))
        except Exception as error:  # noqa: BLE001 - every call needs an answer
            _log.exception("unexpected error in a call to node %r", self._node.name)
            answer = self._failed(call, Failure.MACHINE, f"{type(error).__name__} in the node: {error}")
        finally:
            self._tasks.pop(call, None)
        try:
            self._channel.send(answer, within_s=_GATHER_S if len(self._tasks) >= _NUM_BUSY else 0.0)
        except ValueError as error:
            self._channel.send(self._failed(call, Failure.MACHINE, f"the answer cannot be sent: {error}"))

    async def _do(self, message: Call) -> Answer:
        call = message.call
        match message:
            case Run(request=request):
                return Ran(call=call, result=await self._node.run(request))
            case Verify(request=pairs):
                async for index, verdict in self._node.verify(pairs):
                    self._channel.send(Judged(call=call, index=index, verdict=verdict))
                return JudgedAll(call=call)
            case OpenSession(limits=limits):
                session = await self._node.open_session(limits)
                self._sessions.add(session)
                return SessionIs(call=call, session=session)
            case ForkSession(session=origin):
                session = await self._node.fork_session(origin)
                self._sessions.add(session)
                return SessionIs(call=call, session=session)
            case CloseSession(session=session):
                self._sessions.discard(session)
                await self._node.close_session(session)
                return SessionIs(call=call, session=session)

    @staticmethod
    def _failed(call: int, failure: Failure, reason: str) -> Failed:
        return Failed(call=call, failure=failure, reason=reason.encode("utf-8", "backslashreplace").decode()[:4096])
