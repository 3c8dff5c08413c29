"""Starts the supervisor of this machine in a process of its own, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable

from strop.errors import LinkBroken, MachineError, UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.node_process import NodeProcess
from strop.sandbox.protocol import CodeNode

_log = logging.getLogger(__name__)

_END_S = 5.0  # for its programs to end; then the supervisor is killed
_EXIT_USER_ERROR = 2
_MAX_LINE_BYTES = 65_536
_MAX_LINES = 100  # of stderr, kept until the supervisor has started
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # before a supervisor is started again; doubles with each start that fails
# A supervisor needs no other variables, and cannot leak what it does not have.
_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "STROP_LOG")

Spawn = Callable[[SandboxConfig, str], Awaitable[CodeNode]]


async def spawn_node(config: SandboxConfig, name: str) -> CodeNode:
    """Return a supervisor that works. It ends with its link, so it never outlives this process.

    Raises:
        UserError: this machine cannot give what `config` asks for; the message comes from the supervisor.
        MachineError: it did not start for another reason.
    """
    ours, theirs = socket.socketpair()
    output, stderr = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "strop.sandbox.supervisor"),
            *("--fd", str(theirs.fileno()), "--name", name, "--config", config.model_dump_json()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            env={key: os.environ[key] for key in _KEPT_ENVIRONMENT if key in os.environ},
            start_new_session=True,  # Ctrl-C reaches only this process, which ends its supervisor in order
        )
    except BaseException:
        ours.close()
        os.close(output)
        raise
    finally:
        theirs.close()
        os.close(stderr)
    child = _Child(process, output)
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
        node = await NodeProcess.connect(reader, writer, name, also_close=child.end)
    except LinkBroken as error:
        await child.end()
        if process.returncode == _EXIT_USER_ERROR:
            raise UserError(child.last_error().removeprefix("error: ")) from error
        raise MachineError(f"the supervisor did not start: {child.last_error() or error}") from error
    except BaseException:
        await child.end()
        raise
    child.log_output()
    return node


async def keep_alive(
    node: CodeNode,
    config: SandboxConfig,
    *,
    spawn: Spawn,
    use: Callable[[CodeNode], None],
    lose: Callable[[CodeNode, str], None],
) -> None:
    """Start `node` again each time that it is lost, until this is cancelled.

    Args:
        use: called with each new node.
        lose: called with each lost node and the reason; closes the node.
    """
    while True:
        lose(node, await node.wait_lost())
        pause_s = _FIRST_PAUSE_S  # a start takes a second, so one that dies early needs no longer pause
        while True:
            await asyncio.sleep(pause_s)
            try:
                node = await spawn(config, node.name)
                break
            except (MachineError, UserError, OSError) as error:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                _log.error("the supervisor could not be started again, next try in %.1f s: %s", pause_s, error)
        use(node)


class _Child:
    """The process of a supervisor, and its stderr: kept for an error message until it has started, logged afterwards."""

    def __init__(self, process: asyncio.subprocess.Process, output: int) -> None:
        self._process = process
        self._is_logging = False
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._reading = asyncio.create_task(self._read(output), name="stderr of the supervisor")

    def last_error(self) -> str:
        """The stderr from its last error on, or its last line."""
        lines = list(self._lines)
        errors = [index for index, line in enumerate(lines) if line.startswith("error: ")]
        return "\n".join(lines[errors[-1] :] if errors else lines[-1:])

    def log_output(self) -> None:
        self._is_logging = True
        for line in self._lines:
            log_line(line)
        self._lines.clear()

    async def end(self) -> None:
        """Return when the process has ended by itself, because its link is closed, or was killed."""
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            _log.warning("the supervisor did not end by itself; killing it")
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await asyncio.wait({self._reading}, timeout=0.2)  # a process that it started may hold its stderr open
        self._reading.cancel()

    async def _read(self, output: int) -> None:
        # `asyncio.subprocess` cannot close a pipe that a grandchild holds open.
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb"))
        try:
            while not reader.at_eof():
                with contextlib.suppress(ValueError):  # a line that is too long
                    if text := (await reader.readline()).decode("utf-8", "replace").rstrip():
                        if self._is_logging:
                            log_line(text)
                        else:
                            self._lines.append(text)
        finally:
            pipe.close()


def log_line(line: str) -> None:
    """Log a line of the supervisor's stderr, at the level that the line begins with, if it is one of its log."""
    word, _, rest = line.partition(" ")
    level = logging.getLevelNamesMapping().get(word)
    if level is None:
        _log.warning("supervisor: %s", line)
    else:
        _log.log(level, "supervisor: %s", rest)
