"""One connection that carries messages: coalesced writes, heartbeats, and one typed error when it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from strop.errors import LinkBroken
from strop.sandbox.service.messages import MAX_FRAME_BYTES, MAX_HELLO_BYTES, FrameDecoder, Message, Ping, decode, encode

_READ_BYTES = 262_144
_LINGER_S = 1.0  # for what is still to be sent as a link is closed


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    """How a peer is found to be gone that did not hang up: stopped, or behind a cut cable."""

    heartbeat_s: float = 0.4  # something is said at least this often
    silence_s: float = 1.4  # heard nothing for so long: gone; found one heartbeat later at the latest, so within 1.8 s
    handshake_s: float = 5.0


# A front that is silent may come back, and nothing it has given away depends on being fast: a node waits longer.
NODE_TIMING = LinkTiming(silence_s=10.0)
# On one machine the kernel hangs up for a front that died, so one that is silent is only busy, perhaps with a checkpoint.
LOCAL_NODE_TIMING = LinkTiming(silence_s=math.inf)


class Channel:
    """Messages over a pair of streams. Use from one event loop; `pump` is its only reader."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timing: LinkTiming) -> None:
        self.timing = timing
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder(MAX_HELLO_BYTES)
        self._decoded: list[Message] = []  # what came with the first message, in the same read
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
            within_s: how long it may wait for others to leave with it.

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

    async def first(self) -> Message:
        """The message that opens the link. Raises `LinkBroken` when none comes within `timing.handshake_s`."""
        try:
            async with asyncio.timeout(self.timing.handshake_s):
                while not self._decoded:
                    await self._read()
        except TimeoutError as error:
            raise LinkBroken(f"the peer did not introduce itself within {self.timing.handshake_s:g} s") from error
        return self._decoded.pop(0)

    async def pump(self, handle: Callable[[Message], None]) -> NoReturn:
        """Give every message to `handle`, until the link ends. `LinkBroken` says why, also one that `handle` raises."""
        self._decoder.max_frame_bytes = MAX_FRAME_BYTES
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
            # A peer that has stopped reading would keep the connection open for good.
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
        # When this process itself stood still, what the peer said lies unread: judge at the next beat.
        is_late = now - due > self.timing.heartbeat_s
        if now - self._heard_at > self.timing.silence_s and (not is_late or self._was_late):
            self.break_off(f"the peer was silent for {now - self._heard_at:.1f} s")
            return
        self._was_late = is_late
        self.send(Ping())
        self._beat_again()
