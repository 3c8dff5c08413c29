"""The self-test of a node: programs that attack what a level promises, and the level that held.

    report = await run_self_test(run, level, canaries=planted before the fork servers started)  ->  level_of(report)

`attacks` holds the programs, what each level promises, and how the evidence is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.table import Table

from strop.errors import UserError
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest, RunResult
from strop.sandbox.supervisor import attacks
from strop.sandbox.supervisor.attacks import CHECKS, MAX_PROCESSES, CheckResult, Evidence, namespaces_of
from strop.sandbox.supervisor.directories import Directory

_NAME = "STROP_CANARY"
_MEMORY_MIB, _FILE_MIB = 64, 1
_LIMITS: dict[str, Any] = {"wall_s": 10.0, "memory_mib": _MEMORY_MIB, "file_mib": _FILE_MIB}  # 0.2 s on an idle machine
_MOST_DISK_BYTES = 256 << 20  # that a private /tmp may hold; an attack that reserves so much got through
_TOGETHER_S = (0.1, 0.5, 2.5)  # how long two programs look for each other, until both were seen; longer on a busy machine
_GONE_WITHIN_S = 0.25  # after the reply: what a call started
_Run = Callable[[RunRequest], Awaitable[RunResult]]


class Canaries:
    """A secret in the environment, a file, and listeners that note each caller: what no program may reach.

    Use as `with`, before the fork servers start, so that they could inherit the environment. File and directory are open to
    everyone, so that only the sandbox keeps a program away.
    """

    def __enter__(self) -> Self:
        self.secret = f"strop-canary-{secrets.token_hex(8)}"
        os.environ[_NAME] = self.secret
        self._directory = Directory.make(is_for_canaries=True)
        self.directory = Path(self._directory.path)
        self.directory.chmod(0o777)
        self.file = self.directory / "secret"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        self._listeners = {
            "tcp": _listener(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "udp": _listener(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "abstract": _listener(socket.AF_UNIX, socket.SOCK_STREAM, f"\0{self.secret}"),
            "unix": _listener(socket.AF_UNIX, socket.SOCK_STREAM, str(self.directory / "stream")),
            "datagram": _listener(socket.AF_UNIX, socket.SOCK_DGRAM, str(self.directory / "datagram")),
        }
        for name in ("stream", "datagram"):
            (self.directory / name).chmod(0o777)
        return self

    def __exit__(self, *error: object) -> None:
        for listener in self._listeners.values():
            listener.close()
        shutil.rmtree(self.directory)
        self._directory.remove()
        os.environ.pop(_NAME, None)

    @property
    def places(self) -> dict[str, int | str]:
        """The secret, the files and the address of each listener, as the attacks expect them."""
        ports = {name: self._listeners[name].getsockname()[1] for name in ("tcp", "udp")}
        files = {"file": self.file, "directory": self.directory}
        files |= {"unix": self.directory / "stream", "datagram": self.directory / "datagram"}
        return {**ports, **{name: str(path) for name, path in files.items()}, "canary": self.secret, "abstract": self.secret}

    def called(self) -> set[str]:
        """The listeners that were reached since the last call."""
        return {name for name, listener in self._listeners.items() if _was_called(listener)}


def _listener(family: int, kind: int, address: tuple[str, int] | str) -> socket.socket:
    listener = socket.socket(family, kind)
    listener.bind(address)
    listener.setblocking(False)
    if kind == socket.SOCK_STREAM:
        listener.listen()
    return listener


def _was_called(listener: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        if listener.type == socket.SOCK_STREAM:
            listener.accept()[0].close()
        else:
            listener.recv(1)
        return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestReport:
    """The results of a self-test at the level that was claimed."""

    claimed: IsolationLevel
    probes: tuple[CheckResult, ...]
    seconds: float

    def broken(self, level: IsolationLevel) -> tuple[CheckResult, ...]:
        """The checks that `level` promises and that failed."""
        return tuple(check for check in self.probes if check.level.rank <= level.rank and not check.held)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "level": level_of(self)}

    def table(self) -> Table:
        """Return a table to print."""
        level = level_of(self)
        held = "nothing" if level is None else f"L{level.rank} {level.value}"
        table = Table(title=f"Self-test at L{self.claimed.rank} {self.claimed.value}: {held} holds ({self.seconds:.2f} s)")
        for name in ("", "probe", "level", "shows that", "what happened"):
            table.add_column(name)
        for check in self.probes:
            failed = "[red]broken[/]" if check.level.rank <= self.claimed.rank else "[dim]open[/]"
            mark = "[green]held[/]" if check.held else failed
            table.add_row(mark, check.name, f"L{check.level.rank}", check.shows, check.detail)
        return table


def level_of(report: SelfTestReport) -> IsolationLevel | None:
    """The highest level, up to the claimed one, whose checks all held; None if there is none."""
    return next((level for level in IsolationLevel if level.rank <= report.claimed.rank and not report.broken(level)), None)


def refusal(min_level: IsolationLevel, tried: Mapping[IsolationLevel, SelfTestReport | str]) -> UserError:
    """The error that names for each level that was tried what failed, or why it did not start, and the remedy."""
    lines = [f"sandbox.min_level is '{min_level.value}' (L{min_level.rank}), and this machine does not give it:"]
    for level, found in tried.items():
        if isinstance(found, str):
            lines.append(f"  L{level.rank} {level.value} does not start: {found}")
        else:
            broken = "; ".join(f"{check.name} ({check.detail})" for check in found.broken(level))
            lines.append(f"  L{level.rank} {level.value} does not hold: {broken}")
    lines += [f"To get L{level.rank}: {_REMEDY[level]}" for level in tried if level in _REMEDY]
    lower = [level for level in IsolationLevel if level.rank < min_level.rank]
    if lower:
        lines.append(f"Or accept less with sandbox.min_level = '{lower[0].value}': {_LOSS[lower[0]]}")
    return UserError("\n".join(lines))


async def run_self_test(run: _Run, claimed: IsolationLevel, *, canaries: Canaries) -> SelfTestReport:
    """Attack `run`, which claims to give `claimed`. All attacks run at once.

    Args:
        canaries: planted before the fork servers started, which could inherit them.

    Raises:
        MachineError: from `run`.
    """
    started_at = time.monotonic()
    mark = f"strop{secrets.token_hex(4)}"  # names of processes have room for 15 characters
    left, right, daemon = (f"{mark}{letter}" for letter in "abd")
    fills_disk = claimed.rank >= IsolationLevel.NAMESPACES.rank  # below it the disk is everyone's
    evidence = Evidence()
    bounds = {
        "memory_bytes": 4 * _MEMORY_MIB << 20,
        "file_bytes": _FILE_MIB << 20,
        "disk_bytes": _MOST_DISK_BYTES if fills_disk else 0,
        "processes": MAX_PROCESSES,
    }

    async def leave_daemon() -> None:
        await _run_attack(run, evidence, "daemon", attacks.DAEMON, {"name": daemon})
        evidence.num_daemons = await asyncio.to_thread(_reap, daemon)

    async def meet() -> None:
        for seconds in _TOGETHER_S:
            watch = asyncio.create_task(_watch((left, right), evidence))
            try:
                await asyncio.gather(
                    _run_attack(run, evidence, "left", attacks.NEIGHBOUR, {"mine": left, "other": right, "seconds": seconds}),
                    _run_attack(run, evidence, "right", attacks.NEIGHBOUR, {"mine": right, "other": left, "seconds": seconds}),
                )
            finally:
                watch.cancel()
            if len(evidence.namespaces) == 2:
                return

    await asyncio.gather(
        meet(),
        leave_daemon(),
        _run_attack(run, evidence, "reach", attacks.REACH, {**canaries.places, "supervisor": os.getpid()}),
        _run_attack(run, evidence, "bounds", attacks.BOUNDS, bounds, max_processes=MAX_PROCESSES),
    )
    evidence.called = canaries.called()
    probes = tuple(check.judge(evidence) for check in CHECKS)
    return SelfTestReport(claimed=claimed, probes=probes, seconds=time.monotonic() - started_at)


async def _run_attack(
    run: _Run, evidence: Evidence, name: str, code: str, given: Mapping[str, Any], *, max_processes: int = 4 * MAX_PROCESSES
) -> None:
    code = attacks.PRELUDE + code + attacks.SUFFIX
    result = await run(RunRequest(code=code, stdin=json.dumps(given), max_processes=max_processes, profile="bare", **_LIMITS))
    evidence.failures.pop(name, None)
    try:
        if result.outcome is not RunOutcome.STDOUT:
            raise ValueError
        evidence.facts[name] = json.loads(result.text)
    except ValueError:
        said = result.text[-200:].strip()
        evidence.failures[name] = f"its program ended with {result.outcome} {result.reason}: {said}"


async def _watch(names: tuple[str, str], evidence: Evidence) -> None:
    """Note the namespaces of the processes with these names, and of their parents, until each was seen."""
    while len(evidence.namespaces) < len(names):
        for name in set(names) - evidence.namespaces.keys():
            for pid, parent in await asyncio.to_thread(_named, name):
                own, of_parent = namespaces_of(pid), namespaces_of(parent)
                if own.keys() >= of_parent.keys():  # else it died meanwhile, and some are missing
                    evidence.namespaces[name] = own, of_parent
        await asyncio.sleep(0.01)


def _named(name: str) -> list[tuple[int, int]]:
    """Pid and parent of the living processes that gave themselves this name."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is hidden
                start, _, rest = Path(entry.path, "stat").read_text().rpartition(")")
                state, parent, *_ = rest.split()
                if start.partition("(")[2] == name and state != "Z":
                    found.append((int(entry.name), int(parent)))
    return found


def _reap(name: str) -> int:
    """Kill the processes of this name that outlive the reply, and return how many there were."""
    deadline = time.monotonic() + _GONE_WITHIN_S
    while (found := _named(name)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid, _ in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


_REMEDY = {
    IsolationLevel.NAMESPACES: (
        "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, and on Ubuntu"
        " kernel.apparmor_restrict_unprivileged_userns=0); in a container --cap-add SYS_ADMIN."
    ),
    IsolationLevel.CONFINED: (
        "use Linux 6.2 or later with `landlock` in /sys/kernel/security/lsm, and a container profile that allows the"
        " landlock_* system calls, as Docker's default one does since 23.0."
    ),
}
_LOSS = {
    IsolationLevel.NAMESPACES: "calls then share the empty network and the user namespace of their fork server.",
    IsolationLevel.CONFINED: "programs then see that other processes and files exist, unread, and share the disk.",
    IsolationLevel.PROCESS: "programs then can read your files and use your network; only limits are left.",
}
