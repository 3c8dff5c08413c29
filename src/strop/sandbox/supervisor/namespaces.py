"""Starts the helper process that changes the namespaces of a session's copy from outside: see `inside.namespaces`."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

from strop.errors import MachineError
from strop.sandbox.inside import confine, wire

_SCRIPT = Path(wire.__file__).with_name("namespaces.py")
_LIMIT_S = 5.0  # of one step; 1 ms on an idle machine


class NamespaceHelper:
    """One process, started when it is first needed and again after its death. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Start the process unless it runs."""
        if self._socket is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-s", "-P", "-S", "-B", str(_SCRIPT), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    cwd="/",
                    env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        self._socket = ours

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def ask(self, step: bytes, pid: int, *, owner: int, max_processes: int, descriptors: list[int]) -> None:
        """Have it do a step of `inside.namespaces` on a process. Raises `MachineError`.

        Args:
            step: `wire.STEP_LIMIT` or `wire.STEP_PREPARE`.
            owner: uid of the owner of the namespaces of that process.
            max_processes: how many processes may be started in them.
            descriptors: pidfds, as described at the step.
        """
        async with self._turn:
            try:
                self.start()
                assert self._socket is not None
                message = wire.NAMESPACE_STEP.pack(step, pid, owner, max_processes, confine.INNER_UID)
                socket.send_fds(self._socket, [message], descriptors)
                async with asyncio.timeout(_LIMIT_S):
                    answer = await asyncio.get_running_loop().sock_recv(self._socket, 4_096)
            except (OSError, TimeoutError, asyncio.CancelledError) as error:
                self.close()  # a later answer would be taken for the answer to another step
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise MachineError(f"the helper that prepares copies of sessions does not answer ({error})") from error
            if not answer:
                self.close()
                raise MachineError("the helper that prepares copies of sessions died")
            if answer != wire.STEP_DONE:
                raise MachineError(answer.decode("utf-8", "replace"))
