"""What each level of isolation promises: the programs of the self-test that attack it, and how their evidence is judged.

A program reads its arguments from standard input. It reports an attempt as the errno that stopped it, or 0 for a success, which
does no harm. The report counts only where it admits a success. Whether a listener was called, a daemon survived or two programs
share a namespace is seen from outside.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.sandbox.protocol import IsolationLevel

PRELUDE = """
import ctypes, errno, json, os, sys
given = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
facts = {}

def attempt(name, action):
    try:
        action()
        facts[name] = 0
    except MemoryError:
        facts[name] = errno.ENOMEM
    except (OSError, ValueError) as error:  # resource raises ValueError for what may not be raised
        facts[name] = getattr(error, "errno", None) or errno.EPERM

def call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def in_child(action):
    # A success changes only a child process.
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if status:
        raise OSError(os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.EPERM, "refused")
"""

SUFFIX = "print(json.dumps(facts))\n"

REACH = """
import resource, socket

others = {pid for pid in (os.getppid(), given["supervisor"]) if pid not in (0, os.getpid())}
facts["environment"] = any(given["canary"] in value for value in os.environ.values())
facts["parent"] = os.getppid()

def attempt_on_others(name, action):
    facts[name] = errno.ESRCH
    for pid in others:
        attempt(name, lambda: action(pid))
        if not facts[name]:
            break

def read_environment(pid):
    open(f"/proc/{pid}/environ", "rb").read(1)

def read_memory(pid):
    # Without the right to read this is EPERM; with it, EFAULT for the address 0.
    vector = (ctypes.c_size_t * 2)(0, 1)
    if libc.process_vm_readv(pid, vector, 1, vector, 1, 0) < 0 and ctypes.get_errno() != errno.EFAULT:
        raise OSError(ctypes.get_errno(), "refused")

attempt("read", lambda: open(given["file"]).close())
attempt("sight", lambda: os.stat(given["file"]))
attempt("write", lambda: open(given["file"], "a").close())
attempt("truncate", lambda: os.truncate(given["file"], os.stat(given["file"]).st_size))
attempt("create", lambda: open(given["directory"] + "/planted", "w").close())
attempt("chmod", lambda: os.chmod(given["file"], 0o666))
attempt_on_others("environ", read_environment)
attempt_on_others("signal", lambda pid: os.kill(pid, 0))
attempt_on_others("trace", lambda pid: call(libc.ptrace, 0x4206, pid, 0, 0))  # PTRACE_SEIZE: nothing stops
attempt_on_others("memory_of_others", read_memory)
attempt_on_others("limits_of_others", lambda pid: resource.prlimit(pid, resource.RLIMIT_CPU))
attempt_on_others("priority_of_others", lambda pid: os.sched_setaffinity(pid, os.sched_getaffinity(0)))

attempt("tcp", lambda: socket.create_connection(("127.0.0.1", given["tcp"]), 1).sendall(b"x"))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", given["udp"])))
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect(given["unix"]))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + given["abstract"]))
attempt("datagram", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", given["datagram"]))

def mount():
    call(libc.mount, b"none", b".", b"tmpfs", ctypes.c_ulong(0), None)
    libc.umount2(b".", 2)

def raise_limit(kind):
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:  # else there is no limit to raise
        resource.setrlimit(kind, (hard + 1, hard + 1))

attempt("unshare", lambda: in_child(lambda: call(libc.unshare, 0x10000000)))  # CLONE_NEWUSER
attempt("mount", lambda: in_child(mount))
attempt("setns", lambda: call(libc.setns, 0, 0))
attempt("io_uring", lambda: call(libc.syscall, 425, 1, 0))
attempt("raise_processes", lambda: raise_limit(resource.RLIMIT_NPROC))
attempt("raise_memory", lambda: raise_limit(resource.RLIMIT_AS))
attempt("become_root", lambda: in_child(lambda: os.setresuid(0, 0, 0)))

def call_i386():
    import mmap
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex("b814000000" "cd80" "c3"))  # mov eax, getpid; int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()

if os.uname().machine == "x86_64":
    attempt("foreign_abi", lambda: in_child(call_i386))
else:
    facts["foreign_abi"] = errno.ENOSYS
"""

BOUNDS = """
import mmap

# Without isolation this may be a user's directory: remove only what is made here.
own = f"strop-attack-{os.urandom(8).hex()}"
os.mkdir(own)
os.chdir(own)

attempt("memory", lambda: bytearray(given["memory_bytes"]))
attempt("mapping", lambda: mmap.mmap(-1, given["memory_bytes"]))

def overfill(path):
    with open(path, "wb", buffering=0) as file:
        while file.tell() <= given["file_bytes"]:
            file.write(bytes(1 << 16))

attempt("file", lambda: overfill("large"))

