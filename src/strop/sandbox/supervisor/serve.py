"""The process of the supervisor, which `node_process.spawn_node` starts: answers the calls of a link with a node."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from typing import Protocol

from strop.errors import MachineError, StropError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.link import HEARTBEAT_S, Link, LogLine, NodeStatus
from strop.sandbox.protocol import CodeService, IsolationLevel
from strop.sandbox.supervisor.node import Node

_NUM_BUSY = 16  # open calls from which on an answer waits a moment, so that several leave in one write
_GATHER_S = 0.003
_SLOTS_S = 0.05  # how often the number of slots is looked at
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class Served(CodeService, Protocol):
    """What is called over a link, such as a `Node`."""

    level: IsolationLevel
    num_slots: int

    async def start(self) -> None: ...


async def serve_node(node: Served, connection: socket.socket, *, sends_log: bool = False) -> None:
    """Start the node, answer calls until the other end hangs up, and close the node."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[str] = loop.create_future()
    calls = _Calls(node)
    link = calls.link = await Link.open(connection, calls.take, lost.set_result)
    if sends_log:
        logging.getLogger().addHandler(_LinkHandler(link))
    try:
        await node.start()
        reporting = loop.create_task(calls.report_status())
        await lost
        reporting.cancel()
    except Exception as error:  # noqa: BLE001 - the other end raises it
        link.send((0, error if isinstance(error, StropError) else f"{type(error).__name__}: {error}", False))
    finally:
        await calls.cancel()
        await node.close()
        link.close()


class _Calls:
    """The calls of one link, as tasks by their number."""

    link: Link

    def __init__(self, node: Served) -> None:
        self._node = node
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: tuple[int, str, object]) -> None:
        number, method, argument = message
        if method != "cancel":
            task = self._tasks[number] = asyncio.create_task(self._answer(number, method, argument))
            task.add_done_callback(lambda _: self._tasks.pop(number))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def cancel(self) -> None:
        tasks = set(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def report_status(self) -> None:
        loop = asyncio.get_running_loop()
        reported, reported_at = None, 0.0
        while True:
            status = NodeStatus(self._node.level, self._node.num_slots)
            if status != reported or loop.time() - reported_at >= HEARTBEAT_S - _SLOTS_S:
                self.link.send((0, status, False))
                reported, reported_at = status, loop.time()
            await asyncio.sleep(_SLOTS_S)

    async def _answer(self, number: int, method: str, argument: object) -> None:
        answer: object = None
        try:
            if method == "verify":
                async for judged in self._node.verify(argument):  # type: ignore[arg-type]
                    self.link.send((number, judged, False))
            else:
                answer = await getattr(self._node, method)(argument)
        except StropError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - every call needs an answer
            _log.exception("unexpected error in a call")
            answer = MachineError(f"{type(error).__name__} in the supervisor: {error}")
        self.link.send((number, answer, True), within_s=_GATHER_S if len(self._tasks) > _NUM_BUSY else 0.0)


class _LinkHandler(logging.Handler):
    """Sends log lines to the other end, which logs them; from any thread."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self._link.send, (0, LogLine(record.levelno, self.format(record)), False))


async def _serve(descriptor: int, name: str, config: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # it ends with its link: the process that started it decides
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    node = Node(SandboxConfig.model_validate_json(config), name=name)
    await serve_node(node, socket.socket(fileno=descriptor), sends_log=True)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    logging.getLogger().setLevel(logging.getLevelNamesMapping().get(os.environ.get("STROP_LOG", "").upper(), logging.WARNING))
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
