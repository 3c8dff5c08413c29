"""A process that has imported everything an engine needs, and becomes an engine's process as often as it is asked to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

from strop.engine.servers.process import ServerProcess, end_of_log, how_it_ended, num_oom_kills
from strop.errors import EngineLost

_log = logging.getLogger(__name__)

MAX_ORDER_BYTES = 65_536
_MODULE = "strop.engine.processes.child"
_START_S = 300.0  # imports, on a machine that may be busy with other ones
_FORK_S = 60.0
_KILL_S = 20.0
_STATES = {"T": "it was stopped by a signal", "t": "a debugger holds it", "D": "it waits for a disk or a device"}


class ForkedProcess:
    """One child of a fork server."""

    def __init__(self, fork_server: EngineForkServer, pid: int, log: Path, log_start: int) -> None:
        self.pid = pid
        self.ended = asyncio.Event()
        self.end = ""  # how, as the rest of a sentence
        self._fork_server = fork_server
        self._log, self._log_start = log, log_start
        self._oom_kills = num_oom_kills()

    @property
    def last_words(self) -> str:
        """The end of its log, as a sentence; empty when it said nothing."""
        said = end_of_log(self._log, self._log_start)
        return "" if said.endswith("(nothing)") else said

    @property
    def state(self) -> str:
        """Why it may not answer, as the kernel sees it; empty when the kernel has nothing to say."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return ""
        return _STATES.get(letter, "")

    async def kill(self) -> None:
        """Returns when it has ended, or cannot be killed, which is logged."""
        self._fork_server.order_kill(self.pid)
        try:
            await asyncio.wait_for(self.ended.wait(), _KILL_S)
        except TimeoutError:
            _log.error("the engine's process %d was not gone %g s after SIGKILL", self.pid, _KILL_S)

    def note_end(self, status: int | None) -> None:
        """Args: status: exit code, a signal as its negative; None: it ended with the fork server."""
        lost = "was lost: the process that it was forked from is gone, and it with it"
        self.end = lost if status is None else how_it_ended(status, oom_kills_before=self._oom_kills)
        self.ended.set()


