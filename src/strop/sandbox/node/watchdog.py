"""Looks at running programs from outside: who sleeps, and who holds more memory than all its processes together may."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_SHARE = 0.1  # of one core; below it a program is asleep


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What all processes of one call use together."""

    taken_at: float
    cpu_s: float
    anonymous_bytes: int  # pages that its processes share are counted in each: never too little
    pids: tuple[int, ...]

    def is_busy_since(self, before: Glance) -> bool:
        return self.cpu_s - before.cpu_s > _BUSY_SHARE * (self.taken_at - before.taken_at)


def glance(pid: int) -> Glance:
    """At the process `pid` and everything below it. Processes that end meanwhile count as nothing."""
    cpu_ticks, anonymous_bytes, pids = 0, 0, _tree(pid)
    for one in pids:
        fields = _read(f"/proc/{one}/stat").rpartition(")")[2].split()
        cpu_ticks += int(fields[11]) + int(fields[12]) if fields else 0
        pages = _read(f"/proc/{one}/statm").split()
        anonymous_bytes += (int(pages[1]) - int(pages[2])) * _PAGE_BYTES if pages else 0
    return Glance(taken_at=time.monotonic(), cpu_s=cpu_ticks / _TICKS_PER_S, anonymous_bytes=anonymous_bytes, pids=tuple(pids))


def own_bytes(pids: tuple[int, ...]) -> int:
    """Memory of these processes together, a page that several share counted once in all. Slow: walks their page tables."""
    total = 0
    for pid in pids:
        for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith("Pss_Anon:"):
                total += int(line.split()[1]) << 10
    return total


def _tree(pid: int) -> list[int]:
    found, new = [pid], [pid]
    while new:
        below: list[int] = []
        for one in new:
            for task in _tasks(one):
                below += [int(child) for child in _read(f"/proc/{one}/task/{task}/children").split()]
        found += below
        new = below
    return found


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return []


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
