"""Starts a node of this machine as a process of its own, linked to this one by a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from typing import Self

from strop.errors import LinkBroken, MachineError, UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.service.channel import LinkTiming
from strop.sandbox.service.front_end import RemoteNode
from strop.sandbox.service.lines import LineSplitter

_log = logging.getLogger(__name__)

_START_S = 120.0  # imports, fork servers and a self-test, on a machine that may be busy
_END_S = 5.0  # to end its programs; then it is killed
_EXIT_USER_ERROR = 2
_MAX_WORDS_BYTES = 65_536  # of a line on its stderr
_MAX_WORDS = 100  # lines
# A node needs nothing else of ours, and what it does not have it cannot leak.
_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "STROP_LOG")


async def spawn_node(config: SandboxConfig, *, name: str = "local") -> RemoteNode:
    """A node that works, or the reason why there is none. The node ends with its link, so it never outlives this process.

    Raises:
        UserError: this machine cannot give what `config` asks for; the message is that of the node.
        MachineError: it did not start for another reason.
    """
    ours, theirs = socket.socketpair()
    words, stderr = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "strop.sandbox.node"),
            *("--fd", str(theirs.fileno()), "--name", name, "--config", config.model_dump_json()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            env={key: os.environ[key] for key in _KEPT_ENVIRONMENT if key in os.environ},
            start_new_session=True,  # Ctrl-C is for this process, which lets its node go in order
        )
    except BaseException:
        ours.close()
        os.close(words)
        raise
    finally:
        theirs.close()
        os.close(stderr)
    child = await _Child.of(process, words, name)
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
        node = await RemoteNode.accept(reader, writer, timing=LinkTiming(handshake_s=_START_S), also_close=child.end)
    except LinkBroken as error:
        await child.end()
        if process.returncode == _EXIT_USER_ERROR:
            raise UserError(child.last_words.removeprefix("error: ")) from error
        raise MachineError(f"node {name!r} did not start: {child.last_words or error}") from error
    except BaseException:
        await child.end()
        raise
    child.take_start()
    return node


class _Child:
    """The process of a node, and what it says on stderr: until it works that is why it does not, later it is ours to log."""

    def __init__(
        self, process: asyncio.subprocess.Process, stderr: asyncio.StreamReader, pipe: asyncio.ReadTransport, name: str
    ) -> None:
        self._process = process
        self._stderr = stderr
        self._pipe = pipe
        self._name = name
        self._is_started = False
        self._words: deque[str] = deque(maxlen=_MAX_WORDS)
        self._relay = asyncio.create_task(self._relay_words(), name=f"stderr of node {name}")

    @classmethod
    async def of(cls, process: asyncio.subprocess.Process, stderr: int, name: str) -> Self:
        # A pipe of our own, because `asyncio.subprocess` cannot close one that a grandchild holds open.
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stderr, "rb")
        )
        return cls(process, reader, pipe, name)

    @property
    def last_words(self) -> str:
        """From its last error to the end, or its last line."""
        words = list(self._words)
        errors = [index for index, line in enumerate(words) if line.startswith("error: ")]
        return "\n".join(words[errors[-1] :] if errors else words[-1:])

    def take_start(self) -> None:
        self._is_started = True
        for line in self._words:
            log_line(self._name, line)
        self._words.clear()

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
        await asyncio.wait({self._relay}, timeout=0.2)
        self._relay.cancel()
        self._pipe.close()

    async def _relay_words(self) -> None:
        lines = LineSplitter(max_line_bytes=_MAX_WORDS_BYTES)
        while part := await self._stderr.read(_MAX_WORDS_BYTES):
            for line in lines.feed(part):
                said = (line if isinstance(line, bytes) else line.head).decode("utf-8", "replace").rstrip()
                if self._is_started:
                    log_line(self._name, said)
                else:
                    self._words.append(said)


def log_line(name: str, line: str) -> None:
    """Log what node `name` said on its stderr, at the level that the line begins with, where it is one of its own log."""
    word, _, rest = line.partition(" ")
    level = logging.getLevelNamesMapping().get(word)
    if level is None:
        _log.warning("node %s: %s", name, line)
    else:
        _log.log(level, "node %s: %s", name, rest)
