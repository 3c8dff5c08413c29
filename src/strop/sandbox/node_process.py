"""Starts the supervisor in a process of its own, and calls it over a link: messages over a socket pair.

    sandbox -> supervisor   (number of the call, method of the node, its argument); (number, "cancel", None)
    supervisor -> sandbox   (number, answer, is_last); an answer is a value, or the exception that the method raised
                            (0, event, False); an event is a `NodeStatus`, a `LogLine`, or why the node does not start

A frame is four bytes of length, then a pickle. Both ends run code of strop for the same user, and no program can reach the
socket, so pickles are safe here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, cast

from strop.errors import MachineError, NodeGone, NodeLost, UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.protocol import CodeNode, IsolationLevel, PairVerdict, RunRequest, RunResult, SessionLimits, VerifyRequest

_log = logging.getLogger(__name__)

HEARTBEAT_S = 0.4  # a supervisor sends its status at least this often
_START_S = 120.0  # imports, fork servers and a self-test, on a machine that may be busy
_LOOK_S, _NUM_SILENT = HEARTBEAT_S / 2, 7  # a supervisor is lost after so many looks without a message: within 1.6 s
_END_S = 5.0  # for its programs to end; then the supervisor is killed
# A supervisor needs no other variables, and cannot leak what it does not have.
_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "STROP_LOG")

Spawn = Callable[[SandboxConfig, str], Awaitable[CodeNode]]
_HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Sent when the node is ready, when its number of slots changes, and as a sign of life."""

    level: IsolationLevel
    num_slots: int


@dataclass(frozen=True, slots=True)
class LogLine:
    level: int
    text: str


