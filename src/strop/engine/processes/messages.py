"""What an engine's client and its process say to each other: JSON in frames that begin with their length.

Read strictly, since the other side may be broken: whatever is no message raises `Garbled`. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from strop import errors
from strop.engine.processes.shared_weights import Stored
from strop.engine.protocol import CompletionRequest
from strop.errors import StropError
from strop.types import Completion

_LENGTH = struct.Struct(">I")
_MAX_BYTES = 256 << 20  # of a frame: a conversation of ten million tokens
_SHOWN = 200  # characters of garbage


class Garbled(Exception):  # noqa: N818 - named for what happened
    """The other side sent what is no message; says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    number: int
    request: CompletionRequest
    kind: Literal["complete"] = "complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Whoever waited for the completion with this number has gone."""

    number: int
    kind: Literal["abandon"] = "abandon"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    request_id: str
    kind: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    request_id: str
    kind: Literal["release"] = "release"


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginLoad:
    """Drop every KV cache and refuse to sample; answered by `Ready`."""

    number: int
    version: int
    checksum: str
    kind: Literal["begin_load"] = "begin_load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The weights lie in the shared memory; answered by `Loaded`, the end of the load."""

    number: int
    begun: int  # the number of its `BeginLoad`
    weights: tuple[Stored, ...]
    kind: Literal["load"] = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakOff:
    """There will be no weights for the load that began with that number."""

    begun: int
    kind: Literal["break_off"] = "break_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    kind: Literal["ping"] = "ping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The engine is there. What it can do, and what its KV memory holds, as in `Capabilities` and `Capacity`."""

    dtype: Literal["float32", "bfloat16"]
    total_tokens: int
    max_request_tokens: int
    max_running: int
    vocab_size: int
    policy_version: int
    is_deterministic: bool
    can_fork: bool
    has_entropies: bool
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    number: int
    completion: Completion
    kind: Literal["completed"] = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    number: int
    kind: Literal["cancelled"] = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """`error` is the name of a class in `strop.errors`. Number 0: the engine could not be opened."""

    number: int
    error: str
    message: str
    kind: Literal["failed"] = "failed"

    def as_error(self) -> StropError:
        """Raises `Garbled` when there is no such class."""
        found = getattr(errors, self.error, None)
        if not (isinstance(found, type) and issubclass(found, StropError)):
            raise Garbled(f"an error of the unknown class {self.error!r}: {self.message}")
        return found(self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    number: int
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    number: int
    policy_version: int
    is_deterministic: bool  # measured when the first weights arrive
    kind: Literal["loaded"] = "loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    kind: Literal["pong"] = "pong"


ToChild: TypeAlias = Complete | Abandon | Abort | Release | BeginLoad | Load | BreakOff | Ping
FromChild: TypeAlias = Hello | Completed | Cancelled | Failed | Ready | Loaded | Pong

_CONFIG = ConfigDict(ser_json_inf_nan="constants")
TO_CHILD: TypeAdapter[ToChild] = TypeAdapter(Annotated[ToChild, Field(discriminator="kind")], config=_CONFIG)
FROM_CHILD: TypeAdapter[FromChild] = TypeAdapter(Annotated[FromChild, Field(discriminator="kind")], config=_CONFIG)


MessageT = TypeVar("MessageT")


def to_frame(adapter: TypeAdapter[MessageT], message: MessageT) -> bytes:
    body = adapter.dump_json(message)
    return _LENGTH.pack(len(body)) + body


async def read_message(adapter: TypeAdapter[MessageT], reader: asyncio.StreamReader) -> MessageT:
    """The next message. Raises `Garbled`, or `EOFError` where the link ends between two."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > _MAX_BYTES:
            raise Garbled(f"a frame of {length} bytes; {_MAX_BYTES} are the most")
        body = await reader.readexactly(length)
    except ConnectionError as error:
        raise EOFError from error
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise EOFError from error
        raise Garbled(f"a frame that breaks off: {_shown(error.partial)}") from error
    try:
        return adapter.validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Garbled(f"no message: {first['msg']}{f' at {place}' if place else ''}, in {_shown(body)}") from error


def _shown(content: bytes) -> str:
    return repr(content[:_SHOWN].decode("utf-8", "replace")) + ("..." if len(content) > _SHOWN else "")
