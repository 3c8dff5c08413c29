"""Compares answers in plain processes of this machine, where there is no code service to do it: the same judge, not shut in.

Answers are data that no program here executes, so this needs no sandbox; it needs to be killable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from strop.errors import DeadlineExceeded, MachineError
from strop.sandbox.inside import verify
from strop.sandbox.node import verification
from strop.sandbox.node.verification import ChildEnd, VerifyChild
from strop.sandbox.protocol import PairVerdict, VerifyRequest

_SCRIPT = Path(verify.__file__).with_name("verify_alone.py")
_FREE = b"free"  # what the script says when it waits for a payload
_START_S = 120.0  # importing sympy on a busy machine
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


class ProcessVerifier:
    """The `verify` of a `CodeService`, by processes that are started when needed and kept until one has to be killed.

    Belongs to one event loop. `close` ends its processes; so does the end of this one.
    """

    def __init__(self, *, max_processes: int = 2) -> None:
        self._room = asyncio.Semaphore(max_processes)
        self._idle: list[_Process] = []
        self._is_closed = False

    def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        return verification.verify(self.start_child, request)

    async def close(self) -> None:
        """Safe to call twice. Pairs that are being compared end when whoever waits for them does."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().end()

    async def start_child(self) -> ProcessVerifyChild:
        """One payload's turn on a process.

        Raises:
            MachineError: it does not start, or this verifier was closed.
        """
        await self._room.acquire()
        try:
            if self._is_closed:
                raise MachineError("the verifier was closed; answers came after that")
            while self._idle:
                if not (process := self._idle.pop()).is_gone:
                    return ProcessVerifyChild(process, self)
                await process.end()
            process = _Process()
            await process.start()
            return ProcessVerifyChild(process, self)
        except BaseException:
            self._room.release()
            raise

    async def take_back(self, process: _Process, *, is_free: bool) -> None:
        """By a child that has ended."""
        self._room.release()
        if is_free and not self._is_closed:
            self._idle.append(process)
        else:
            await process.end()


class ProcessVerifyChild(VerifyChild):
    """One payload's turn on a process."""

    def __init__(self, process: _Process, owner: ProcessVerifier) -> None:
        self.pid = process.pid
        self._process = process
        self._owner = owner
        self._is_done = False

    def send(self, payload: bytes) -> None:
        self._process.write(payload + b"\n")

    async def lines(self) -> AsyncIterator[bytes]:
        while (line := await self._process.lines.get()) is not None:
            if line == _FREE:
                self._is_done = True
                return
            yield line

    async def ended(self) -> ChildEnd:
        signal_number = 0 if self._is_done else -await self._process.end()
        await self._owner.take_back(self._process, is_free=self._is_done)
        if self._is_done:
            return ChildEnd.DONE
        return ChildEnd.CRASHED if signal_number in _CRASHES else ChildEnd.LOST

    def kill(self) -> None:
        if not self._is_done:
            self._process.kill()


class _Process:
    """A process that runs the script, and the two pipes to it; `lines` ends with None when it is gone.

    Not one of asyncio's, which learn of an end in more than one place: a kill at the wrong moment costs the exit status.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._popen = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],  # -P: the script's folder is no place to import from
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin, self._stdout = self._popen.stdin, self._popen.stdout
        self._unsent = self._unread = b""
        self.pid = self._popen.pid
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_gone = False
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(self._stdout, self._read)

    async def start(self) -> None:
        """Returns when it has imported everything and waits for its first payload. Raises `MachineError`."""
        try:
            async with asyncio.timeout(_START_S):
                line = await self.lines.get()
        except TimeoutError as error:
            await self.end()
            raise DeadlineExceeded(f"the process that compares answers did not start within {_START_S:.0f} s.") from error
        except BaseException:
            await self.end()
            raise
        if line != _FREE:
            await self.end()
            raise MachineError(
                f"the process that compares answers ended before its first pair. Try it: {sys.executable} -P {_SCRIPT}"
            )

    def write(self, content: bytes) -> None:
        self._unsent += content
        self._write()

    def kill(self) -> None:
        self._popen.kill()

    async def end(self) -> int:
        """Kill it, if it is not gone, and give its exit status, a signal as its negative. Safe to call twice."""
        self._leave_pipes()
        self._popen.kill()
        status = await asyncio.to_thread(self._popen.wait)
        self._stdin.close()
        self._stdout.close()
        return status

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self._stdout.fileno(), 65_536)
            *lines, self._unread = (self._unread + part).split(b"\n")
            for line in lines:
                self.lines.put_nowait(line)
            if not part:
                self._leave_pipes()

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone, which its other pipe tells
            self._unsent = b""
        if self._unsent:
            self._loop.add_writer(self._stdin, self._write)
        else:
            self._loop.remove_writer(self._stdin)

    def _leave_pipes(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            self._loop.remove_reader(self._stdout)
            self._loop.remove_writer(self._stdin)
            self.lines.put_nowait(None)
