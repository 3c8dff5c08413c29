"""The protocols of a code service: run untrusted code, compare answers, keep sessions; and the limits of requests.

    RunRequest    -> RunResult     one program, in its own sandbox
    VerifyRequest -> PairVerdict*  pairs of mathematical answers, judged in processes that run no program
    session                        a notebook: cells that share their state, forked when a conversation branches

`CodeRunner` runs programs, `CodeService` also verifies and keeps sessions, `CodeNode` is a service on one machine with a number
of slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Protocol, Self, get_origin, get_type_hints

from strop.errors import UserError


def demand(name: str, value: object, kind: type | UnionType, *, hint: str = "") -> None:
    """Raise `TypeError`, which names the argument, when `value` is not of this kind. True and False are not numbers."""
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = kind.__name__ if isinstance(kind, type) else str(kind)
        raise TypeError(f"{name} is of type {type(value).__name__}; it has to be {expected}{hint}.")


@cache
def _kinds(owner: type) -> dict[str, type | UnionType]:
    """The types that the fields of a class may have at run time. An integer is also a float."""
    hints = {name: get_origin(hint) if get_origin(hint) is tuple else hint for name, hint in get_type_hints(owner).items()}
    return {name: int | hint if hint in (float, float | None) else hint for name, hint in hints.items()}


class _Typed:
    """Raises `TypeError` for a value of another type. The service checks the limits."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():  # type: ignore[arg-type]  # a class is hashable
            value = getattr(self, name)
            if not isinstance(value, kind) or value is True or value is False:
                demand(name, value, kind)


class RunOutcome(StrEnum):
    """The outcome of a program, decided outside of it. The last two are our faults: no program causes them."""

    STDOUT = "stdout"  # it printed something
    ECHO = "echo"  # it printed nothing; its last expression is shown as in IPython
    EMPTY = "empty"  # it ended without an error and shows nothing
    ERROR = "error"  # an exception or a non-zero exit code
    TIMEOUT = "timeout"
    KILLED = "killed"  # `reason` is memory, output, signal N or policy
    REJECTED = "rejected"  # the request is over a limit and does not run
    OVERLOADED = "overloaded"  # the service is full; the client tries again
    INTERNAL = "internal"

    @property
    def is_ours(self) -> bool:
        return self in (RunOutcome.OVERLOADED, RunOutcome.INTERNAL)