class Link(asyncio.Protocol):
    """One end. Belongs to the running event loop.

    Args:
        on_message: called with each message.
        on_lost: called once with the reason, when the link has ended.
    """

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._outgoing: list[bytes] = []
        self.num_heard = 0  # parts of messages

    @classmethod
    async def open(cls, connection: socket.socket, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> Self:
        _, link = await asyncio.get_running_loop().create_connection(lambda: cls(on_message, on_lost), sock=connection)
        return link

    def send(self, message: object, *, within_s: float = 0.0) -> None:
        """Queue it; the messages of one turn of the event loop, or of `within_s`, leave in one write."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self._outgoing:
            self._loop.call_later(within_s, self._flush)
        self._outgoing += (_HEADER.pack(len(body)), body)

    def close(self) -> None:
        """Send what is queued, then hang up. Safe to call twice."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Hang up now."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.num_heard += 1
        self._received += data
        start = 0
        while len(self._received) >= start + _HEADER.size:
            (length,) = _HEADER.unpack_from(self._received, start)
            body_at = start + _HEADER.size
            if len(self._received) < body_at + length:
                break
            self._on_message(pickle.loads(self._received[body_at : body_at + length]))
            start = body_at + length
        del self._received[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost("the peer hung up" if error is None else f"the connection failed: {error}")

    def _flush(self) -> None:
        if self._outgoing and self._transport is not None:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()


async def spawn_node(config: SandboxConfig, name: str) -> CodeNode:
    """Return a supervisor that works. It ends with its link, so it never outlives this process.

    Raises:
        UserError: this machine cannot give what `config` asks for; the message comes from the supervisor.
        MachineError: it did not start for another reason.
    """
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "strop.sandbox.supervisor.node"),
            *(str(theirs.fileno()), name, config.model_dump_json()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env={key: os.environ[key] for key in _KEPT_ENVIRONMENT if key in os.environ},
            start_new_session=True,  # Ctrl-C reaches only this process, which ends its supervisor in order
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return await NodeProcess.connect(ours, name, process=process)


class NodeProcess(CodeNode):
    """The node at the other end of a link. When the link ends or falls silent, every call in flight raises `NodeLost`."""

    level: IsolationLevel  # this and `num_slots` are known when `connect` returns

    def __init__(self, name: str, process: asyncio.subprocess.Process | None) -> None:
        self.name = name
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._numbers = itertools.count(1)
        # By number: the future of the last answer, and what takes the answers before it.
        self._calls: dict[int, tuple[asyncio.Future[Any], Callable[[Any], None]]] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, connection: socket.socket, name: str, *, process: asyncio.subprocess.Process | None = None) -> Self:
        """Wait until the node is ready. `process` is ended after the link. Raises as `spawn_node`."""
        node = cls(name, process)
        try:
            node._link = await Link.open(connection, node._on_message, node._lose)
            async with asyncio.timeout(_START_S):
                await node._ready
        except BaseException as error:
            await node.close()
            if isinstance(error, TimeoutError):
                raise MachineError(f"the supervisor did not start within {_START_S:g} s") from error
            raise
        node._watching = node._loop.create_task(node._watch_silence(), name="silence of the supervisor")
        return node

    async def run(self, request: RunRequest) -> RunResult:
        return cast(RunResult, await self._ask("run", request))

    async def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        verdicts: asyncio.Queue[tuple[int, PairVerdict] | None] = asyncio.Queue()
        asking = self._loop.create_task(self._ask("verify", request, on_item=verdicts.put_nowait))
        asking.add_done_callback(lambda _: verdicts.put_nowait(None))
        try:
            while (judged := await verdicts.get()) is not None:
                yield judged
            await asking
        finally:
            asking.cancel()

    async def open_session(self, limits: SessionLimits) -> str:
        return str(await self._ask("open_session", limits))

    async def fork_session(self, session: str) -> str:
        return str(await self._ask("fork_session", session))

    async def close_session(self, session: str) -> None:
        await self._ask("close_session", session)

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Hang up; the node ends its programs then, and its process."""
        self._lose("the link was closed")
        if self._watching is not None:
            self._watching.cancel()
        if self._link is not None:
            self._link.close()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            _log.warning("the supervisor did not end by itself; killing it")
            self._process.kill()
            await self._process.wait()

    async def _ask(self, method: str, argument: object, *, on_item: Callable[[Any], None] = lambda item: None) -> Any:
        if self._lost.done():
            raise NodeGone(f"the supervisor is gone: {self._lost.result()}")
        assert self._link is not None
        number, answered = next(self._numbers), self._loop.create_future()
        self._calls[number] = answered, on_item
        self._link.send((number, method, argument))
        try:
            return await answered
        finally:
            if self._calls.pop(number, None) is not None:  # the caller left
                self._link.send((number, "cancel", None))

    def _on_message(self, message: tuple[int, Any, bool]) -> None:
        number, answer, is_last = message
        if number == 0:
            self._on_event(answer)
        elif number in self._calls:  # else its caller left
            answered, on_item = self._calls[number]
            if not is_last:
                on_item(answer)
                return
            del self._calls[number]
            if isinstance(answer, Exception):
                _fail(answered, answer)
            elif not answered.done():
                answered.set_result(answer)

    def _on_event(self, event: object) -> None:
        match event:
            case NodeStatus():
                self.level, self.num_slots = event.level, event.num_slots
                if not self._ready.done():
                    self._ready.set_result(None)
            case LogLine():
                _log.log(event.level, "supervisor: %s", event.text)
            case UserError():
                _fail(self._ready, event)
            case _:
                _fail(self._ready, MachineError(f"the supervisor did not start: {event}"))

    def _lose(self, reason: str) -> None:
        if self._lost.done():
            return
        self._lost.set_result(reason)
        _fail(self._ready, MachineError(f"the supervisor did not start: {reason}"))
        calls, self._calls = self._calls, {}
        for answered, _ in calls.values():
            _fail(answered, NodeLost(f"the supervisor was lost with the call in flight: {reason}"))

    async def _watch_silence(self) -> None:
        """A process that is stopped does not hang up. Looks are counted, not timed: this process may have been stopped too."""
        assert self._link is not None
        num_silent = 0
        while num_silent < _NUM_SILENT:
            num_heard = self._link.num_heard
            await asyncio.sleep(_LOOK_S)
            num_silent = num_silent + 1 if self._link.num_heard == num_heard else 0
        self._lose(f"it was silent for {num_silent * _LOOK_S:.1f} s")
        self._link.abort()


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
