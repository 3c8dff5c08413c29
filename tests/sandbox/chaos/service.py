"""A service as a user starts it, with a keeper that starts again what died, as a service manager would."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from strop.errors import StropError
from strop.sandbox.client import SandboxClient
from strop.sandbox.server.ndjson import Health

from .processes import Part, Process, everyone_below, parts_below, process_of

TOKEN = "a-token-of-the-tests"
_STROP = (sys.executable, "-m", "strop.cli", "sandbox")
_START_S = 60.0
_PAUSE_S = 0.2  # before what ended is started again
_END_S = 40.0  # after SIGTERM; the grace of the service is 30 s
_BURIAL_S = 5.0  # for what was killed to be gone
_PORTS = itertools.count(20_000 + os.getpid() % 5000)  # below those that the kernel gives to connections


class Service:
    """Use as `async with`.

    Args:
        directory: for the file of its token and what it says; made if it is not there.
        level: of isolation.
        host: where it listens.
        run_front: a command that runs it, such as `ip netns exec NAME`.
        temporary: its TMPDIR.
    """

    def __init__(
        self,
        directory: Path,
        *,
        level: str = "namespaces",
        warm: str = "bare,numpy",
        host: str = "127.0.0.1",
        run_front: Sequence[str] = (),
        temporary: Path | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.log = directory / "log.txt"
        self.port = _free_port()
        self.url = f"http://{host}:{self.port}"
        self.seen: set[Process] = set()  # everyone who ever was a part of it when somebody looked
        token = directory / "token"
        token.write_text(TOKEN)
        self._command = (
            *(*run_front, *_STROP, "serve", "--host", host, "--port", str(self.port), "--token-file", str(token)),
            *("--level", level, "--min-level", level, "--warm", warm),
        )
        self._has_inner = level in ("strict", "namespaces")
        self._environment = dict(os.environ) | ({} if temporary is None else {"TMPDIR": str(temporary)})
        self._is_up = asyncio.Event()
        self._is_ending = False
        self._front: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def start(self) -> None:
        """Returns when it works."""
        self._is_ending = False
        self._keeper = asyncio.create_task(self._keep_front())
        await self.wait_up()

    def client(self, *, patience_s: float, name: str = "") -> SandboxClient:
        return SandboxClient(self.url, token=TOKEN, client=name, patience_s=patience_s, connect_s=_START_S)

    async def wait_up(self) -> None:
        """Returns when the front has started, and not ended since."""
        await asyncio.wait_for(self._is_up.wait(), _START_S)

    async def wait_whole(self, *, within_s: float) -> None:
        """Returns when it works and nothing is held."""
        health: Health | StropError | None = None
        try:
            async with asyncio.timeout(within_s), self.client(patience_s=within_s) as client:
                while True:
                    try:
                        health = (await client.health())[self.url]
                        if health.nodes and not health.num_held:
                            return
                    except StropError as error:
                        health = error
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise AssertionError(
                f"not whole within {within_s:g} s; the last word was {health}; it said: {self.words()}"
            ) from error

    async def parts(self) -> dict[Part, list[Process]]:
        """Those that live at this moment."""
        found: dict[Part, list[Process]] = {part: [] for part in Part}
        if self._front is not None:
            self.seen |= everyone_below(self._front.pid)
            found = parts_below(self._front.pid)
        if not self._has_inner:  # what a fork server started is then a program
            found[Part.FORK_SERVER_INNER] = []
        return found

    def words(self) -> str:
        """The last of what it said."""
        return self.log.read_text()[-3000:] if self.log.exists() else ""

    async def end(self) -> None:
        """As a user does, by SIGTERM. Fails when it does not end in order, or leaves a process behind."""
        await self.parts()
        self._is_ending = True
        if (front := self._front) is not None:
            front.send_signal(signal.SIGCONT)
            front.terminate()
            code = await asyncio.wait_for(front.wait(), _END_S)
            assert code == 0, f"it ended with {code} after SIGTERM; it said: {self.words()}"
        await self._end_keeper()
        await self.bury()

    async def kill(self) -> None:
        """Everything at once, by SIGKILL to every process that there is. No effect on what has ended."""
        await self.parts()
        self._is_ending = True
        while left := [process for process in self.seen if process.is_alive]:
            for process in left:
                process.send(signal.SIGKILL)
            await asyncio.sleep(0.01)
        await self._end_keeper()

    async def bury(self) -> None:
        """Fails when a process that belonged to it is alive after all of it has ended."""
        deadline = asyncio.get_running_loop().time() + _BURIAL_S
        while left := [process for process in self.seen if process.is_alive]:
            assert asyncio.get_running_loop().time() < deadline, f"processes are left after the end of the service: {left}"
            await asyncio.sleep(0.05)

    async def _end_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            [ended] = await asyncio.gather(self._keeper, return_exceptions=True)
            if isinstance(ended, Exception):
                raise ended
        self._keeper = self._front = None
        self._is_up.clear()

    async def _keep_front(self) -> None:
        while not self._is_ending:
            with self.log.open("ab") as log:
                self._front = await asyncio.create_subprocess_exec(
                    *self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
                )
            if (known := process_of(self._front.pid)) is not None:
                self.seen.add(known)
            announcing = asyncio.create_task(self._announce())
            await self._front.wait()
            announcing.cancel()
            self._is_up.clear()
            await asyncio.sleep(0 if self._is_ending else _PAUSE_S)

    async def _announce(self) -> None:
        """Once it answers: its supervisor works by then."""
        async with self.client(patience_s=_START_S) as client:
            await client.health()
            self._is_up.set()


def _free_port() -> int:
    for port in _PORTS:
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports never end")
