"""What each level of isolation promises, and how the evidence of a self-test is judged.

The report of a program counts only where it admits a success. Whether a listener was called, a daemon survived or two programs
share a namespace is seen from outside.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.sandbox.protocol import IsolationLevel

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
    """Holds if an error stopped each of the `attempts` of its first program, or as `decide` says."""

    name: str
    shows: str
    level: IsolationLevel
    programs: tuple[str, ...] = ("reach",)
    attempts: tuple[str, ...] = ()
    decide: Callable[[Evidence], Decision] | None = None

    def judge(self, evidence: Evidence) -> CheckResult:
        failures = [evidence.failures[program] for program in self.programs if program in evidence.failures]
        if failures:
            held, detail = False, "; ".join(failures)
        elif self.decide is not None:
            held, detail = self.decide(evidence)
        else:
            held, detail = _all_stopped(evidence.facts[self.programs[0]], self.attempts)
        return CheckResult(name=self.name, shows=self.shows, level=self.level, held=held, detail=detail)


def _all_stopped(facts: Mapping[str, Any], attempts: Sequence[str]) -> Decision:
    errors = {name: facts.get(name, 0) for name in attempts}  # no answer is no proof
    if through := [name for name, number in errors.items() if not number]:
        return False, f"got through: {', '.join(through)}"
    return True, ", ".join(f"{name}: {errno.errorcode.get(number, number)}" for name, number in errors.items())


def _network(evidence: Evidence) -> Decision:
    if evidence.called:
        return False, f"reached our listener: {', '.join(sorted(evidence.called))}"
    return _all_stopped(evidence.facts["reach"], ("tcp", "udp", "unix", "abstract", "datagram"))


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
_TO_OTHERS = ("limits_of_others", "priority_of_others")
_PRIVILEGES = ("unshare", "mount", "setns", "io_uring", "become_root")

CHECKS = (
    Check("environment", "nothing of our environment is inherited", _L0, decide=_environment),
    Check("memory", "memory is limited", _L0, _BOUNDS, ("memory", "mapping")),
    Check("file size", "no file grows past its limit", _L0, _BOUNDS, ("file",)),
    Check("read", "files that are not listed cannot be read", _L1, attempts=("read",)),
    Check("write", "nothing outside its directory changes", _L1, attempts=("write", "truncate", "create", "chmod")),
    Check("environ of others", "/proc gives no environment away", _L1, attempts=("environ",)),
    Check("signals", "no signal reaches the service", _L1, attempts=("signal",)),
    Check("tracing", "no process of the service is traced or read", _L1, attempts=("trace", "memory_of_others")),
    Check("limits of others", "no other process is slowed down or limited", _L1, attempts=_TO_OTHERS),
    Check("own limits", "no limit can be raised", _L1, attempts=("raise_processes", "raise_memory")),
    Check("network", "no listener is reached: TCP, UDP, unix, abstract", _L1, decide=_network),
    Check("privileges", "no namespace, mount, io_uring or root is available", _L1, attempts=_PRIVILEGES),
    Check("foreign ABI", "no other ABI avoids the filter", _L1, attempts=("foreign_abi",)),
    Check("fork bomb", "the number of processes is limited", _L1, _BOUNDS, decide=_processes),
    Check("daemon", "nothing outlives its call", _L1, ("daemon",), decide=_daemon),
    Check("neighbours", "files of another call are out of sight", _L1, _NEIGHBOURS, decide=_neighbour),
    Check("host files", "the host's files are out of sight", _L2, attempts=("sight",)),
    Check("processes of others", "it has its own pid namespace", _L2, decide=_own_processes),
    Check("disk", "/tmp is private and limited", _L2, _BOUNDS, decide=_disk),
    Check("namespaces", "it shares no namespace with us", _L2, _NEIGHBOURS, decide=_apart_from_us),
    Check("fresh namespaces", "two calls share no namespace", _L3, _NEIGHBOURS, decide=_apart_from_all),
)