def fill_disk():
    # Reserves space instead of writing: the limit is the same, in a tenth of the time.
    for number in range(given["disk_bytes"] // given["file_bytes"]):
        with open(f"part-{number}", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, given["file_bytes"])

if given["disk_bytes"]:
    attempt("disk", fill_disk)
    facts["disk_bytes"] = sum(os.path.getsize(name) for name in os.listdir("."))
facts["files"] = os.statvfs(".").f_files
for name in os.listdir("."):
    os.unlink(name)
os.chdir("..")
os.rmdir(own)

def fork_on():
    for _ in range(given["processes"] + 32):  # others may come and go where they are counted together
        if os.fork() == 0:
            os.read(gate, 1)
            os._exit(0)
        facts["forks"] += 1

facts["forks"] = 0
gate, hold = os.pipe()
attempt("processes", lambda: fork_on())
os.write(hold, bytes(facts["forks"]))
for _ in range(facts["forks"]):
    os.wait()
"""

DAEMON = """
import time
started, tell = os.pipe()

def detach():
    for leave in (os.setsid, os.setpgrp):
        try:
            leave()
        except OSError:
            pass
    if os.fork() == 0:
        libc.prctl(15, given["name"].encode(), 0, 0, 0)  # PR_SET_NAME
        os.write(tell, b"x")
        os.closerange(0, 256)
        time.sleep(30)
        os._exit(0)

attempt("detach", lambda: in_child(detach))
os.close(tell)
facts["started"] = len(os.read(started, 1))
"""

NEIGHBOUR = """
import time
libc.prctl(15, given["mine"].encode(), 0, 0, 0)
open(given["mine"], "w").close()
facts.update(since=time.monotonic(), seen=[])

def look(place, depth):
    try:
        names = os.listdir(place)
    except OSError:
        return
    if given["other"] in names:
        facts["seen"].append(place)
    for name in names if depth else ():
        look(os.path.join(place, name), depth - 1)

while time.monotonic() < facts["since"] + given["seconds"] and not facts["seen"]:
    for place in ("..", "/tmp", "/var/tmp", "/dev/shm"):
        look(place, 1)
    time.sleep(0.01)
facts["until"] = time.monotonic()
"""


MAX_PROCESSES = 8  # of the attack that counts them
_MOST_FILES = 1 << 20  # that a private /tmp may hold

Namespaces = Mapping[str, int]  # kind -> inode
Decision = tuple[bool, str]  # whether it held; what happened


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check and its result."""

    name: str
    shows: str  # what holds if the attack fails
    level: IsolationLevel  # the lowest level that promises it
    held: bool
    detail: str


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What the attacks printed, and what was seen from outside."""

    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by program: what each one printed
    failures: dict[str, str] = field(default_factory=dict)  # by program: why it printed nothing
    called: set[str] = field(default_factory=set)  # listeners that were reached
    num_daemons: int = 0  # alive after the reply
    # By name of a process: its namespaces and those of its fork server. Fewer than two if they ended before they were seen.
    namespaces: dict[str, tuple[Namespaces, Namespaces]] = field(default_factory=dict)


def namespaces_of(pid: int) -> Namespaces:
    """The namespaces of a process; hidden ones are left out."""
    found = {}
    for kind in ("pid", "mnt", "net", "ipc", "user"):
        try:
            found[kind] = os.stat(f"/proc/{pid}/ns/{kind}").st_ino
        except OSError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Check:
    """Holds as `decide` says, if its programs printed what they found."""

    name: str
    shows: str
    level: IsolationLevel
    decide: Callable[[Evidence], Decision]
    programs: tuple[str, ...] = ("reach",)

    def judge(self, evidence: Evidence) -> CheckResult:
        failures = [evidence.failures[program] for program in self.programs if program in evidence.failures]
        held, detail = (False, "; ".join(failures)) if failures else self.decide(evidence)
        return CheckResult(name=self.name, shows=self.shows, level=self.level, held=held, detail=detail)


def _stopped(*attempts: str, program: str = "reach") -> Callable[[Evidence], Decision]:
    """Holds if an error stopped each of the attempts."""

    def decide(evidence: Evidence) -> Decision:
        errors = {name: evidence.facts[program].get(name, 0) for name in attempts}  # no answer is no proof
        if through := [name for name, number in errors.items() if not number]:
            return False, f"got through: {', '.join(through)}"
        return True, ", ".join(f"{name}: {errno.errorcode.get(number, number)}" for name, number in errors.items())

    return decide


def _network(evidence: Evidence) -> Decision:
    if evidence.called:
        return False, f"reached our listener: {', '.join(sorted(evidence.called))}"
    return _stopped("tcp", "udp", "unix", "abstract", "datagram")(evidence)


def _environment(evidence: Evidence) -> Decision:
    is_seen = evidence.facts["reach"].get("environment") is not False
    return not is_seen, "has our canary" if is_seen else "has nothing of ours"


def _daemon(evidence: Evidence) -> Decision:
    if evidence.facts["daemon"].get("started") != 1:
        return False, "could not be started, so nothing is known"
    return evidence.num_daemons == 0, "outlived the reply" if evidence.num_daemons else "ended with its call"


def _processes(evidence: Evidence) -> Decision:
    facts = evidence.facts["bounds"]
    return facts.get("processes") == errno.EAGAIN, f"{facts.get('forks')} forks with a limit of {MAX_PROCESSES}"


def _disk(evidence: Evidence) -> Decision:
    facts = evidence.facts["bounds"]
    if "disk" not in facts:
        return False, "the disk is shared"
    held = facts["disk"] == errno.ENOSPC and 0 < facts["files"] <= _MOST_FILES
    return held, f"{facts['disk_bytes'] >> 20} MiB in up to {facts['files']} files"


def _own_processes(evidence: Evidence) -> Decision:
    parent = evidence.facts["reach"].get("parent")
    return parent == 0, "sees no parent" if parent == 0 else f"sees its parent, {parent}"


def _neighbour(evidence: Evidence) -> Decision:
    if places := [*evidence.facts["left"]["seen"], *evidence.facts["right"]["seen"]]:
        return False, f"found in {places[0]}"
    return True, "not found" if _were_together(evidence) else "not found; the two did not run at the same time"


def _were_together(evidence: Evidence) -> bool:
    left, right = evidence.facts["left"], evidence.facts["right"]
    return bool(left["since"] < right["until"] and right["since"] < left["until"])


def _apart_from_us(evidence: Evidence) -> Decision:
    ours = namespaces_of(os.getpid())
    return _apart([(own, ours) for own, _ in evidence.namespaces.values()], ("pid", "mnt", "net", "ipc"))


def _apart_from_all(evidence: Evidence) -> Decision:
    """From the fork server, and from each other if they ran at the same time: inode numbers are reused."""
    pairs = list(evidence.namespaces.values())
    if len(pairs) == 2 and _were_together(evidence):
        pairs.append((pairs[0][0], pairs[1][0]))
    return _apart(pairs, ("pid", "mnt", "net", "ipc", "user"))


def _apart(pairs: Sequence[tuple[Namespaces, Namespaces]], kinds: tuple[str, ...]) -> Decision:
    if not pairs:
        return False, "no program was seen while it ran"
    shared = [kind for kind in kinds if any(kind not in one or one[kind] == other.get(kind) for one, other in pairs)]
    return not shared, f"shared or unseen: {', '.join(shared)}" if shared else f"own {', '.join(kinds)}"


_L3, _L2, _L1, _L0 = IsolationLevel
_BOUNDS, _NEIGHBOURS = ("bounds",), ("left", "right")
_TO_OTHERS = _stopped("limits_of_others", "priority_of_others")
_PRIVILEGES = _stopped("unshare", "mount", "setns", "io_uring", "become_root")

CHECKS = (
    Check("environment", "nothing of our environment is inherited", _L0, _environment),
    Check("memory", "memory is limited", _L0, _stopped("memory", "mapping", program="bounds"), _BOUNDS),
    Check("file size", "no file grows past its limit", _L0, _stopped("file", program="bounds"), _BOUNDS),
    Check("read", "files that are not listed cannot be read", _L1, _stopped("read")),
    Check("write", "nothing outside its directory changes", _L1, _stopped("write", "truncate", "create", "chmod")),
    Check("environ of others", "/proc gives no environment away", _L1, _stopped("environ")),
    Check("signals", "no signal reaches the service", _L1, _stopped("signal")),
    Check("tracing", "no process of the service is traced or read", _L1, _stopped("trace", "memory_of_others")),
    Check("limits of others", "no other process is slowed down or limited", _L1, _TO_OTHERS),
    Check("own limits", "no limit can be raised", _L1, _stopped("raise_processes", "raise_memory")),
    Check("network", "no listener is reached: TCP, UDP, unix, abstract", _L1, _network),
    Check("privileges", "no namespace, mount, io_uring or root is available", _L1, _PRIVILEGES),
    Check("foreign ABI", "no other ABI avoids the filter", _L1, _stopped("foreign_abi")),
    Check("fork bomb", "the number of processes is limited", _L1, _processes, _BOUNDS),
    Check("daemon", "nothing outlives its call", _L1, _daemon, ("daemon",)),
    Check("neighbours", "files of another call are out of sight", _L1, _neighbour, _NEIGHBOURS),
    Check("host files", "the host's files are out of sight", _L2, _stopped("sight")),
    Check("processes of others", "it has its own pid namespace", _L2, _own_processes),
    Check("disk", "/tmp is private and limited", _L2, _disk, _BOUNDS),
    Check("namespaces", "it shares no namespace with us", _L2, _apart_from_us, _NEIGHBOURS),
    Check("fresh namespaces", "two calls share no namespace", _L3, _apart_from_all, _NEIGHBOURS),
)
