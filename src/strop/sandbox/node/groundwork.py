"""The helper that does from outside what a session's copy must not be able to do: see `inside.groundwork`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

from strop.errors import MachineError
from strop.sandbox.inside import confine, wire

_SCRIPT = Path(wire.__file__).with_name("groundwork.py")
_LIMIT_S = 5.0  # of one step; a millisecond when the machine is idle


class Groundwork:
    """One helper process, started when it is first needed and again when it died. Belongs to one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    async def raise_limit(self, pid: int, pidfd: int, *, owner: int) -> None:
        """Let the process have so many others that the limit of a branch of it is the branch's own."""
        await self._ask(wire.GROUND_RAISE, pid, owner, wire.MAX_FAMILY_PROCESSES, (pidfd,))

    async def dress(self, pid: int, *, stem: int, branch: int, owner: int, max_processes: int) -> None:
        """Give the copy `pid` its uid, an empty /tmp and its limit of processes. `stem` and `branch` are pidfds."""
        await self._ask(wire.GROUND_DRESS, pid, owner, max_processes, (stem, branch))

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(MachineError("the helper that prepares copies of sessions died"))
        self._waiting.clear()

    async def _ask(self, step: bytes, pid: int, owner: int, max_processes: int, descriptors: tuple[int, ...]) -> None:
        """Raises `MachineError` with the words of the step that failed."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.start()
            assert self._socket is not None
            message = wire.GROUNDWORK.pack(step, number, pid, owner, max_processes, confine.INNER_UID)
            socket.send_fds(self._socket, [message], list(descriptors))
            async with asyncio.timeout(_LIMIT_S):
                await waiting
        except (OSError, TimeoutError) as error:
            raise MachineError(f"the helper that prepares copies of sessions does not answer ({error})") from error
        finally:
            self._waiting.pop(number, None)

    def start(self) -> None:
        """Unless it runs."""
        if self._socket is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            ours.setblocking(False)
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-S", "-B", str(_SCRIPT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            undo.pop_all()
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours, self._read)

    def _read(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            answer = self._socket.recv(4096)
            if not answer:
                self.close()
                return
            number, code = wire.GROUND_ANSWER.unpack_from(answer)
            if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                if code:
                    waiting.set_exception(MachineError(answer[wire.GROUND_ANSWER.size :].decode("utf-8", "replace")))
                else:
                    waiting.set_result(None)
