"""What goes over HTTP: the bodies that are not in `protocol`, and how a stream of bytes becomes lines and requests.

A stream is JSON, one object a line. An empty line means nothing but that its sender is alive.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from strop.errors import NoNodes, Overloaded, SessionLost, StropError, UserError
from strop.sandbox.code_tests import CodeTest
from strop.sandbox.protocol import IsolationLevel, PairVerdict, RunRequest, RunResult

# Strict, and closed: a misspelled limit must not be a limit that is silently not there. What is nested obeys it too.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Key = Annotated[str, Field(max_length=256)] | Annotated[int, Field(ge=-(2**63), lt=2**63)]

STARTS_HEADER = "X-Strop-Starts"
"""Of a request for many runs, with any value: the client wants to be told of calls that a node has taken."""

_HEAD_BYTES = 512  # of a line that is too long: enough for its key, when that comes first
_KEY = re.compile(rb'\s*\{\s*"key"\s*:\s*(?:"([^"\\\x00-\x1f]{0,256})"|(-?\d{1,18})\b)')


class ProblemKind(StrEnum):
    """Why a request has no result."""

    INVALID = "invalid"  # not JSON, not this shape, or a limit that cannot be
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"  # the header Allow says which are
    TOO_LARGE = "too_large"
    SESSION_LOST = "session_lost"
    OVERLOADED = "overloaded"  # try again a little later
    NO_NODES = "no_nodes"  # the same, once there is one
    INTERNAL = "internal"


_KINDS: tuple[tuple[type[StropError], ProblemKind], ...] = (  # the first that fits
    (UserError, ProblemKind.INVALID),
    (SessionLost, ProblemKind.SESSION_LOST),
    (NoNodes, ProblemKind.NO_NODES),
    (Overloaded, ProblemKind.OVERLOADED),
    (StropError, ProblemKind.INTERNAL),
)


def kind_of(error: StropError) -> ProblemKind:
    return next(kind for family, kind in _KINDS if isinstance(error, family))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    kind: ProblemKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """The body of every answer whose status is not 200."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    error: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One call of a stream. The key is the client's own and comes back with the answer; put it first in the line."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    key: Key
    request: RunRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine:
    """The result of one call. The key is null when the line of the call could not be read so far."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    key: Key | None
    result: RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLine:
    """In place of a result: a cell whose session is lost, or a service that is closed or has no nodes."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    key: Key | None
    error: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLine:
    """A node has taken the call: it waits for no others any more. For clients that ask, unless its answer is soon there."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    key: Key
    started: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictLine:
    """The verdict of one pair, by its place in the request."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    index: int
    verdict: PairVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Calls to end, by the ids in their requests."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelReply:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    num_cancelled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReply:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsRequest:
    """One program and what it has to print for what it is given."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
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
    is_draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`status` is `ok`, `no nodes` or `stopping`; without a token nothing else is told."""

    status: str
    num_held: int = 0
    num_sessions: int = 0
    nodes: tuple[NodeHealth, ...] = ()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that is no call, with its key if that much could be read."""

    key: str | int | None
    why: str


@dataclass(frozen=True, slots=True)
class TooLong:
    """A line that was skipped for its length."""

    head: bytes


_RUN_LINE: TypeAdapter[RunLine] = TypeAdapter(RunLine)
_KEY_TYPE: TypeAdapter[str | int] = TypeAdapter(Key)
_RESULT_LINE: TypeAdapter[ResultLine] = TypeAdapter(ResultLine)
_ERROR_LINE: TypeAdapter[ErrorLine] = TypeAdapter(ErrorLine)
_START_LINE: TypeAdapter[StartLine] = TypeAdapter(StartLine)


class LineSplitter:
    """Cuts a stream of bytes into lines, without their ends; a line beyond the limit takes no memory."""

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
        """The last line, when the stream ended without a newline."""
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
        return Unreadable(_key_at_the_start(line.head), f"the line has more than {max_line_bytes} bytes")
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
    """The first mistake, with its place; never what was sent, which may be long."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(step) for step in first["loc"])
    return f"{place}: {first['msg']}"[:500] if place else str(first["msg"])[:500]


def _key_of(line: bytes) -> str | int | None:
    try:
        tree: Any = json.loads(line)
        key = tree["key"]
        _KEY_TYPE.validate_python(key, strict=True)
        return key if isinstance(key, int) else str(key.encode(), "utf-8")
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return _key_at_the_start(line)


def _key_at_the_start(line: bytes) -> str | int | None:
    if (match := _KEY.match(line)) is None:
        return None
    try:
        return match[1].decode() if match[1] is not None else int(match[2])
    except UnicodeDecodeError:
        return None