class EngineForkServer:
    """Forks the processes of engines. All of them end with it, and it ends with this process, however that ends.

    Its children share what it imported.
    """

    def __init__(self, log: Path, *, ends_with_last_tenant: bool) -> None:
        self._log = log
        self._ends_with_last_tenant, self._num_tenants = ends_with_last_tenant, 0
        self._link, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        self._is_ready = asyncio.Event()
        self._num_orders = 0
        self._births: dict[int, asyncio.Future[int]] = {}
        self._children: dict[int, ForkedProcess] = {}
        self._early_ends: dict[int, int] = {}  # of children whose pid the caller does not have yet
        self._process: ServerProcess | None = None
        self._end = ""  # why it forks no more

    @classmethod
    async def start(cls, *, log: Path, ends_with_last_tenant: bool = False) -> Self:
        """A fork server that has imported everything, and lasts until `close`, or, if so asked, until its last tenant has left.

        Raises `EngineLost` when it did not start.
        """
        fork_server = cls(log, ends_with_last_tenant=ends_with_last_tenant)
        asyncio.get_running_loop().add_reader(fork_server._link, fork_server._read)
        try:
            fork_server._process = await ServerProcess.start(
                [sys.executable, "-P", "-m", _MODULE, str(fork_server._theirs.fileno())],
                # numpy's OpenBLAS would start threads as it is imported, and what has threads cannot be forked safely.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                log=log,
                is_ready=fork_server._has_imported,
                deadline_s=_START_S,
                pass_fds=(fork_server._theirs.fileno(),),
            )
        except BaseException:
            await fork_server.close()
            raise
        finally:
            fork_server._theirs.close()
        return fork_server

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def fork(self, order: dict[str, Any], link: socket.socket, log: Path) -> ForkedProcess:
        """A child that serves the other end of `link` as `order` says, and appends what it prints to `log`.

        Raises `EngineLost` when the fork server is gone, or does not answer.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._num_orders += 1
        number = self._num_orders
        birth = self._births[number] = asyncio.get_running_loop().create_future()
        try:
            with log.open("ab") as output:
                log_start = output.tell()
                message = json.dumps({"fork": number, "order": order}).encode()
                self._send(message, [link.fileno(), output.fileno()])
            async with asyncio.timeout(_FORK_S):
                pid = await birth
        except TimeoutError as error:
            self._end = f"(pid {self.pid}) did not answer within {_FORK_S:g} s"
            raise EngineLost(f"the process that forks engines {self._end}.") from error
        finally:
            del self._births[number]
        child = self._children[pid] = ForkedProcess(self, pid, log, log_start)
        if (status := self._early_ends.pop(pid, None)) is not None:
            self._bury(pid, status)
        return child

    def order_kill(self, pid: int) -> None:
        with contextlib.suppress(EngineLost):  # then it is dead already
            self._send(json.dumps({"kill": pid}).encode(), [])

    @property
    def is_over(self) -> bool:
        """Whether it forks no more."""
        return bool(self._end)

    def enter(self) -> None:
        """Count one more user. Call it before the first `fork`."""
        self._num_tenants += 1

    async def leave(self) -> None:
        """Count one user less, after its forked process has ended."""
        self._num_tenants -= 1
        if self._ends_with_last_tenant and not self._num_tenants:
            self._end = self._end or "was closed"  # before the first await, so that no other user enters
            await self.close()

    async def close(self) -> None:
        """End it and every child. Safe to call twice."""
        if self._process is not None:
            await self._process.stop(grace_s=0.0)
        if self._link.fileno() >= 0:
            self._lose("was closed")

    async def _has_imported(self) -> bool:
        await self._is_ready.wait()
        return True

    def _send(self, message: bytes, descriptors: list[int]) -> None:
        if self._end:
            raise EngineLost(f"the process that forks engines {self._end}.")
        try:
            socket.send_fds(self._link, [message], descriptors)
        except OSError as error:
            raise EngineLost(f"the process that forks engines (pid {self.pid}) cannot be reached: {error.strerror}.") from error

    def _read(self) -> None:
        try:
            said = self._link.recv(MAX_ORDER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._lose(f"(pid {self.pid}) is gone. {end_of_log(self._log, 0)}")
            return
        message = json.loads(said)
        if "ready" in message:
            if message["ready"] > 1:
                _log.warning("the process that forks engines has %d threads; its forks may hang", message["ready"])
            self._is_ready.set()
        elif "born" in message:
            if (birth := self._births.get(message["born"])) is not None and not birth.done():
                birth.set_result(message["pid"])
            else:
                self.order_kill(message["pid"])  # its caller has given up
        elif message["died"] in self._children:
            self._bury(message["died"], message["status"])
        else:
            self._early_ends[message["died"]] = message["status"]

    def _bury(self, pid: int, status: int | None) -> None:
        self._children.pop(pid).note_end(status)

    def _lose(self, end: str) -> None:
        asyncio.get_running_loop().remove_reader(self._link)
        self._link.close()
        self._end = self._end or end
        for birth in self._births.values():
            if not birth.done():
                birth.set_exception(EngineLost(f"the process that forks engines {self._end}."))
        for pid in list(self._children):
            self._bury(pid, None)


@dataclass(slots=True)
class _Shared:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    fork_server: EngineForkServer | None = None


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


async def enter_shared_fork_server(log: Path) -> EngineForkServer:
    """That of all engines in this event loop; the first one starts it, and with the last that leaves it ends.

    One for all, because each costs an import of torch, 300 MiB, and a copy of every publication.

    Args:
        log: for what it prints, if it has to be started.
    """
    shared = _shared.setdefault(asyncio.get_running_loop(), _Shared())
    async with shared.lock:
        if shared.fork_server is None or shared.fork_server.is_over:
            shared.fork_server = await EngineForkServer.start(log=log, ends_with_last_tenant=True)
        shared.fork_server.enter()
        return shared.fork_server
