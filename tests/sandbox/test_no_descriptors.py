"""A supervisor that runs out of descriptors says so, and keeps none of those that it had got by then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Iterator

import pytest

from strop.errors import MachineError
from strop.sandbox.inside import wire
from strop.sandbox.protocol import IsolationLevel
from strop.sandbox.supervisor.fork_servers import ForkServer
from strop.sandbox.supervisor.forking import NamespaceHelper

Attempt = Callable[[], object]


@contextlib.contextmanager
def _descriptors_left(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(max(held) + 2 + count) if number not in held]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("left", range(5))
def test_a_session_that_finds_no_descriptors_keeps_none(left: int) -> None:
    async def attempt() -> tuple[int, int]:
        server = ForkServer("bare", IsolationLevel.PROCESS, modules=(), on_lost=lambda: None)
        try:
            await server.hello()
            before = _num_open()
            with _descriptors_left(left), pytest.raises(MachineError, match="no room for another program"):
                server.take_session(b"")
            return before, _num_open()
        finally:
            server.lose()

    before, after = asyncio.run(attempt())
    assert after == before


@pytest.mark.parametrize("left", range(4))
def test_a_fork_server_or_helper_that_finds_no_descriptors_keeps_none(left: int) -> None:
    async def attempt() -> tuple[int, int]:
        helper = NamespaceHelper()
        before = _num_open()
        with _descriptors_left(left):
            with pytest.raises(OSError, match="Too many open files"):
                ForkServer("bare", IsolationLevel.PROCESS, modules=(), on_lost=lambda: None)
            with pytest.raises(MachineError, match="does not answer"):
                await helper.ask(wire.STEP_LIMIT, os.getpid(), owner=0, max_processes=1, descriptors=[0])
        return before, _num_open()

    before, after = asyncio.run(attempt())
    assert after == before
