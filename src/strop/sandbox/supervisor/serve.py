"""The supervisor's end of the link: answers the calls of its parent with a `CodeNode`."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from strop.errors import LinkBroken, MachineError, NodeLost, SessionLost, UserError
from strop.sandbox.link import (
    SUPERVISOR_TIMING,
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
from strop.sandbox.protocol import CodeNode

_NUM_BUSY = 16  # open calls from which on an answer waits a moment, so that several leave in one write
_GATHER_S = 0.003
_SLOTS_S = 0.05  # how often the number of slots is looked at

_log = logging.getLogger(__name__)


async def serve_node(
    node: CodeNode, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, timing: LinkTiming = SUPERVISOR_TIMING
) -> None:
    """Answer the calls of the parent at the other end until it hangs up.

    On every way out the link is closed, every call that came through it is cancelled, and its sessions are closed. The node
    itself is not.

    Raises:
        LinkBroken: the parent is gone, or sent an invalid message.
    """
    channel = Channel(reader, writer, timing)
    try:
        channel.send(Hello(level=node.level, num_slots=node.num_slots))
        await _NodeSide(node, channel).serve()
    finally:
        channel.close()


class _NodeSide:
    """The calls of one link, as tasks by their number."""

    def __init__(self, node: CodeNode, channel: Channel) -> None:
        self._node = node
        self._channel = channel
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sessions: set[str] = set()

    async def serve(self) -> None:
        announcing = asyncio.create_task(self._announce_slots())
        try:
            await self._channel.pump(self._on_message)
        finally:
            tasks = {announcing, *self._tasks.values()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for session in self._sessions:
                with contextlib.suppress(MachineError):  # a node that is going down has closed it already
                    await self._node.close_session(session)

    async def _announce_slots(self) -> None:
        announced = self._node.num_slots
        while True:
            await asyncio.sleep(_SLOTS_S)
            if self._node.num_slots != announced:
                announced = self._node.num_slots
                self._channel.send(Slots(num_slots=announced))

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
            case _:
                raise LinkBroken(f"a parent does not send {message.kind!r}")

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
            _log.exception("unexpected error in a call")
            answer = self._failed(call, Failure.MACHINE, f"{type(error).__name__} in the supervisor: {error}")
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
