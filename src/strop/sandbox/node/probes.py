"""The self-test of a node: programs that attack what a level promises, and the level that held.

    report = await probe(run, level, canaries=planted before the fork servers started)  ->  level_of(report)

`attacks` are the programs, `canaries` what they are after, `promises` how the evidence is judged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from strop.errors import UserError
from strop.sandbox.node import attacks
from strop.sandbox.node.canaries import Canaries
from strop.sandbox.node.promises import CHECKS, MAX_PROCESSES, Evidence, Facts, Probe, Sight, namespaces_of
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest, RunResult

_MEMORY_MIB, _FILE_MIB = 64, 1  # limits of the attacks
_MOST_DISK_BYTES = 256 << 20  # that a private /tmp may hold; an attack that reserves so much got through
_TOGETHER_S = (0.1, 0.5, 2.5)  # how long two programs look for each other, until we have seen both: a machine may be busy
_GONE_WITHIN_S = 0.25  # of the reply: what a call started
_WALL_S = 10.0  # a busy machine is not a weak one; 0.2 s when it is idle


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What a self-test found at the level that was claimed."""

    claimed: IsolationLevel
    probes: tuple[Probe, ...]
    seconds: float

    def broken(self, level: IsolationLevel) -> tuple[Probe, ...]:
        """Those that `level` promises and that did not hold."""
        return tuple(probe for probe in self.probes if probe.level.rank <= level.rank and not probe.held)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "level": level_of(self)}

    def table(self) -> Table:
        """To print."""
        level = level_of(self)
        held = "nothing" if level is None else f"L{level.rank} {level.value}"
        table = Table(title=f"Self-test at L{self.claimed.rank} {self.claimed.value}: {held} holds ({self.seconds:.2f} s)")
        for name in ("", "probe", "level", "shows that", "what happened"):
            table.add_column(name)
        for probe in self.probes:
            mark = (
                "[green]held[/]"
                if probe.held
                else "[red]broken[/]"
                if probe.level.rank <= self.claimed.rank
                else "[dim]open[/]"
            )
            table.add_row(mark, probe.name, f"L{probe.level.rank}", probe.shows, probe.detail)
        return table


def level_of(report: ProbeReport) -> IsolationLevel | None:
    """The highest level, up to the claimed one, all of whose promises held; None when not even those of the lowest did."""
    return next((level for level in IsolationLevel if level.rank <= report.claimed.rank and not report.broken(level)), None)


def refusal(min_level: IsolationLevel, tried: Mapping[IsolationLevel, ProbeReport | str]) -> UserError:
    """The error that names what did not hold at each level that was tried, or why it could not start, and the remedy."""
    lines = [f"sandbox.min_level is '{min_level.value}' (L{min_level.rank}), and this machine does not give it:"]
    for level, found in tried.items():
        if isinstance(found, str):
            lines.append(f"  L{level.rank} {level.value} does not start: {found}")
        else:
            broken = "; ".join(f"{probe.name} ({probe.detail})" for probe in found.broken(level))
            lines.append(f"  L{level.rank} {level.value} does not hold: {broken}")
    lines += [f"To get L{level.rank}: {_REMEDY[level]}" for level in tried if level in _REMEDY]
    lower = [level for level in IsolationLevel if level.rank < min_level.rank]
    if lower:
        lines.append(f"Or accept less with sandbox.min_level = '{lower[0].value}': {_LOSS[lower[0]]}")
    return UserError("\n".join(lines))


async def probe(
    run: Callable[[RunRequest], Awaitable[RunResult]], claimed: IsolationLevel, *, canaries: Canaries | None = None
) -> ProbeReport:
    """Attack `run`, which claims to give `claimed`. All attacks run at once.

    Args:
        canaries: planted before the fork servers started; without them nothing is known of what those inherit.

    Raises:
        MachineError: from `run`.
    """
    if canaries is None:
        with Canaries() as planted:
            return await probe(run, claimed, canaries=planted)
    started_at = time.monotonic()
    evidence = await _attack(run, claimed, canaries)
    probes = tuple(check.judge(evidence) for check in CHECKS)
    return ProbeReport(claimed=claimed, probes=probes, seconds=time.monotonic() - started_at)


