"""The host as an attack would find it: secrets to steal, doors to knock at; and what of it can be counted from outside."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SETTLE_S = 3.0  # namespaces and their memory are freed asynchronously: 1-2 s on an idle machine
_SAMPLES_S = 0.02
_SHARED_MEMORY_SLACK_MIB = 24  # less than half of what one call may fill; other programs of the machine use some too
_RESIDENT_SLACK_MIB = 32  # an input of 8 MB passes through several hands


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    pid: int
    started: str  # in clock ticks
    parent: int
    is_zombie: bool
    name: str

    @property
    def identity(self) -> tuple[int, str]:
        return self.pid, self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one process holds; -1 where the kernel does not let us see it."""

    num_descriptors: int
    num_mounts: int
    resident_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a call could leave behind, at a moment of rest."""

    processes: dict[tuple[int, str], Usage]  # this one and all below it
    servants: frozenset[tuple[int, str]]  # those that have started others: the parts of the service
    marked_processes: frozenset[int]
    num_directories: int  # those that the sandbox has made for calls, of which some wait for their call
    files: frozenset[str]
    system_v: frozenset[str]
    shared_memory_mib: int

    def is_like(self, other: Snapshot) -> bool:
        """Whether nothing moves: as many processes, which hold as much."""
        lasting = self.processes.keys() & other.processes.keys()
        return (
            (len(self.processes), self.num_directories) == (len(other.processes), other.num_directories)
            and all(self.processes[key] == other.processes[key] for key in lasting)
            and (self.marked_processes, self.files, self.system_v) == (other.marked_processes, other.files, other.system_v)
        )

    def leftovers_since(self, before: Snapshot, *, counts_memory: bool = True) -> list[str]:
        """What there is more of than `before`."""
        found = []
        if (more := len(self.processes) - len(before.processes)) > 0:
            found.append(f"{more} processes are left")
        if (more := self.num_directories - before.num_directories) > 0:
            found.append(f"{more} working directories are left")
        found += [f"the service lost its process {pid}" for pid, _ in sorted(before.servants - self.servants)]
        found += [f"process {pid} of the program is left" for pid in sorted(self.marked_processes)]
        found += [f"the file {path} is left" for path in sorted(self.files - before.files)]
        found += [f"System V object is left: {line}" for line in sorted(self.system_v - before.system_v)]
        for key in self.processes.keys() & before.processes.keys():
            now, then = self.processes[key], before.processes[key]
            if now.num_descriptors > then.num_descriptors >= 0:
                found.append(f"process {key[0]} holds {now.num_descriptors - then.num_descriptors} descriptors more")
            if now.num_mounts > then.num_mounts >= 0:
                found.append(f"process {key[0]} sees {now.num_mounts - then.num_mounts} mounts more")
            if counts_memory and now.resident_mib > then.resident_mib + _RESIDENT_SLACK_MIB:
                found.append(f"process {key[0]} grew from {then.resident_mib} to {now.resident_mib} MiB")
        if self.shared_memory_mib > before.shared_memory_mib + _SHARED_MEMORY_SLACK_MIB:
            found.append(f"shared memory grew from {before.shared_memory_mib} to {self.shared_memory_mib} MiB")
        return found


class Host:
    """Canaries and listeners in this process and around it, and snapshots of what they and the kernel show.

    Make it before the sandbox starts: its canary has to be in the environment by then. It makes TMPDIR a directory of its own,
    so that whatever the sandbox leaves there is seen.

    Args:
        settle_s: how long to wait for what is freed late.
    """

    def __init__(self, *, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self.mark = f"hostile-{secrets.token_hex(3)}"  # of processes (at most 15 bytes) and files that a program makes
        self._canaries = {name: f"canary-{name}-{secrets.token_hex(8)}" for name in ("env", "argv", "file", "code", "stdin")}
        os.environ["STROP_TEST_SECRET"] = self._canaries["env"]
        self._root = Path(tempfile.mkdtemp(prefix="strop-host-", dir="/tmp"))
        self._temporary = self._root / "tmp"
        self._temporary.mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(self._temporary)
        self._open = self._root / "open"  # for everybody to read, write and delete
        self._open.mkdir()
        self._secret = self._open / "answers.txt"
        self._secret.write_text(self._canaries["file"])
        for path, mode in ((self._root, 0o755), (self._open, 0o777), (self._secret, 0o666)):
            path.chmod(mode)
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self._abstract = _unix_listener(f"\0{self.mark}")
        self._unix = _unix_listener(str(self._open / "socket"))
        self._listeners = {"TCP": self._tcp, "UDP": self._udp, "abstract": self._abstract, "unix": self._unix}
        for listener in self._listeners.values():
            listener.setblocking(False)
        self._untouched = self._open_files()

    @property
    def facts(self) -> dict[str, str | int]:
        """What an attacker may have guessed: name -> value. Programs write `HOST_` before the name."""
        return {
            "MARK": self.mark,
            "PID": os.getpid(),
            "SECRET_FILE": str(self._secret),
            "OPEN_DIRECTORY": str(self._open),
            "TCP_PORT": self._tcp.getsockname()[1],
            "UDP_PORT": self._udp.getsockname()[1],
            "ABSTRACT": f"\0{self.mark}",
            "UNIX_SOCKET": str(self._open / "socket"),
        }

    def fill(self, code: str) -> str:
        """`code` with the facts that it names."""
        for name, value in self.facts.items():
            code = code.replace(f"HOST_{name}", repr(value))
        return code

    @property
    def honest_call(self) -> tuple[str, str, str]:
        """Code, stdin and text of a call that trusts us with its secrets."""
        return f"secret = {self._canaries['code']!r}\nprint(1, len(input()))", self._canaries["stdin"], "1 29\n"

    def canaries_in(self, text: str) -> list[str]:
        return [name for name, canary in self._canaries.items() if canary in text or canary[::-1] in text]

    def touches(self) -> list[str]:
        """What reached the doors and the open directory since the last time."""
        found = []
        for name, listener in self._listeners.items():
            try:
                if name == "UDP":
                    listener.recvfrom(16)
                else:
                    listener.accept()[0].close()
            except BlockingIOError:
                continue
            found.append(f"a program reached the {name} listener of the host")
        if self._open_files() != self._untouched:
            found.append(f"a program changed {self._open} of the host")
        return found

    def at_rest(self) -> Snapshot:
        """A snapshot of when nothing moves any more, or the last one before patience ends."""
        return self._settle(lambda now, last: now.is_like(last))

    def after(self, before: Snapshot) -> Snapshot:
        """A snapshot of when everything is as `before`, or the last one before patience ends.

        As many processes, not fewer: one that is left must not hide behind one that has yet to be started.
        """
        return self._settle(
            lambda now, last: (
                now.is_like(last)
                and (len(now.processes), now.num_directories) == (len(before.processes), before.num_directories)
                and not now.leftovers_since(before)
            )
        )

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        subprocess.run(["rm", "-rf", str(self._root)], check=True)  # whatever a program may have built in there

    def _settle(self, is_settled: Callable[[Snapshot, Snapshot], bool]) -> Snapshot:
        deadline = time.monotonic() + self._settle_s
        last, now = self._snapshot(), None
        while now is None or (not is_settled(now, last) and time.monotonic() < deadline):
            time.sleep(_SAMPLES_S)
            last, now = (now or last), self._snapshot()
        return now

    def _snapshot(self) -> Snapshot:
        everyone = processes()
        family = _family(everyone)
        parents = {process.parent for process in family}
        return Snapshot(
            processes={process.identity: _usage(process.pid) for process in family},
            servants=frozenset(process.identity for process in family if process.pid in parents),
            marked_processes=frozenset(
                process.pid for process in everyone if process.name == self.mark and not process.is_zombie
            ),
            num_directories=len(os.listdir(self._temporary)),
            files=frozenset(self._files()),
            system_v=frozenset(_system_v()),
            shared_memory_mib=_shared_memory_mib(),
        )

    def _files(self) -> list[str]:
        """What lies in any working directory; elsewhere, what carries the mark."""
        found = []
        for directory in self._temporary.iterdir():
            try:
                found += [f"working directory/{name}" for name in os.listdir(directory)]
            except FileNotFoundError:
                continue
            except PermissionError:
                found.append("working directory/(closed)")
        for place in ("/", "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run", str(Path.home()), str(Path.cwd())):
            try:
                found += [f"{place}/{name}" for name in os.listdir(place) if self.mark in name]
            except OSError:  # not on every machine, and not for everybody
                continue
        return found

    def _open_files(self) -> dict[str, tuple[int, int, str]]:
        return {
            path.name: (path.lstat().st_mode, path.lstat().st_uid, path.read_text() if path.is_file() else "")
            for path in self._open.iterdir()
        }


def _unix_listener(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    if not address.startswith("\0"):
        os.chmod(address, 0o666)
    return listener


def processes() -> list[Process]:
    """Every process that this one can see."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        before, _, after = stat.rpartition(")")
        fields = after.split()
        found.append(
            Process(
                pid=int(name),
                started=fields[19],
                parent=int(fields[1]),
                is_zombie=fields[0] == "Z",
                name=before.partition("(")[2],
            )
        )
    return found


