"""What the kernel says of the processes of a program. One that ended meanwhile counts as nothing."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass

_TREE_FACTOR = 2  # all processes of a program together may hold so many times what one may
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What all processes of one program do and hold together."""

    taken_at: float
    cpu_s: float
    is_running: bool  # at least one thread is on a processor, or wants to be
    anonymous_bytes: int  # pages that its processes share are counted in each: never too little
    pids: tuple[int, ...]

    def holds_too_much(self, memory_mib: int) -> bool:
        """Whether it holds more than all processes of a program may when one may hold `memory_mib`."""
        allowed = _TREE_FACTOR * memory_mib << 20
        return self.anonymous_bytes > allowed and _own_bytes(self.pids) > allowed


def glance(pid: int, *, adopter: int = 0) -> Glance:
    """At the process `pid` and everything below it. Raises `OSError` when there is no descriptor left to look through.

    Args:
        adopter: the process that its orphans become children of, unless that is `pid`; they stay in its process group.
    """
    ticks, is_running, anonymous_bytes, pids = 0, False, 0, [pid]
    pids += [one for one in children_of(adopter) if one != pid and _group(one) == pid] if adopter else []
    for one in pids:  # grows as its children are found
        try:
            for thread in _threads_of(one):
                if fields := _fields(f"/proc/{one}/task/{thread}/stat"):
                    ticks += int(fields[11]) + int(fields[12])
                    is_running |= fields[0] in "RD"
            pids += children_of(one)
            anonymous_bytes += _resident_bytes(one)
        except PermissionError:  # /proc hides it, as it may what changed its credentials; the others are still to be seen
            continue
    return Glance(
        taken_at=time.monotonic(),
        cpu_s=ticks / _TICKS_PER_S,
        is_running=is_running,
        anonymous_bytes=anonymous_bytes,
        pids=tuple(pids),
    )


def pid_of(pidfd: int) -> int:
    """The process as this one numbers it; 0 when it is dead."""
    with open(f"/proc/self/fdinfo/{pidfd}") as described:
        return max(0, int(described.read().rpartition("\nPid:\t")[2].split(maxsplit=1)[0]))


def stat_of(pid: int) -> list[str]:
    """/proc/PID/stat from the third field on. Empty when it is gone."""
    return _fields(f"/proc/{pid}/stat")


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status by name. Empty when it is gone."""
    return dict(line.split(":\t", 1) for line in _read(f"/proc/{pid}/status").splitlines() if ":\t" in line)


def children_of(pid: int) -> list[int]:
    return [int(child) for thread in _threads_of(pid) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def num_running_threads(pids: Iterable[int]) -> int:
    """Threads of these processes that are on a processor, or would be if one were free."""
    return sum(_fields(f"/proc/{pid}/task/{thread}/stat")[:1] in (["R"], ["D"]) for pid in pids for thread in _threads_of(pid))


def tree_cpu_s(pids: Iterable[int]) -> float:
    """Of these processes, and of what they started and waited for."""
    return sum(cpu_s_in(stat_of(pid)) for pid in pids)


def cpu_s_in(stat: list[str]) -> float:
    """Of a process with this `stat_of`, and of what it started and waited for."""
    return sum(int(ticks) for ticks in stat[11:15]) / _TICKS_PER_S


def is_readable(descriptor: int) -> bool:
    """Whether there is something to read now; of a pidfd: whether its process is dead."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(events & select.POLLIN for _, events in poll.poll(0))  # not of one that nobody writes to any more


def _own_bytes(pids: tuple[int, ...]) -> int:
    """Memory of these processes together, a page that several share counted once in all. Slow: walks their page tables."""
    total = 0
    for pid in pids:
        try:
            shares = _sum_kib(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
        except PermissionError:  # nobody but root may see the maps of a process that forbade it
            shares = 0
        total += shares or _resident_bytes(pid)
    return total


def _resident_bytes(pid: int) -> int:
    """Anonymous memory and that which it maps shared, as `mmap.mmap(-1, ...)` does."""
    return _sum_kib(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:"))


def _sum_kib(path: str, names: tuple[str, ...]) -> int:
    return sum(int(line.split()[1]) << 10 for line in _read(path).splitlines() if line.startswith(names))


def _group(pid: int) -> int:
    fields = stat_of(pid)
    return int(fields[2]) if fields else 0


def _threads_of(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _fields(path: str) -> list[str]:
    return _read(path).rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""
