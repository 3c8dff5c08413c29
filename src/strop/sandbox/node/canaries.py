"""What no program may ever reach: a secret in the environment, a file, and listeners that remember who called."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from strop.sandbox.node.directories import Directory

_NAME = "STROP_CANARY"


class Canaries:
    """Planted for the time of a `with`; begin it before the fork servers start, so that they could inherit the environment.

    Permissions hide nothing of it: file and directory are open to everyone, so only the sandbox can keep a program away.
    """

    def __enter__(self) -> Self:
        self.secret = f"strop-canary-{secrets.token_hex(8)}"
        os.environ[_NAME] = self.secret
        self._directory = Directory.for_canaries()
        self.directory = Path(self._directory.path)
        self.directory.chmod(0o777)
        self.file = self.directory / "secret"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        self._listeners: dict[str, socket.socket] = {}
        self._listen("tcp", socket.AF_INET, stream, ("127.0.0.1", 0))
        self._listen("udp", socket.AF_INET, datagram, ("127.0.0.1", 0))
        self._listen("abstract", socket.AF_UNIX, stream, f"\0{self.secret}")
        self._listen("unix", socket.AF_UNIX, stream, str(self.directory / "stream"))
        self._listen("datagram", socket.AF_UNIX, datagram, str(self.directory / "datagram"))
        for name in ("stream", "datagram"):
            (self.directory / name).chmod(0o777)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for listener in self._listeners.values():
            listener.close()
        shutil.rmtree(self.directory)
        self._directory.remove()
        os.environ.pop(_NAME, None)

    @property
    def addresses(self) -> dict[str, int | str]:
        """Where each listener is, as the attacks expect it."""
        return {
            "tcp": self._listeners["tcp"].getsockname()[1],
            "udp": self._listeners["udp"].getsockname()[1],
            "abstract": self.secret,
            "unix": str(self.directory / "stream"),
            "datagram": str(self.directory / "datagram"),
        }

    def called(self) -> set[str]:
        """The listeners that somebody reached since the last time."""
        return {name for name, listener in self._listeners.items() if _was_called(listener)}

    def _listen(self, name: str, family: int, kind: int, address: tuple[str, int] | str) -> None:
        listener = self._listeners[name] = socket.socket(family, kind)
        listener.bind(address)
        listener.setblocking(False)
        if kind == socket.SOCK_STREAM:
            listener.listen()


def _was_called(listener: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        if listener.type == socket.SOCK_STREAM:
            listener.accept()[0].close()
        else:
            listener.recv(1)
        return True
    return False