class IsolationLevel(StrEnum):
    """How strongly a program is isolated; each level includes the ones after it."""

    STRICT = "strict"  # L3: every namespace is new for each call
    NAMESPACES = "namespaces"  # L2: new pid, mount, ipc and user namespaces, an empty network; the default
    CONFINED = "confined"  # L1: Landlock, seccomp and limits without namespaces, as plain containers allow
    PROCESS = "process"  # L0: only limits and a process group: against accidents, not against attacks

    @property
    def rank(self) -> int:
        """3 for L3 down to 0 for L0."""
        return 3 - list(IsolationLevel).index(self)

    @classmethod
    def _missing_(cls, value: object) -> IsolationLevel | None:
        return next((level for level in cls if value == f"L{level.rank}"), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(_Typed):
    """One program and its limits."""

    code: str
    stdin: str = ""
    wall_s: float = 4.0  # from the start of the program; time in queues is not counted
    cpu_s: float | None = None  # of all its threads, in whole seconds; `wall_s` and one second if None
    memory_mib: int = 512  # address space of each process, beyond that of the interpreter
    max_processes: int = 32  # threads count too
    file_mib: int = 16  # the largest file it may write
    output_bytes: int = 65_536  # head and tail are kept beyond it
    seed: int = 0  # of `random`, `os.urandom` and numpy. Equal calls give equal texts: the hash seed is fixed
    profile: str = ""  # which modules are loaded before it starts; chosen by its imports when empty
    language: str = "python"
    session: str = ""  # the session of a cell; empty for a program
    id: str = ""  # two requests of one client with the same id run once; empty for no id


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimings:
    """Seconds. Only `run_s` counts against a limit."""

    queue_s: float = 0.0  # from arrival to a slot, over all queues
    setup_s: float = 0.0  # from the slot to the first instruction of the program
    run_s: float = 0.0  # from there to its end
    cpu_s: float = 0.0  # user and system, of the program and the children that it waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What happened. `text` may be shown: it holds no time, process id, address or path of the runner."""

    outcome: RunOutcome
    reason: str  # detail of KILLED, REJECTED, OVERLOADED and INTERNAL; empty otherwise
    text: str
    exit_code: int | None  # None when it did not exit by itself
    timings: RunTimings
    level: IsolationLevel
    peak_memory_bytes: int = 0  # the largest resident set among its processes
    node: str = ""

    @classmethod
    def not_run(cls, outcome: RunOutcome, reason: str, *, level: IsolationLevel) -> RunResult:
        """The result of a program that did not run. Only a mistake of the program itself is shown to the policy."""
        text = f"Not run: {reason}." if outcome is RunOutcome.REJECTED else ""
        return cls(outcome=outcome, reason=reason, text=text, exit_code=None, timings=RunTimings(), level=level)


class PairVerdict(StrEnum):
    """The verdict on one pair of answers."""

    EQUAL = "equal"
    UNEQUAL = "unequal"
    UNREADABLE = "unreadable"  # one of the two is not mathematics
    TIMEOUT = "timeout"  # stopped at the limit of this pair
    INTERNAL = "internal"  # our fault, after a second try


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPair(_Typed):
    """Two answers. They are also equal if there are `differences`, pairs of expressions, and sympy finds each to be 0."""

    gold: str
    answer: str
    differences: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest(_Typed):
    """Answers to compare with `math-verify`, in this order: it is not symmetric."""

    pairs: tuple[AnswerPair, ...]
    pair_wall_s: float = 2.0  # of each pair

    def __post_init__(self) -> None:
        super(VerifyRequest, self).__post_init__()  # a dataclass with slots is another class than its body sees
        for index, pair in enumerate(self.pairs):
            demand(f"pairs[{index}]", pair, AnswerPair)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits(_Typed):
    """The limits of a whole session; each cell also has the limits of its request."""

    memory_mib: int = 512
    max_processes: int = 32
    file_mib: int = 16
    seed: int = 0
    profile: str = "full"
    lease_s: float = 300.0  # it ends after so long without a cell


class AsyncContext(ABC):
    """Use as `async with`: `start` at its beginning, `close` at its end."""

    async def start(self) -> None:  # noqa: B027 - optional
        """Get ready. Nothing to do, unless a subclass says otherwise."""

    @abstractmethod
    async def close(self) -> None:
        """Release what `start` acquired."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class CodeRunner(Protocol):
    """Runs many programs at once. Every request is answered exactly once, within its own limit plus half a second."""

    async def run(self, request: RunRequest) -> RunResult:
        """Misbehaviour of a program is a `RunResult`; raises `MachineError` only when the runner is lost."""

    async def close(self) -> None:
        """End every program that still runs, and the runner. Safe to call twice."""


class CodeService(CodeRunner, Protocol):
    """Also compares answers and keeps sessions. A cell is a `run` whose request names its session."""

    def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        """Yields (index of the pair, its verdict) as each is known; every index once, in any order.

        Raises `MachineError` only when the service is lost.
        """

    async def open_session(self, limits: SessionLimits) -> str:
        """Return the id of a new session: an interpreter whose state lasts from cell to cell, also after errors."""

    async def fork_session(self, session: str) -> str:
        """Return the id of a copy that shares nothing with `session`.

        Raises:
            MachineError: the session cannot be forked, and goes on.
            SessionLost: the session no longer exists.
        """

    async def close_session(self, session: str) -> None:
        """End it. Safe to call twice, and for a session that was lost."""


class CodeNode(CodeService, Protocol):
    """The supervisor of one machine, as the queue before it sees it."""

    name: str
    level: IsolationLevel
    # How many calls it accepts at once, which may change; others wait in the queue. Three times `max_running`, so that the
    # next call is ready when one ends, and one more for each that sleeps.
    num_slots: int

    async def wait_lost(self) -> str:
        """Return the reason when the node is lost. Calls in flight have raised `NodeLost` by then."""


# The limits of one request, checked before anything is spent on it.

MAX_CODE_BYTES = 262_144
MAX_STDIN_BYTES = 8_000_000
MAX_WALL_S = 600.0
MAX_MEMORY_MIB = 65_536
MAX_PROCESSES = 1024
MAX_FILE_MIB = 4096
MAX_OUTPUT_BYTES = 8_000_000
MAX_LEASE_S = 86_400.0
MAX_CASES = 1024  # tests of one program
NUM_PAIRS = 32  # in one call and one child: more would amortise the fork better, but wait longer for a pair that hangs
_MAX_ANSWER_BYTES = 65_536  # a longer answer to verify is unreadable
_MAX_WORD_BYTES = 256
_PROFILES = ("bare", "numpy", "full")  # of programs


def run_refusal(request: RunRequest) -> str:
    """Why the request is refused; empty if it is not. Takes 2 us for a request within the limits."""
    return (
        _text_refusal("the code", request.code, MAX_CODE_BYTES)
        or ("the code holds a NUL character" if "\0" in request.code else "")
        or _text_refusal("the input", request.stdin, MAX_STDIN_BYTES)
        or _number_refusal("wall_s", request.wall_s, MAX_WALL_S)
        or ("" if request.cpu_s is None else _number_refusal("cpu_s", request.cpu_s, MAX_WALL_S * MAX_PROCESSES))
        or _space_refusal(request)
        or _number_refusal("output_bytes", request.output_bytes, MAX_OUTPUT_BYTES)
        or ("" if not request.profile else _profile_refusal(request.profile))
        or ("" if request.language == "python" else f"the language is {request.language!r}, and only 'python' runs here")
        or _text_refusal("session", request.session, _MAX_WORD_BYTES)
        or _text_refusal("id", request.id, _MAX_WORD_BYTES)
    )


def session_refusal(limits: SessionLimits) -> str:
    """Why these limits of a session are refused; empty if they are not."""
    return _space_refusal(limits) or _number_refusal("lease_s", limits.lease_s, MAX_LEASE_S) or _profile_refusal(limits.profile)


def require_verifiable(request: VerifyRequest) -> None:
    """Raise `UserError` for an impossible time limit. Each pair is checked by `is_readable`."""
    if refusal := _number_refusal("pair_wall_s", request.pair_wall_s, MAX_WALL_S):
        raise UserError(f"{refusal}.")


def is_readable(pair: AnswerPair) -> bool:
    """Whether all texts of the pair can be encoded and are within the limit."""
    texts = (pair.gold, pair.answer, *map("".join, pair.differences))
    return not any(_text_refusal("", text, _MAX_ANSWER_BYTES) for text in texts)


def _text_refusal(name: str, text: str, max_bytes: int) -> str:
    if len(text) <= max_bytes and not text.isascii():
        try:
            length = len(text.encode())
        except UnicodeEncodeError:
            return f"{name} holds a lone surrogate, which has no encoding"
    else:
        length = len(text)
    return "" if length <= max_bytes else f"{name} has more than {max_bytes} bytes, which is the limit"


def _space_refusal(limits: RunRequest | SessionLimits) -> str:
    return (
        _number_refusal("memory_mib", limits.memory_mib, MAX_MEMORY_MIB)
        or _number_refusal("max_processes", limits.max_processes, MAX_PROCESSES)
        or _number_refusal("file_mib", limits.file_mib, MAX_FILE_MIB, least=0)
    )


def _profile_refusal(profile: str) -> str:
    return "" if profile in _PROFILES else f"there is no profile {profile[:80]!r}; the profiles are {', '.join(_PROFILES)}"


def _number_refusal(name: str, number: float, most: float, *, least: float | None = None) -> str:
    if (number > 0 if least is None else number >= least) and number <= most:
        return ""
    shown = "a number of many digits" if isinstance(number, int) and abs(number) >= 10**15 else number
    return f"{name} is {shown}; it has to be {'above 0' if least is None else f'at least {least}'} and at most {most:g}"
