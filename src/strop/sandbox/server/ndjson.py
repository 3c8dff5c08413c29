"""The JSON bodies of the HTTP API that are not in `protocol`, and streams of JSON, one object a line.

An empty line only says that its sender is alive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from strop.errors import MachineError, NoNodes, Overloaded, SessionLost, StropError, UserError
from strop.sandbox.code_tests import CodeTest
from strop.sandbox.protocol import IsolationLevel, PairVerdict, RunRequest, RunResult

Key = Annotated[str, Field(max_length=256)] | Annotated[int, Field(ge=-(2**63), lt=2**63)]

CLIENT_HEADER = "X-Strop-Client"
"""Names the client: clients take turns in the queue, and each has its own ids of calls."""
STARTS_HEADER = "X-Strop-Starts"
"""With any value, on a request for many runs: report when the supervisor has taken a call."""

_HEAD_BYTES = 512  # kept of a line that is too long, to find its key
_KEY = re.compile(rb'\s*\{\s*"key"\s*:\s*(?:"([^"\\\x00-\x1f]{0,256})"|(-?\d{1,18})\b)')


class ProblemKind(StrEnum):
    """Why a request has no result."""

    INVALID = "invalid"  # not JSON, another shape, or an impossible limit
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"  # the header Allow lists the allowed ones
    TOO_LARGE = "too_large"
    SESSION_LOST = "session_lost"
    OVERLOADED = "overloaded"  # try again a little later
    NO_NODES = "no_nodes"  # the same, once there is a supervisor
    INTERNAL = "internal"


# An error has the first kind that fits.
_ERRORS: dict[ProblemKind, type[StropError]] = {
    ProblemKind.INVALID: UserError,
    ProblemKind.SESSION_LOST: SessionLost,
    ProblemKind.NO_NODES: NoNodes,
    ProblemKind.OVERLOADED: Overloaded,
    ProblemKind.INTERNAL: MachineError,
}


def kind_of(error: StropError) -> ProblemKind:
    return next((kind for kind, family in _ERRORS.items() if isinstance(error, family)), ProblemKind.INTERNAL)


class _Strict:
    """Strict and closed: a misspelt limit is an error, not a limit that is silently missing. Nested objects obey it too."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    kind: ProblemKind
    message: str

    def exception(self) -> StropError:
        return _ERRORS.get(self.kind, UserError)(self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply(_Strict):
    """The body of every response whose status is not 200."""

    error: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine(_Strict):
    """One call of a stream. The client chooses the key and gets it back with the answer; put it first in the line."""

    key: Key
    request: RunRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine(_Strict):
    """The result of one call. The key is null if it could not be read from the line of the call."""

    key: Key | None
    result: RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLine(_Strict):
    """In place of a result: a cell whose session is lost, or a service that is closed or has no supervisor."""

    key: Key | None
    error: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLine(_Strict):
    """The supervisor has taken the call. Sent only to clients that ask for it, and not if the answer comes soon."""

    key: Key
    started: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictLine(_Strict):
    """The verdict of one pair, by its index in the request."""

    index: int
    verdict: PairVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest(_Strict):
    """Calls to end, by the ids in their requests."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelReply(_Strict):
    num_cancelled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReply(_Strict):
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsRequest(_Strict):
    """One program, and what it has to print for each input."""

    code: str
    tests: tuple[CodeTest, ...]
    wall_s: float = 4.0  # of each run
    memory_mib: int = 512
    stop_at_first_failure: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    name: str
    level: IsolationLevel
    num_slots: int
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`status` is `ok`, `no nodes` or `stopping`. The rest is filled in only for requests with the token."""

    status: str
    num_held: int = 0
    num_sessions: int = 0
    nodes: tuple[NodeHealth, ...] = ()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that is no call, with its key if that can be read."""

    key: str | int | None
    why: str


@dataclass(frozen=True, slots=True)
class TooLong:
    """A line that was skipped because of its length."""

    head: bytes


_RUN_LINE: TypeAdapter[RunLine] = TypeAdapter(RunLine)
_RESULT_LINE: TypeAdapter[ResultLine] = TypeAdapter(ResultLine)
_ERROR_LINE: TypeAdapter[ErrorLine] = TypeAdapter(ErrorLine)
_START_LINE: TypeAdapter[StartLine] = TypeAdapter(StartLine)


class LineSplitter:
    """Splits a stream of bytes into lines, without their ends. A line over the limit takes no memory."""

    def __init__(self, *, max_line_bytes: int) -> None:
        self._max_bytes = max_line_bytes
        self._rest = bytearray()
        self._is_skipping = False

    def feed(self, part: bytes) -> list[bytes | TooLong]:
        """The lines that have ended."""
        lines: list[bytes | TooLong] = []
        *ended, rest = part.split(b"\n")
        for piece in ended:
            self._append(piece, lines)
            if not self._is_skipping:
                lines.append(bytes(self._rest))
            self._rest.clear()
            self._is_skipping = False
        self._append(rest, lines)
        return lines

    def end(self) -> list[bytes | TooLong]:
        """The last line, if the stream ended without a newline."""
        return [] if self._is_skipping or not self._rest else [bytes(self._rest)]

    def _append(self, piece: bytes, lines: list[bytes | TooLong]) -> None:
        if self._is_skipping:
            return
        self._rest += piece
        if len(self._rest) > self._max_bytes:
            self._is_skipping = True
            lines.append(TooLong(bytes(self._rest[:_HEAD_BYTES])))
            self._rest.clear()


def read_run_line(line: bytes | TooLong, *, max_line_bytes: int) -> RunLine | Unreadable:
    if isinstance(line, TooLong):
        return Unreadable(_key_of(line.head), f"the line has more than {max_line_bytes} bytes")
    try:
        return _RUN_LINE.validate_json(line)
    except ValidationError as error:
        return Unreadable(_key_of(line), explain(error))


def write_result_line(key: str | int | None, result: RunResult) -> bytes:
    try:
        return _RESULT_LINE.dump_json(ResultLine(key=key, result=result)) + b"\n"
    except PydanticSerializationError as error:
        return write_error_line(key, ProblemKind.INTERNAL, f"the result cannot be written: {error}")


def write_error_line(key: str | int | None, kind: ProblemKind, message: str) -> bytes:
    message = message.encode("utf-8", "backslashreplace").decode()
    return _ERROR_LINE.dump_json(ErrorLine(key=key, error=Problem(kind=kind, message=message))) + b"\n"


def write_start_line(key: str | int) -> bytes:
    return _START_LINE.dump_json(StartLine(key=key)) + b"\n"


def explain(error: ValidationError) -> str:
    """The first mistake with its place. The input is left out, because it may be long."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(step) for step in first["loc"])
    return f"{place}: {first['msg']}"[:500] if place else str(first["msg"])[:500]


def _key_of(line: bytes) -> str | int | None:
    """The key of a line that begins with it."""
    if (match := _KEY.match(line)) is None:
        return None
    try:
        return match[1].decode() if match[1] is not None else int(match[2])
    except UnicodeDecodeError:
        return None
