"""What a code service owes: run untrusted code, compare answers, tell what happened. No word of learning here.

    RunRequest    -> RunResult     one program, in a sandbox of its own
    VerifyRequest -> PairVerdict*  pairs of mathematical answers, judged where no program ever ran
    session                        a notebook: cells that share their state, forked when a conversation branches

Four protocols, each the one before and more: `CodeRunner` runs programs, `CodeService` also verifies and keeps sessions,
`CodeNode` is a service on one machine that says how much it takes at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Protocol


def demand(name: str, value: object, kind: type | UnionType, *, hint: str = "") -> None:
    """Raises `TypeError`, naming the argument, when `value` is not of this kind. True and False are no numbers."""
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = kind.__name__ if isinstance(kind, type) else str(kind)
        raise TypeError(f"{name} is of type {type(value).__name__}; it has to be {expected}{hint}.")


class RunOutcome(StrEnum):
    """What became of a program, decided outside it. The last two are ours: never caused by a program."""

    STDOUT = "stdout"  # it printed something
    ECHO = "echo"  # it printed nothing; its last expression is shown as IPython would
    EMPTY = "empty"  # ended well, nothing to show
    ERROR = "error"  # an exception, or a non-zero exit
    TIMEOUT = "timeout"
    KILLED = "killed"  # `reason` says by what: memory, output, signal N, policy
    REJECTED = "rejected"  # the request itself is over a limit; never run
    OVERLOADED = "overloaded"  # admission control; the client tries again
    INTERNAL = "internal"

    @property
    def is_ours(self) -> bool:
        return self in (RunOutcome.OVERLOADED, RunOutcome.INTERNAL)


class IsolationLevel(StrEnum):
    """How far a program is kept from everything else; each level includes what the ones after it give."""

    STRICT = "strict"  # L3: every namespace fresh for each call
    NAMESPACES = "namespaces"  # L2: own pid, mount, ipc and user namespaces, an empty network; the default
    CONFINED = "confined"  # L1: Landlock, seccomp and limits without namespaces: what plain containers allow
    PROCESS = "process"  # L0: limits and a process group only: against accidents, not against intent

    @property
    def rank(self) -> int:
        """3 for L3 down to 0 for L0."""
        return 3 - list(IsolationLevel).index(self)

    @classmethod
    def _missing_(cls, value: object) -> IsolationLevel | None:
        return next((level for level in cls if value == f"L{level.rank}"), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One program and its limits."""

    code: str
    stdin: str = ""
    wall_s: float = 4.0  # from the start of the program; time in queues is not counted
    cpu_s: float | None = None  # of all its threads, in whole seconds; a second more than `wall_s` when None
    memory_mib: int = 512  # address space beyond the interpreter's own, for each process
    max_processes: int = 32  # threads count too
    file_mib: int = 16  # the largest file it may write
    output_bytes: int = 65_536  # head and tail are kept beyond it
    seed: int = 0  # of `random`, `os.urandom` and numpy; the hash seed is fixed: the same call gives the same text
    profile: str = ""  # which modules are already loaded where it runs; chosen by its imports when empty
    language: str = "python"
    session: str = ""  # the cell of a session; empty for a program of its own
    id: str = ""  # two requests of one client with the same id are one call; empty for no such promise

    def __post_init__(self) -> None:
        """Raises `TypeError` for a value of another type. Whether a limit is bearable is the service's to say."""
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or value is True or value is False:
                demand(name, value, kind)


