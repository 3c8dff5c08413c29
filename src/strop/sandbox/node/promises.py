"""What each level of isolation promises, and how the evidence of a self-test speaks for it.

What a program says of itself is believed only where it admits to have got through; whether a listener was called, a daemon
lives on or two programs share a namespace was seen from outside.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from strop.sandbox.protocol import IsolationLevel

MAX_PROCESSES = 8  # of the attack that counts them
_MOST_FILES = 1 << 20  # that a private /tmp may hold

Facts = Mapping[str, object]
Namespaces = Mapping[str, int]  # kind -> inode
Decision = tuple[bool, str]  # whether it held; what happened


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One attack and how it ended."""

    name: str
    shows: str  # what holds when it fails
    level: IsolationLevel  # the lowest that promises it
    held: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The namespaces of a program, and of the fork server that it came from."""

    own: Namespaces
    parent: Namespaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    facts: Mapping[str, Facts]  # by program: what each one printed
    failures: Mapping[str, str]  # by program: why it printed nothing
    called: set[str]  # listeners that were reached
    num_daemons: int  # alive after the reply
    sights: tuple[Sight, ...]  # of two programs; fewer if they were too short to be seen

    def errno(self, program: str, name: str) -> int:
        value = self.facts[program].get(name, 0)  # no answer is no proof
        return value if isinstance(value, int) else 0


def namespaces_of(pid: int) -> Namespaces:
    """Those that we may not see are left out."""
    found = {}
    for kind in ("pid", "mnt", "net", "ipc", "user"):
        try:
            found[kind] = os.stat(f"/proc/{pid}/ns/{kind}").st_ino
        except OSError:
            continue
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    shows: str
    level: IsolationLevel
    programs: tuple[str, ...] = ("reach",)
    decide: Callable[[Evidence], Decision]

    def judge(self, evidence: Evidence) -> Probe:
        failures = [evidence.failures[program] for program in self.programs if program in evidence.failures]
        held, detail = (False, "; ".join(failures)) if failures else self.decide(evidence)
        return Probe(name=self.name, shows=self.shows, level=self.level, held=held, detail=detail)


def _stopped(program: str, *attempts: str) -> Callable[[Evidence], Decision]:
    """Held when an error stopped each of these attempts."""

    def decide(evidence: Evidence) -> Decision:
        errors = {name: evidence.errno(program, name) for name in attempts}
        through = [name for name, number in errors.items() if not number]
        if through:
            return False, f"got through: {', '.join(through)}"
        return True, ", ".join(f"{name}: {errno.errorcode.get(number, number)}" for name, number in errors.items())

    return decide


def _network(evidence: Evidence) -> Decision:
    if evidence.called:
        return False, f"reached our listener: {', '.join(sorted(evidence.called))}"
    return _stopped("reach", "tcp", "udp", "unix", "abstract", "datagram")(evidence)


def _environment(evidence: Evidence) -> Decision:
    is_seen = evidence.facts["reach"].get("environment") is not False
    return not is_seen, "has our canary" if is_seen else "has nothing of ours"


def _daemon(evidence: Evidence) -> Decision:
    if evidence.facts["daemon"].get("started") != 1:
        stopped_by = errno.errorcode.get(evidence.errno("daemon", "detach"), "nothing")
        return False, f"could not be started ({stopped_by}), so nothing is known"
    return evidence.num_daemons == 0, "outlived the reply" if evidence.num_daemons else "ended with its call"


def _processes(evidence: Evidence) -> Decision:
    forks = evidence.errno("bounds", "forks")
    return evidence.errno("bounds", "processes") == errno.EAGAIN, f"{forks} forks with a limit of {MAX_PROCESSES}"


def _disk(evidence: Evidence) -> Decision:
    facts = evidence.facts["bounds"]
    if "disk" not in facts:
        return False, "the disk is everyone's"
    num_files = evidence.errno("bounds", "files")
    held = evidence.errno("bounds", "disk") == errno.ENOSPC and 0 < num_files <= _MOST_FILES
    return held, f"{evidence.errno('bounds', 'disk_bytes') >> 20} MiB in up to {num_files} files"


def _own_processes(evidence: Evidence) -> Decision:
    parent = evidence.facts["reach"].get("parent")
    return parent == 0, "sees no parent" if parent == 0 else f"sees its parent, {parent}"


def _neighbour(evidence: Evidence) -> Decision:
    left, right = evidence.facts["left"], evidence.facts["right"]
    if places := [*_list(left, "seen"), *_list(right, "seen")]:
        return False, f"found in {places[0]}"
    return True, "not found" if _were_together(evidence) else "not found; the two did not run at the same time"


def _were_together(evidence: Evidence) -> bool:
    left, right = evidence.facts["left"], evidence.facts["right"]
    return _number(left, "since") < _number(right, "until") and _number(right, "since") < _number(left, "until")


def _apart_from_us(evidence: Evidence) -> Decision:
    ours = namespaces_of(os.getpid())
    return _apart([(sight.own, ours) for sight in evidence.sights], ("pid", "mnt", "net", "ipc"))


def _apart_from_all(evidence: Evidence) -> Decision:
    """From the fork server, and from each other if they ran at the same time: inodes are used again."""
    pairs = [(sight.own, sight.parent) for sight in evidence.sights]
    if len(evidence.sights) == 2 and _were_together(evidence):
        pairs.append((evidence.sights[0].own, evidence.sights[1].own))
    return _apart(pairs, ("pid", "mnt", "net", "ipc", "user"))


def _apart(pairs: Sequence[tuple[Namespaces, Namespaces]], kinds: tuple[str, ...]) -> Decision:
    if not pairs:
        return False, "no program was seen while it ran"
    shared = [kind for kind in kinds if any(kind not in one or one[kind] == other.get(kind) for one, other in pairs)]
    return not shared, f"shared or unseen: {', '.join(shared)}" if shared else f"own {', '.join(kinds)}"


def _list(facts: Facts, name: str) -> list[object]:
    value = facts.get(name)
    return value if isinstance(value, list) else []


def _number(facts: Facts, name: str) -> float:
    value = facts.get(name)
    return value if isinstance(value, float) else 0.0


_L0, _L1 = IsolationLevel.PROCESS, IsolationLevel.CONFINED
_L2, _L3 = IsolationLevel.NAMESPACES, IsolationLevel.STRICT

CHECKS = (
    Check(name="environment", shows="nothing of our environment is inherited", level=_L0, decide=_environment),
    Check(
        name="memory",
        shows="memory has an end",
        level=_L0,
        programs=("bounds",),
        decide=_stopped("bounds", "memory", "mapping"),
    ),
    Check(
        name="file size",
        shows="no file grows past its limit",
        level=_L0,
        programs=("bounds",),
        decide=_stopped("bounds", "file"),
    ),
    Check(name="read", shows="files that are not listed cannot be read", level=_L1, decide=_stopped("reach", "read")),
    Check(
        name="write",
        shows="nothing outside its own directory changes",
        level=_L1,
        decide=_stopped("reach", "write", "truncate", "create", "chmod"),
    ),
    Check(name="environ of others", shows="/proc gives no environment away", level=_L1, decide=_stopped("reach", "environ")),
    Check(name="signals", shows="no signal reaches the service", level=_L1, decide=_stopped("reach", "signal")),
    Check(
        name="tracing",
        shows="no process of the service is traced or read",
        level=_L1,
        decide=_stopped("reach", "trace", "memory_of_others"),
    ),
    Check(
        name="limits of others",
        shows="nobody else is slowed down or limited",
        level=_L1,
        decide=_stopped("reach", "limits_of_others", "priority_of_others"),
    ),
    Check(
        name="own limits",
        shows="a limit stays where it is",
        level=_L1,
        decide=_stopped("reach", "raise_processes", "raise_memory"),
    ),
    Check(name="network", shows="no listener is reached: TCP, UDP, unix, abstract", level=_L1, decide=_network),
    Check(
        name="privileges",
        shows="no namespace, mount, io_uring or root to be had",
        level=_L1,
        decide=_stopped("reach", "unshare", "mount", "setns", "io_uring", "become_root"),
    ),
    Check(name="foreign ABI", shows="no way round the filter", level=_L1, decide=_stopped("reach", "foreign_abi")),
    Check(name="fork bomb", shows="processes have an end", level=_L1, programs=("bounds",), decide=_processes),
    Check(name="daemon", shows="nothing outlives its call", level=_L1, programs=("daemon",), decide=_daemon),
    Check(
        name="neighbours",
        shows="files of another call are out of sight",
        level=_L1,
        programs=("left", "right"),
        decide=_neighbour,
    ),
    Check(name="host files", shows="the host's files are out of sight", level=_L2, decide=_stopped("reach", "sight")),
    Check(name="processes of others", shows="it is alone in its pid namespace", level=_L2, decide=_own_processes),
    Check(name="disk", shows="/tmp is its own and has an end", level=_L2, programs=("bounds",), decide=_disk),
    Check(
        name="namespaces",
        shows="it shares no namespace with us",
        level=_L2,
        programs=("left", "right"),
        decide=_apart_from_us,
    ),
    Check(
        name="fresh namespaces",
        shows="two calls share no namespace",
        level=_L3,
        programs=("left", "right"),
        decide=_apart_from_all,
    ),
)
