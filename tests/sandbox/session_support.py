"""Sessions for tests, and what is seen of them from outside: processes, capabilities, mounts."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from strop.sandbox.config import SandboxConfig
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest, RunResult, SessionLimits
from strop.sandbox.supervisor.node import Node
from strop.sandbox.supervisor.processes import Interpreter

_ResultT = TypeVar("_ResultT")

BARE = SessionLimits(profile="bare")


class Notebooks:
    """A node in a thread of its own, for tests that are not asynchronous."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.node = self.wait(self._start(config))

    def open(self, limits: SessionLimits = BARE) -> Notebook:
        return Notebook(self, self.wait(self.node.open_session(limits)))

    def wait(self, work: Coroutine[Any, Any, _ResultT]) -> _ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self.wait(self.node.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _start(config: SandboxConfig | None) -> Node:
        node = Node(config or SandboxConfig(min_level=IsolationLevel.NAMESPACES))
        await node.start()
        return node


class Notebook:
    """One session."""

    def __init__(self, notebooks: Notebooks, name: str) -> None:
        self._notebooks = notebooks
        self.name = name

    def run(self, code: str, *, stdin: str = "", wall_s: float = 4.0) -> RunResult:
        request = RunRequest(code=code, stdin=stdin, wall_s=wall_s, session=self.name)
        return self._notebooks.wait(self._notebooks.node.run(request))

    def fork(self) -> Notebook:
        return Notebook(self._notebooks, self._notebooks.wait(self._notebooks.node.fork_session(self.name)))

    def close(self) -> None:
        self._notebooks.wait(self._notebooks.node.close_session(self.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def interpreter(self) -> Interpreter:
        return self._notebooks.node._sessions._sessions[self.name].interpreter

    @property
    def is_lost(self) -> bool:
        return self.name not in self._notebooks.node._sessions._sessions


def outcome_of(result: RunResult) -> tuple[RunOutcome, str]:
    return result.outcome, result.text


def status_of(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def below(pid: int) -> list[int]:
    """Every process below this one that is not dead."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
    return [one for one in found[1:] if status_of(one).get("State", "Z")[0] not in "ZX"]


def privileged_below(pid: int) -> list[int]:
    return [one for one in below(pid) if int(status_of(one).get("CapEff", "0"), 16) and status_of(one)["NSpid"].count("\t") > 1]


def eventually(holds: Callable[[], bool], *, within_s: float = 3.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.01)
    return holds()


def num_mounts_of(pid: int) -> int:
    return len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())


def mounts_below(pid: int) -> int:
    """How many mounts all namespaces below have together."""
    namespaces = {}
    for one in below(pid):
        try:
            namespaces[os.readlink(f"/proc/{one}/ns/mnt")] = num_mounts_of(one)
        except OSError:
            continue
    return sum(namespaces.values())


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