_KINDS: dict[str, type | UnionType] = {
    **dict.fromkeys(("code", "stdin", "profile", "language", "session", "id"), str),
    **dict.fromkeys(("memory_mib", "max_processes", "file_mib", "output_bytes", "seed"), int),
    "wall_s": int | float,
    "cpu_s": int | float | None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimings:
    """Seconds. Only `run_s` counts against a limit."""

    queue_s: float = 0.0  # from arrival to a slot, over all queues
    setup_s: float = 0.0  # from the slot to the first instruction of the program
    run_s: float = 0.0  # from there to its end
    cpu_s: float = 0.0  # user and system, of the program and everything it started and waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What happened. `text` is what a reader may see: it holds no time, process id, address or path of the runner."""

    outcome: RunOutcome
    reason: str  # detail of KILLED, REJECTED, OVERLOADED and INTERNAL; empty otherwise
    text: str
    exit_code: int | None  # None when it did not exit by itself
    timings: RunTimings
    level: IsolationLevel
    peak_memory_bytes: int = 0  # the largest resident set among its processes
    node: str = ""


class PairVerdict(StrEnum):
    """What became of one comparison."""

    EQUAL = "equal"
    UNEQUAL = "unequal"
    UNREADABLE = "unreadable"  # one of the two is no mathematics
    TIMEOUT = "timeout"  # the pair's own doing: it was stopped at its own limit, alone
    INTERNAL = "internal"  # ours; tried again before it is said


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPair:
    """Two answers. With `differences`, pairs of expressions, they are equal, too, where sympy finds each of these to be 0."""

    gold: str
    answer: str
    differences: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Raises `TypeError` for what is no text."""
        demand("gold", self.gold, str)
        demand("answer", self.answer, str)
        demand("differences", self.differences, tuple)
        for index, difference in enumerate(self.differences):
            demand(f"differences[{index}]", difference, tuple)
            for text in difference:
                demand(f"differences[{index}]", text, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """Answers to compare with `math-verify`, in this order: it is not symmetric."""

    pairs: tuple[AnswerPair, ...]
    pair_wall_s: float = 2.0  # of each pair

    def __post_init__(self) -> None:
        """Raises `TypeError` for a value of another type."""
        demand("pairs", self.pairs, tuple)
        for index, pair in enumerate(self.pairs):
            if not isinstance(pair, AnswerPair):
                demand(f"pairs[{index}]", pair, AnswerPair)
        demand("pair_wall_s", self.pair_wall_s, int | float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Of a session as a whole; each cell has the limits of its own request besides."""

    memory_mib: int = 512
    max_processes: int = 32
    file_mib: int = 16
    seed: int = 0
    profile: str = "full"
    lease_s: float = 300.0  # it ends when no cell came for so long

    def __post_init__(self) -> None:
        """Raises `TypeError` for a value of another type."""
        for name in ("memory_mib", "max_processes", "file_mib", "seed"):
            demand(name, getattr(self, name), int)
        demand("profile", self.profile, str)
        demand("lease_s", self.lease_s, int | float)


class CodeRunner(Protocol):
    """Runs many programs at once. Every request is answered exactly once, within its own limit plus half a second."""

    async def run(self, request: RunRequest) -> RunResult:
        """A program's misbehaviour is a `RunResult`; raises `MachineError` only when the runner itself is lost."""

    async def close(self) -> None:
        """End every program that still runs, and the runner. Safe to call twice."""


class CodeService(CodeRunner, Protocol):
    """Also compares answers and keeps sessions. A cell is a `run` whose request names its session."""

    def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        """Yields (index of the pair, its verdict) as each is known; every index once, in any order.

        Raises `MachineError` only when the service itself is lost.
        """

    async def open_session(self, limits: SessionLimits) -> str:
        """The id of a new session: an interpreter whose state lasts from one cell to the next, errors included."""

    async def fork_session(self, session: str) -> str:
        """The id of a copy that shares nothing with `session` from here on.

        Raises `SessionLost` when the session does not exist any more.
        """

    async def close_session(self, session: str) -> None:
        """End it. Safe to call twice, and for a session that was lost."""


class CodeNode(CodeService, Protocol):
    """A service on one machine: what the front sends work to."""

    name: str
    level: IsolationLevel
    # How many calls it takes at once, which may change; further ones wait in the front, not here. Three times the
    # `max_running` that compute, so that one is at hand when another ends, and one more for each that sleeps.
    num_slots: int

    async def wait_lost(self) -> str:
        """Returns when the node is gone, with the reason. Calls in flight have raised `NodeLost` by then."""
