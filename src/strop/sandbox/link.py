"""The link between the supervisor and the process that started it: messages as frames, over a socket pair.

    supervisor -> parent   Hello when it is ready, then answers: Ran, Judged, JudgedAll, SessionIs, Failed; and Slots
    parent -> supervisor   calls: Run, Verify, OpenSession, ForkSession, CloseSession, and Cancel
    both                   Ping when there is nothing else to say

A frame is four bytes of length, then JSON. Each call has a number of its own, chosen by the parent and never used twice.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, NoReturn, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from strop.errors import LinkBroken
from strop.sandbox.protocol import IsolationLevel, PairVerdict, RunRequest, RunResult, SessionLimits, VerifyRequest

MAX_FRAME_BYTES = 64 << 20  # 8 MB of input can be 48 MB of JSON escapes
_HEADER = struct.Struct(">I")
_READ_BYTES = 262_144
_LINGER_S = 1.0  # for unsent messages when a link is closed


class _Strict:
    """Strict, and closed. Infinity may pass: its receiver rejects that one call."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")


class Failure(StrEnum):
    """Why a call has no result; each is one exception on the parent's side."""

    NODE = "node"  # NodeLost: the node is going down; the link will follow
    MACHINE = "machine"  # MachineError: the node could not do it
    SESSION = "session"  # SessionLost
    REQUEST = "request"  # UserError: this could never have worked


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(_Strict):
    kind: Literal["hello"] = "hello"
    level: IsolationLevel
    num_slots: Annotated[int, Field(ge=1, le=65_536)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(_Strict):
    kind: Literal["ping"] = "ping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots(_Strict):
    """The number of calls that the node takes at once has changed."""

    kind: Literal["slots"] = "slots"
    num_slots: Annotated[int, Field(ge=0, le=65_536)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(_Strict):
    kind: Literal["run"] = "run"
    call: int
    request: RunRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify(_Strict):
    kind: Literal["verify"] = "verify"
    call: int
    request: VerifyRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession(_Strict):
    kind: Literal["open_session"] = "open_session"
    call: int
    limits: SessionLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSession(_Strict):
    kind: Literal["fork_session"] = "fork_session"
    call: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession(_Strict):
    kind: Literal["close_session"] = "close_session"
    call: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(_Strict):
    """The call is cancelled and will not be answered."""

    kind: Literal["cancel"] = "cancel"
    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran(_Strict):
    kind: Literal["ran"] = "ran"
    call: int
    result: RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(_Strict):
    """One pair of a `Verify`; more follow, until `JudgedAll`."""

    kind: Literal["judged"] = "judged"
    call: int
    index: int
    verdict: PairVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAll(_Strict):
    kind: Literal["judged_all"] = "judged_all"
    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionIs(_Strict):
    """The answer to each of the three calls on sessions."""

    kind: Literal["session_is"] = "session_is"
    call: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_Strict):
    kind: Literal["failed"] = "failed"
    call: int
    failure: Failure
    reason: str


Call = Run | Verify | OpenSession | ForkSession | CloseSession
Answer = Ran | Judged | JudgedAll | SessionIs | Failed
Message = Hello | Ping | Slots | Cancel | Call | Answer

_ANY: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])
# One adapter a type: writing through the union costs twice as much (3.1 against 1.7 us).
_ONE: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """The whole frame.

    Raises:
        ValueError: the message cannot be sent: it holds a lone surrogate, or its frame would be too large.
    """
    try:
        body = _ONE[type(message)].dump_json(message)
    except PydanticSerializationError as error:
        raise ValueError(f"it cannot be written as UTF-8: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"it has {len(body)} bytes as a frame, the limit is {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


def decode(body: bytes | memoryview) -> Message:
    """Raises `LinkBroken` for anything but exactly one message."""
    try:
        return _ANY.validate_json(bytes(body))
    except (ValidationError, RecursionError) as error:
        first = error.errors(include_url=False, include_input=False)[0]["msg"] if isinstance(error, ValidationError) else error
        raise LinkBroken(f"a frame of {len(body)} bytes is no message: {first}") from error


class FrameDecoder:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def is_mid_frame(self) -> bool:
        return bool(self._rest)

    def feed(self, part: bytes) -> list[bytes]:
        """The frames that are complete now, without their lengths. Raises `LinkBroken` if one is too long."""
        self._rest += part
        frames = []
        start, end = 0, len(self._rest)
        while end - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._rest, start)
            if length > MAX_FRAME_BYTES:
                raise LinkBroken(f"a frame of {length} bytes is announced, the limit is {MAX_FRAME_BYTES}")
            if end - start < _HEADER.size + length:
                break
            start += _HEADER.size
            frames.append(bytes(self._rest[start : start + length]))
            start += length
        del self._rest[:start]
        return frames


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    """How a peer that did not hang up is found to be gone: a stopped process."""

    heartbeat_s: float = 0.4  # a message is sent at least this often
    silence_s: float = (
        1.4  # without a message for so long the peer is gone; this is found within one more heartbeat, so within 1.8 s
    )


# The kernel closes the link of a dead parent, so a silent one is only busy, perhaps with a checkpoint.
SUPERVISOR_TIMING = LinkTiming(silence_s=math.inf)


class Channel:
    """Messages over a pair of streams. Use from one event loop; `pump` is its only reader."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timing: LinkTiming) -> None:
        self.timing = timing
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder()
        self._decoded: list[Message] = []  # messages that came in the same read as the first one
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []
        self._flush_timer: asyncio.Handle | None = None
        self._flush_within_s = 0.0
        self._broken: LinkBroken | None = None
        self._heard_at = self._loop.time()
        self._was_late = False
        self._beat: asyncio.TimerHandle | None = None

    def send(self, message: Message, *, within_s: float = 0.0) -> None:
        """Queue it; all messages of one turn of the event loop leave in one write. Nothing is sent once the link is broken.

        Args:
            within_s: how long it may wait for other messages.

        Raises:
            ValueError: this message cannot be written as a frame; the link is unharmed.
        """
        frame = encode(message)
        if self._broken is not None:
            return
        self._outgoing.append(frame)
        if self._flush_timer is None or within_s < self._flush_within_s:
            if self._flush_timer is not None:
                self._flush_timer.cancel()
            self._flush_within_s = within_s
            self._flush_timer = self._loop.call_later(within_s, self._flush) if within_s else self._loop.call_soon(self._flush)

    async def first(self, *, within_s: float) -> Message:
        """The message that opens the link. Raises `LinkBroken` if none comes in time."""
        try:
            async with asyncio.timeout(within_s):
                while not self._decoded:
                    await self._read()
        except TimeoutError as error:
            raise LinkBroken(f"the peer said nothing within {within_s:g} s") from error
        return self._decoded.pop(0)

    async def pump(self, handle: Callable[[Message], None]) -> NoReturn:
        """Give every message to `handle`, until the link ends. `LinkBroken` says why, also one that `handle` raises."""
        self._heard_at = self._loop.time()
        self._beat_again()
        try:
            while True:
                messages, self._decoded = self._decoded, []
                for message in messages:
                    handle(message)
                await self._read()
        finally:
            self.close()

    def break_off(self, reason: str) -> None:
        """End it now, unsent messages included; `pump` raises `LinkBroken` with this reason."""
        if self._broken is None:
            self._broken = LinkBroken(reason)
        self._writer.transport.abort()

    def close(self) -> None:
        """Send what is queued, then close. Safe to call twice."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        self._flush()
        if self._broken is None:
            self._broken = LinkBroken("it was closed on this side")
        if not self._writer.is_closing():
            self._writer.close()
            # A peer that has stopped reading would keep the connection open forever.
            self._loop.call_later(_LINGER_S, self._writer.transport.abort)

    async def _read(self) -> None:
        try:
            part = await self._reader.read(_READ_BYTES)
        except OSError as error:
            raise self._broken or LinkBroken(f"the connection failed: {error}") from error
        if not part:
            cut = " in the middle of a frame" if self._decoder.is_mid_frame else ""
            raise self._broken or LinkBroken(f"the peer hung up{cut}")
        self._heard_at = self._loop.time()
        try:
            self._decoded += [decode(frame) for frame in self._decoder.feed(part)]
        except LinkBroken as error:
            self.break_off(str(error))
            raise

    def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._outgoing and self._broken is None:
            self._writer.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def _beat_again(self) -> None:
        due = self._loop.time() + self.timing.heartbeat_s
        self._beat = self._loop.call_at(due, self._on_beat, due)

    def _on_beat(self, due: float) -> None:
        now = self._loop.time()
        # If this process stood still, messages of the peer may be unread: decide at the next heartbeat.
        is_late = now - due > self.timing.heartbeat_s
        if now - self._heard_at > self.timing.silence_s and (not is_late or self._was_late):
            self.break_off(f"the peer was silent for {now - self._heard_at:.1f} s")
            return
        self._was_late = is_late
        self.send(Ping())
        self._beat_again()
