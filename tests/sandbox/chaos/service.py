"""A service as a user starts it, with a keeper that starts again what died, as a service manager would."""

from __future__ import annotations

import asyncio
import contextlib
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
from strop.sandbox.client.client import SandboxClient
from strop.sandbox.server.ndjson import Health

from .processes import Part, Process, everyone_below, parts_below, process_of

TOKEN = "a-token-of-the-tests"
_STROP = (sys.executable, "-m", "strop.cli", "sandbox")
_START_S = 60.0
_PAUSE_S = 0.2  # before what ended is started again
_END_S = 40.0  # after SIGTERM; the grace of the service is 30 s
_BURIAL_S = 5.0  # for what was killed to be gone
_FIRST_PORT = 20_000  # below those that the kernel gives to connections


class Service:
    """A front with nodes of its own and others that have joined it. Use as `async with`.

    Args:
        directory: for the files of its tokens and what it says.
        num_joined: nodes that are processes of their own.
        level: of every node.
        host: where the front listens.
        run_front, run_joined: a command that runs theirs, such as `ip netns exec NAME`.
        temporary: its TMPDIR.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_local: int = 2,
        num_joined: int = 1,
        level: str = "namespaces",
        warm: str = "bare,numpy",
        host: str = "127.0.0.1",
        nodes_host: str = "127.0.0.1",
        run_front: Sequence[str] = (),
        run_joined: Sequence[str] = (),
        temporary: Path | None = None,
    ) -> None:
        self.log = directory / "log.txt"
        self.num_nodes = num_local + num_joined
        self.port, self.nodes_port = _free_ports(2)
        self.url = f"http://{host}:{self.port}"
        self.seen: set[Process] = set()  # everyone who ever was a part of it when somebody looked
        self.num_starts = {Part.FRONT: 0, Part.JOINED: 0}
        token, nodes_token = directory / "token", directory / "nodes-token"
        token.write_text(TOKEN)
        nodes_token.write_text(f"{TOKEN}-for-nodes")
        common = ("--level", level, "--min-level", level, "--warm", warm)
        self._front_command = (
            *(*run_front, *_STROP, "serve", "--host", host, "--port", str(self.port), "--token-file", str(token)),
            *("--nodes-host", nodes_host, "--nodes-port", str(self.nodes_port), "--nodes-token-file", str(nodes_token)),
            *("--local-nodes", str(num_local), *common),
        )
        self._joined_command = (
            *(*run_joined, *_STROP, "node", "--join", f"{nodes_host}:{self.nodes_port}", "--token-file", str(nodes_token)),
            *common,
        )
        self._num_joined = num_joined
        self._has_inner = level in ("strict", "namespaces")
        self._environment = dict(os.environ) | ({} if temporary is None else {"TMPDIR": str(temporary)})
        self._is_up = asyncio.Event()
        self._is_ending = False
        self._running: dict[Part, dict[int, asyncio.subprocess.Process]] = {Part.FRONT: {}, Part.JOINED: {}}
        self._keepers: list[asyncio.Task[None]] = []

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
        """Returns when every node is there."""
        self._is_ending = False
        self._keepers = [asyncio.create_task(self._keep_front())]
        await asyncio.wait_for(self._is_up.wait(), _START_S)
        self._keepers += [asyncio.create_task(self._keep_joined()) for _ in range(self._num_joined)]
        await self.wait_whole(within_s=_START_S)

    def client(self, *, patience_s: float, name: str = "") -> SandboxClient:
        return SandboxClient(self.url, token=TOKEN, client=name, patience_s=patience_s, connect_s=_START_S)

    async def health(self) -> Health:
        async with self.client(patience_s=_START_S) as client:
            return await client.health()

    async def wait_up(self) -> None:
        """Returns when the front has started, and not ended since."""
        await asyncio.wait_for(self._is_up.wait(), _START_S)

    async def wait_whole(self, *, within_s: float) -> None:
        """Returns when all nodes work and nothing is held."""
        health: Health | StropError | None = None
        try:
            async with asyncio.timeout(within_s), self.client(patience_s=within_s) as client:
                while True:
                    try:
                        health = await client.health()
                        if len(health.nodes) == self.num_nodes and not health.num_held:
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
        for own, running in self._running.items():
            for pid in list(running):
                self.seen |= everyone_below(pid)
                for part, processes in parts_below(pid, own).items():
                    found[part] += processes
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
        for part in (Part.JOINED, Part.FRONT):
            for process in list(self._running[part].values()):
                process.send_signal(signal.SIGCONT)
                process.terminate()
                code = await asyncio.wait_for(process.wait(), _END_S)
                assert code == 0, f"the {part} ended with {code} after SIGTERM; it said: {self.words()}"
        await self._end_keepers()
        await self.bury()

    async def kill(self) -> None:
        """Everything at once, by SIGKILL to every process that there is. No effect on what has ended."""
        await self.parts()
        self._is_ending = True
        while left := [process for process in self.seen if process.is_alive]:
            for process in left:
                process.send(signal.SIGKILL)
            await asyncio.sleep(0.01)
        await self._end_keepers()

    async def bury(self) -> None:
        """Fails when a process that belonged to it is alive after all of it has ended."""
        deadline = asyncio.get_running_loop().time() + _BURIAL_S
        while left := [process for process in self.seen if process.is_alive]:
            assert asyncio.get_running_loop().time() < deadline, f"processes are left after the end of the service: {left}"
            await asyncio.sleep(0.05)

    async def _end_keepers(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        for ended in await asyncio.gather(*self._keepers, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        self._keepers.clear()
        for running in self._running.values():
            running.clear()
        self._is_up.clear()

    async def _keep_front(self) -> None:
        while not self._is_ending:
            process = await self._start(Part.FRONT, self._front_command)
            announcing = asyncio.create_task(self._announce())
            await process.wait()
            announcing.cancel()
            self._is_up.clear()
            await self._note_end(Part.FRONT, process)

    async def _announce(self) -> None:
        """Once the front answers: its nodes work by then."""
        async with self.client(patience_s=_START_S) as client:
            await client.health()
            self._is_up.set()

    async def _keep_joined(self) -> None:
        while not self._is_ending:
            await self._is_up.wait()
            process = await self._start(Part.JOINED, self._joined_command)
            await process.wait()
            await self._note_end(Part.JOINED, process)

    async def _start(self, part: Part, command: Sequence[str]) -> asyncio.subprocess.Process:
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )
        self._running[part][process.pid] = process
        self.num_starts[part] += 1
        if (known := process_of(process.pid)) is not None:
            self.seen.add(known)
        return process

    async def _note_end(self, part: Part, process: asyncio.subprocess.Process) -> None:
        del self._running[part][process.pid]
        await asyncio.sleep(0 if self._is_ending else _PAUSE_S)


def _free_ports(num: int) -> list[int]:
    found: list[int] = []
    port = _FIRST_PORT + os.getpid() % 5000
    while len(found) < num:
        port += 1
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.bind(("127.0.0.1", port))
            found.append(port)
    return found
