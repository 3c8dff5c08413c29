"""Two network namespaces and the cable between them, which can be cut without a word to either end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import pytest

NEAR_ADDRESS, FAR_ADDRESS = "192.0.2.1", "192.0.2.2"  # from the block for documentation, never used
_CLONE_NEWNET = 0x40000000

_ResultT = TypeVar("_ResultT")


class Cable:
    """Use as `with`. The namespaces are gone after it, whatever happened inside.

    Skips the test where there is no `ip`, or namespaces are not allowed.
    """

    def __init__(self) -> None:
        mark = secrets.token_hex(3)
        self.near, self.far = f"strop-near-{mark}", f"strop-far-{mark}"
        self._near_end, self._far_end = f"sf{mark}", f"sn{mark}"

    def __enter__(self) -> Self:
        if shutil.which("ip") is None:
            pytest.skip("iproute2 is not installed, so no cable can be laid between two network namespaces")
        if os.geteuid() != 0:
            pytest.skip("only root may lay a cable between two network namespaces")
        try:
            self._lay()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def cut(self) -> None:
        """Whatever is sent from now on is lost without a message."""
        _ip("-n", self.far, "link", "set", self._far_end, "down")

    def mend(self) -> None:
        _ip("-n", self.far, "link", "set", self._far_end, "up")

    def run_near(self, work: Callable[[], _ResultT]) -> _ResultT:
        """`work` in a thread that lives in the near namespace, and so does all that it starts."""

        def enter() -> None:
            namespace = os.open(f"/run/netns/{self.near}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(namespace)

        with ThreadPoolExecutor(max_workers=1, initializer=enter) as thread:
            return thread.submit(work).result()

    def _lay(self) -> None:
        _ip("netns", "add", self.near)
        _ip("netns", "add", self.far)
        peer = ("type", "veth", "peer", "name", self._far_end, "netns", self.far)
        _ip("-n", self.near, "link", "add", self._near_end, *peer)
        ends = ((self.near, self._near_end, NEAR_ADDRESS), (self.far, self._far_end, FAR_ADDRESS))
        for name, end, address in ends:
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in (self.near, self.far):
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                _ip("netns", "delete", name)  # with its end of the cable, and so the other end


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
