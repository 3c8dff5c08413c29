"""What a code runner owes: run untrusted code once, tell what happened. No word of learning here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class RunOutcome(StrEnum):
    """What became of a program, decided outside it. The last two are ours: never caused by a program."""

    STDOUT = "stdout"  # it printed something
    ECHO = "echo"  # it printed nothing; its last expression is shown as IPython would
    EMPTY = "empty"  # ended well, nothing to show
    ERROR = "error"  # an exception, or a non-zero exit
    TIMEOUT = "timeout"
    KILLED = "killed"  # `reason` says by what: memory, output, signal N, policy
    REJECTED = "rejected"  # the request itself is over a limit; never run
    OVERLOADED = "overloaded"
    INTERNAL = "internal"


class IsolationLevel(StrEnum):
    """How far a program is kept from everything else; each level includes the ones below it."""

    NAMESPACES = "namespaces"  # own pid, network and mount namespaces; nothing of it survives its kill
    PROCESS = "process"  # resource limits and a process group only: against accidents, not against intent


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One program and its limits."""

    code: str
    stdin: str = ""
    wall_s: float = 4.0
    memory_mib: int = 512
    output_bytes: int = 65_536  # head and tail are kept beyond it
    seed: int = 0  # of Python's `random`; the hash seed is fixed: the same call gives the same text


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What happened. `text` is what a reader may see: it holds no time, process id, address or path of the runner."""

    outcome: RunOutcome
    reason: str  # detail of KILLED, REJECTED and INTERNAL; empty otherwise
    text: str
    exit_code: int | None  # None when it did not exit by itself
    queue_s: float
    run_s: float
    level: IsolationLevel


class CodeRunner(Protocol):
    """Runs many programs at once. Every request is answered exactly once, within its own limit plus half a second."""

    async def run(self, request: RunRequest) -> RunResult:
        """A program's misbehaviour is a `RunResult`; raises `MachineError` only when the runner itself is lost."""

    async def close(self) -> None:
        """End every program that still runs, and the runner. Safe to call twice."""