def _family(everyone: list[Process]) -> list[Process]:
    """This process and all below it, but for the dead that it has adopted: elsewhere init would have buried them."""
    children: dict[int, list[Process]] = {}
    for process in everyone:
        if process.is_zombie and process.parent == os.getpid():
            continue
        children.setdefault(process.parent, []).append(process)
    family, parents = [process for process in everyone if process.pid == os.getpid()], [os.getpid()]
    while parents:
        below = children.get(parents.pop(), [])
        family += below
        parents += [process.pid for process in below]
    return family


def _usage(pid: int) -> Usage:
    def count(read: Callable[[], int]) -> int:
        try:
            return read()
        except OSError:  # another user's, or about to end
            return -1

    pages_per_mib = (1 << 20) // os.sysconf("SC_PAGE_SIZE")
    return Usage(
        num_descriptors=count(lambda: len(os.listdir(f"/proc/{pid}/fd"))),
        num_mounts=count(lambda: Path(f"/proc/{pid}/mountinfo").read_bytes().count(b"\n")),
        resident_mib=count(lambda: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) // pages_per_mib),
    )


def _system_v() -> list[str]:
    """Shared memory, semaphores and message queues: kind, key and id of each."""
    return [
        f"{kind} {' '.join(line.split()[:2])}"
        for kind in ("shm", "sem", "msg")
        for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
    ]


def _shared_memory_mib() -> int:
    """Of all tmpfs and memory files of the machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) >> 10
    raise ValueError("/proc/meminfo has no line Shmem")
