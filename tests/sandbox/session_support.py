"""What tests of sessions look at from outside: processes, capabilities, mounts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from strop.sandbox import LocalSandbox, RunOutcome, RunResult
from strop.sandbox.node.interpreters import Interpreter
from strop.sandbox.protocol import SessionLimits
from strop.sandbox.sync import SandboxSession

BARE = SessionLimits(profile="bare")


def outcome_of(result: RunResult) -> tuple[RunOutcome, str]:
    return result.outcome, result.text


def interpreter_of(session: SandboxSession) -> Interpreter:
    node = session._box._box
    assert isinstance(node, LocalSandbox)
    return node._sessions._sessions[session._session.name].interpreter


def is_lost(session: SandboxSession) -> bool:
    try:
        interpreter_of(session)
    except KeyError:
        return True
    return False


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