async def _attack(run: Callable[[RunRequest], Awaitable[RunResult]], claimed: IsolationLevel, canaries: Canaries) -> Evidence:
    mark = f"strop{secrets.token_hex(4)}"  # names of processes have room for 15 characters
    left, right, daemon = (f"{mark}{letter}" for letter in "abd")
    fills_disk = claimed.rank >= IsolationLevel.NAMESPACES.rank  # below it the disk is everyone's
    reach = {
        **canaries.addresses,
        "canary": canaries.secret,
        "file": str(canaries.file),
        "directory": str(canaries.directory),
        "supervisor": os.getpid(),
        "environment": hashlib.sha256(Path("/proc/self/environ").read_bytes()).hexdigest(),
    }
    bounds = {
        "memory_bytes": 4 * _MEMORY_MIB << 20,
        "file_bytes": _FILE_MIB << 20,
        "disk_bytes": _MOST_DISK_BYTES if fills_disk else 0,
        "processes": MAX_PROCESSES,
    }
    programs: dict[str, tuple[str, Facts]] = {
        "reach": (attacks.REACH, reach),
        "bounds": (attacks.BOUNDS, bounds),
        "daemon": (attacks.DAEMON, {"name": daemon}),
    }
    seen: dict[str, Sight] = {}
    facts: dict[str, Facts] = {}
    failures: dict[str, str] = {}
    num_daemons = 0

    async def attack(name: str, code: str, given: Facts) -> None:
        nonlocal num_daemons
        result = await run(
            RunRequest(
                code=code,
                stdin=json.dumps(dict(given)),
                wall_s=_WALL_S,
                memory_mib=_MEMORY_MIB,
                file_mib=_FILE_MIB,
                max_processes=MAX_PROCESSES if name == "bounds" else 4 * MAX_PROCESSES,
                profile="bare",
            )
        )
        if name == "daemon":
            num_daemons = await asyncio.to_thread(_reap, daemon)
        try:
            facts[name] = json.loads(result.text) if result.outcome is RunOutcome.STDOUT else {}
        except ValueError:
            facts[name] = {}
        if facts[name]:
            failures.pop(name, None)
        else:
            failures[name] = f"its program ended with {result.outcome} {result.reason}: {result.text[-200:].strip()}"

    async def meet() -> None:
        for seconds in _TOGETHER_S:
            watch = asyncio.create_task(_watch((left, right), seen))
            try:
                await asyncio.gather(
                    attack("left", attacks.NEIGHBOUR, {"mine": left, "other": right, "seconds": seconds}),
                    attack("right", attacks.NEIGHBOUR, {"mine": right, "other": left, "seconds": seconds}),
                )
            finally:
                watch.cancel()
            if len(seen) == len((left, right)):
                return

    await asyncio.gather(meet(), *(attack(name, *program) for name, program in programs.items()))
    return Evidence(
        facts=facts, failures=failures, called=canaries.called(), num_daemons=num_daemons, sights=tuple(seen.values())
    )


# What is seen from outside.


async def _watch(names: Sequence[str], seen: dict[str, Sight]) -> None:
    """Note the namespaces of the processes of these names, and of their parents, until each was seen."""
    while len(seen) < len(names):
        for name, pids in (await asyncio.to_thread(_named, *names)).items():
            if pids and name not in seen:
                sight = Sight(own=namespaces_of(pids[0]), parent=namespaces_of(_parent(pids[0])))
                if sight.own.keys() >= sight.parent.keys():  # else it died under our eyes, and this is not the whole of it
                    seen[name] = sight
        await asyncio.sleep(0.01)


def _named(*names: str) -> dict[str, list[int]]:
    """The living processes that gave themselves these names."""
    pids: dict[str, list[int]] = {name: [] for name in names}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            start, _, rest = Path(entry.path, "stat").read_text().rpartition(")")
        except OSError:  # it ended meanwhile, or is not ours to see
            continue
        name = start.partition("(")[2]
        if name in pids and not rest.startswith(" Z"):
            pids[name].append(int(entry.name))
    return pids


def _parent(pid: int) -> int:
    """0 when it ended meanwhile."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _reap(name: str) -> int:
    """How many processes of this name outlive the reply. They are killed then: nothing of a self-test stays."""
    deadline = time.monotonic() + _GONE_WITHIN_S
    while (pids := _named(name)[name]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(pids)


_REMEDY = {
    IsolationLevel.NAMESPACES: (
        "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 and user.max_user_namespaces above 0; on Ubuntu"
        " kernel.apparmor_restrict_unprivileged_userns=0); in a container --cap-add SYS_ADMIN, or --security-opt"
        " seccomp=unconfined and apparmor=unconfined."
    ),
    IsolationLevel.CONFINED: (
        "Linux 6.2 or later with `landlock` in /sys/kernel/security/lsm, and a container profile that allows the landlock_*"
        " system calls, as Docker's default one does since 23.0."
    ),
}
_LOSS = {
    IsolationLevel.NAMESPACES: "calls then share the empty network and the user namespace of their fork server.",
    IsolationLevel.CONFINED: "programs then see that other processes and files exist, unread, and share the disk.",
    IsolationLevel.PROCESS: "programs then can read your files and use your network; limits are all that is left.",
}
