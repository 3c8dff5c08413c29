"""Reads what the kernel says about the processes of a program. A process that has ended counts as nothing."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from strop.errors import MachineError
from strop.sandbox.inside.confine import WAKE

_TREE_FACTOR = 2  # all processes of a program together may hold so many times what one may hold
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SYS_RECVMSG = b"47"  # on x86_64


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStatus:
    """What all processes of one program do and hold together."""

    taken_at: float
    cpu_s: float  # also of the children that they waited for
    num_running: int  # threads that run, or wait for a processor
    anonymous_bytes: int  # shared pages are counted for each process, so this is never too low
    pids: tuple[int, ...]

    @classmethod
    def of(cls, pid: int, *, adopter: int = 0) -> Self:
        """Read the status of `pid` and of every process below it. Raises `OSError` when no descriptor is left for that.

        Args:
            adopter: the process that adopts its orphans, unless that is `pid`. Orphans stay in the process group of `pid`.
        """
        cpu_s, num_running, anonymous_bytes, pids = 0.0, 0, 0, [pid]
        pids += [one for one in children_of(adopter) if one != pid and stat_of(one)[2:3] == [str(pid)]] if adopter else []
        for one in pids:  # grows as children are found
            with contextlib.suppress(PermissionError):  # /proc may hide a process that changed its credentials
                cpu_s += cpu_s_in(stat_of(one))
                states = (_fields(f"/proc/{one}/task/{thread}/stat")[:1] for thread in _threads_of(one))
                num_running += sum(state in (["R"], ["D"]) for state in states)
                pids += children_of(one)
                anonymous_bytes += _resident_bytes(one)
        return cls(
            taken_at=time.monotonic(), cpu_s=cpu_s, num_running=num_running, anonymous_bytes=anonymous_bytes, pids=tuple(pids)
        )

    def holds_too_much(self, memory_mib: int) -> bool:
        """Whether all processes together hold more than they may when one may hold `memory_mib`."""
        allowed = _TREE_FACTOR * memory_mib << 20
        return self.anonymous_bytes > allowed and _own_bytes(self.pids) > allowed


class ProcessStatus:
    """The status of one process, through files that are opened once.

    So reading needs no new descriptor, and never reads another process with the same number.
    """

    def __init__(self, pid: int, stat: int, status: int, syscall: int, *, owner: int) -> None:
        self._stat = stat
        self._status = status
        self._syscall = syscall  # the system call of its first thread; -1 where the kernel does not show it
        self.pid = pid
        self.owner = owner  # its uid on this machine

    @classmethod
    def of(cls, pidfd: int) -> Self:
        """Raises `MachineError` when the process is dead or hidden."""
        with contextlib.ExitStack() as opened:
            try:
                pid = pid_of(pidfd)
                stat = _open(f"/proc/{pid}/stat", opened)
                status = _open(f"/proc/{pid}/status", opened)
                owner = os.stat(f"/proc/{pid}").st_uid
                try:
                    syscall = _open(f"/proc/{pid}/syscall", opened)
                except (FileNotFoundError, PermissionError):  # a kernel without it; a process that hides its memory
                    syscall = -1
                if pid_of(pidfd) != pid:
                    raise ProcessLookupError
            except (FileNotFoundError, ProcessLookupError) as error:
                raise MachineError("its process ended") from error
            except OSError as error:
                raise MachineError(f"the status of its process cannot be read ({error})") from error
            opened.pop_all()
        return cls(pid, stat, status, syscall, owner=owner)

    def close(self) -> None:
        """Safe to call twice."""
        for file in (self._stat, self._status, self._syscall):
            if file >= 0:
                os.close(file)
        self._stat = self._status = self._syscall = -1

    @property
    def stat(self) -> list[str]:
        """The same as `stat_of`, also for a dead process that no parent has waited for."""
        return _read_again(self._stat).rpartition(")")[2].split()

    @property
    def cpu_s(self) -> float:
        """CPU time of all its threads, and of the children that it waited for."""
        return cpu_s_in(self.stat)

    @property
    def peak_bytes(self) -> int:
        return _sum_kib(_read_again(self._status), ("VmHWM:",))

    @property
    def is_runnable(self) -> bool:
        """Whether its first thread runs, or waits for a processor."""
        return self.stat[:1] in (["R"], ["D"])

    @property
    def is_listening(self) -> bool:
        """Whether its first thread waits for the next packet on its line, or waits at all where the call is not shown."""
        try:
            words = os.pread(self._syscall, 256, 0).split() if self._syscall >= 0 else []
        except PermissionError:  # it hides its memory since then
            words = []
        except ProcessLookupError:
            return False
        return words[0] == _SYS_RECVMSG and int(words[1], 16) == WAKE if words else self.stat[:1] == ["S"]


class IdleUsage:
    """CPU time that a session uses between its cells, where it holds no slot and has no time limit.

    The CPU time of a process that ends without being waited for is lost. So each thread that runs when the supervisor looks is
    charged for the whole time since the last look.
    """

    def __init__(self) -> None:
        self._began_at = 0.0
        self._last: TreeStatus | None = None
        self.charged_s = 0.0  # in all its life

    def begin(self) -> None:
        self._began_at, self._last = time.monotonic(), None

    def charge(self, seen: TreeStatus) -> None:
        since, counted_s = (self._last.taken_at, seen.cpu_s - self._last.cpu_s) if self._last else (self._began_at, 0.0)
        num_running = min(seen.num_running, os.cpu_count() or 1)
        self.charged_s += max(counted_s, num_running * (seen.taken_at - since), 0.0)
        self._last = seen


def pid_of(pidfd: int) -> int:
    """The pid of the process in our namespace; 0 when it is dead."""
    with open(f"/proc/self/fdinfo/{pidfd}") as described:
        return max(0, int(described.read().rpartition("\nPid:\t")[2].split(maxsplit=1)[0]))


def stat_of(pid: int) -> list[str]:
    """/proc/PID/stat from the third field on. Empty when the process has ended."""
    return _fields(f"/proc/{pid}/stat")


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status by name. Empty when the process has ended."""
    return dict(line.split(":\t", 1) for line in _read(f"/proc/{pid}/status").splitlines() if ":\t" in line)


