"""The JSON bodies of the HTTP API that are not in `protocol`, and streams of JSON, one object a line.

An empty line only says that its sender is alive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
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

    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_LARGE = "too_large"
    SESSION_LOST = "session_lost"
    NO_NODES = "no_nodes"
    OVERLOADED = "overloaded"
    INTERNAL = "internal"


PROBLEMS: dict[ProblemKind, tuple[int, type[StropError], str]] = {
    ProblemKind.INVALID: (400, UserError, "The request is not JSON, has another shape, or an impossible limit."),
    ProblemKind.UNAUTHORIZED: (401, UserError, "The token is wrong or missing."),
    ProblemKind.NOT_FOUND: (404, UserError, "There is no such path."),
    ProblemKind.METHOD_NOT_ALLOWED: (405, UserError, "The path has other methods; the header `Allow` lists them."),
    ProblemKind.TOO_LARGE: (413, UserError, "The body is too large."),
    ProblemKind.SESSION_LOST: (410, SessionLost, "The session is lost; `error.message` says why."),
    ProblemKind.NO_NODES: (503, NoNodes, "The service has no supervisor: try again once there is one."),
    ProblemKind.OVERLOADED: (503, Overloaded, "The service is full or is shutting down: try again a little later."),
    ProblemKind.INTERNAL: (500, MachineError, "An error of the service."),
}
"""The status, the exception and the description of each kind. An exception has the first kind that fits."""


def kind_of(error: StropError) -> ProblemKind:
    return next((kind for kind, (_, family, _) in PROBLEMS.items() if isinstance(error, family)), ProblemKind.INTERNAL)


class _Body(BaseModel):
    """Strict and closed: a misspelt limit is an error, not a limit that is silently missing. Nested objects obey it too."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def line(self) -> bytes:
        """Raises `PydanticSerializationError` for a text with a lone surrogate."""
        return self.__pydantic_serializer__.to_json(self) + b"\n"


class Problem(_Body):
    kind: ProblemKind
    message: str

    def exception(self) -> StropError:
        return PROBLEMS[self.kind][1](self.message)


class ErrorReply(_Body):
    """The body of every response whose status is not 200."""

    error: Problem


class RunLine(_Body):
    """One call of a stream. The client chooses the key and gets it back with the answer; put it first in the line."""

    key: Key
    request: RunRequest


class ResultLine(_Body):
    """The result of one call. The key is null if it could not be read from the line of the call."""

    key: Key | None
    result: RunResult


class ErrorLine(_Body):
    """In place of a result: a cell whose session is lost, or a service that is closed or has no supervisor."""

    key: Key | None
    error: Problem


class StartLine(_Body):
    """The supervisor has taken the call. Sent only to clients that ask for it, and not if the answer comes soon."""

    key: Key
    started: Literal[True] = True


class VerdictLine(_Body):
    """The verdict of one pair, by its index in the request."""

    index: int
    verdict: PairVerdict


class CancelRequest(_Body):
    """Calls to end, by the ids in their requests."""

    ids: tuple[str, ...]


class CancelReply(_Body):
    num_cancelled: int


class SessionReply(_Body):
    session: str


class TestsRequest(_Body):
    """One program, and what it has to print for each input."""

    code: str
    tests: tuple[CodeTest, ...]
    wall_s: float = 4.0  # of each run
    memory_mib: int = 512
    stop_at_first_failure: bool = True


class NodeHealth(_Body):
    name: str
    level: IsolationLevel
    num_slots: int
    num_running: int


class Health(_Body):
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
        return RunLine.model_validate_json(line)
    except ValidationError as error:
        return Unreadable(_key_of(line), explain(error))


def write_result_line(key: str | int | None, result: RunResult) -> bytes:
    try:
        return ResultLine(key=key, result=result).line()
    except PydanticSerializationError as error:
        return write_error_line(key, ProblemKind.INTERNAL, f"the result cannot be written: {error}")


def write_error_line(key: str | int | None, kind: ProblemKind, message: str) -> bytes:
    return ErrorLine(key=key, error=problem_of(kind, message)).line()


def problem_of(kind: ProblemKind, message: str) -> Problem:
    """The message may quote text that has no encoding."""
    return Problem(kind=kind, message=message.encode("utf-8", "backslashreplace").decode())


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
