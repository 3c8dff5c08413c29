"""Starts a node of this machine as a process of its own, linked to this one by a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys

from strop.errors import LinkBroken, MachineError, UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.service.channel import LinkTiming
from strop.sandbox.service.front_end import RemoteNode

_log = logging.getLogger(__name__)

_START_S = 120.0  # imports, fork servers and a self-test, on a machine that may be busy
_END_S = 5.0  # to end its programs; then it is killed
_EXIT_USER_ERROR = 2
# A node needs nothing else of ours, and what it does not have it cannot leak.
_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "STROP_LOG")


async def spawn_node(config: SandboxConfig, *, name: str = "local") -> RemoteNode:
    """A node that works, or the reason why there is none. The node ends with its link, so it never outlives this process.

    Raises:
        UserError: this machine cannot give what `config` asks for; the message is that of the node.
        MachineError: it did not start for another reason.
    """
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "strop.sandbox.node"),
            *("--fd", str(theirs.fileno()), "--name", name, "--config", config.model_dump_json()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={key: os.environ[key] for key in _KEPT_ENVIRONMENT if key in os.environ},
            start_new_session=True,  # Ctrl-C is for this process, which lets its node go in order
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    child = _Child(process, name)
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
        return await RemoteNode.accept(reader, writer, timing=LinkTiming(handshake_s=_START_S), also_close=child.end)
    except LinkBroken as error:
        await child.end()
        if process.returncode == _EXIT_USER_ERROR:
            raise UserError(child.last_words.removeprefix("error: ")) from error
        raise MachineError(f"node {name!r} did not start: {child.last_words or error}") from error
    except BaseException:
        await child.end()
        raise


class _Child:
    """The process of a node, and what it says on stderr, which becomes ours."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.last_words = ""
        self._process = process
        self._name = name
        self._relay = asyncio.create_task(self._relay_words(), name=f"stderr of node {name}")

    async def end(self) -> None:
        """Returns when it has ended: by itself, since its link is closed, or killed."""
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            _log.warning("the process of node %r did not end by itself; killing it", self._name)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        # Something that it started may hold its stderr open, so the end of that is not waited for long.
        await asyncio.wait({self._relay}, timeout=0.5)
        self._relay.cancel()

    async def _relay_words(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self.last_words = line.decode("utf-8", "replace").strip() or self.last_words
            _log.warning("node %s: %s", self._name, self.last_words)