def children_of(pid: int) -> list[int]:
    return [int(child) for thread in _threads_of(pid) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def cpu_s_in(stat: list[str]) -> float:
    """CPU time of the process with this `stat_of`, and of the children that it waited for."""
    return sum(int(ticks) for ticks in stat[11:15]) / _TICKS_PER_S


def is_readable(descriptor: int) -> bool:
    """Whether there is something to read now; for a pidfd: whether its process is dead."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(events & select.POLLIN for _, events in poll.poll(0))  # POLLHUP does not count


@functools.lru_cache(maxsize=1)
def num_threads_of_user(second: int) -> int:
    """Threads of our user, read once in each `second`: reading /proc takes a millisecond or more."""
    count = 0
    for process in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if process.name.isdecimal() and process.stat().st_uid == os.geteuid():
                count += len(os.listdir(process / "task"))
    return count


def _own_bytes(pids: tuple[int, ...]) -> int:
    """Memory of these processes together; a page that several share is counted once. Slow: the kernel walks page tables."""
    total = 0
    for pid in pids:
        try:
            shares = _sum_kib(_read(f"/proc/{pid}/smaps_rollup"), ("Pss_Anon:", "Pss_Shmem:"))
        except PermissionError:  # only root may see the maps of a process that hides its memory
            shares = 0
        total += shares or _resident_bytes(pid)
    return total


def _resident_bytes(pid: int) -> int:
    """Anonymous memory and shared mappings, such as `mmap.mmap(-1, ...)`."""
    return _sum_kib(_read(f"/proc/{pid}/status"), ("RssAnon:", "RssShmem:"))


def _sum_kib(text: str, names: tuple[str, ...]) -> int:
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(names))


def _threads_of(pid: int) -> list[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def _fields(path: str) -> list[str]:
    return _read(path).rpartition(")")[2].split()


def _read(path: str) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path) as file:
        return file.read()
    return ""


def _read_again(file: int) -> str:
    with contextlib.suppress(ProcessLookupError):
        return os.pread(file, 16_384, 0).decode("utf-8", "replace")
    return ""


def _open(path: str, opened: contextlib.ExitStack) -> int:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, file)
    return file
