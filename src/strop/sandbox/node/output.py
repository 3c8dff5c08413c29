"""Keeps the head and the tail of what a program prints, however much it prints."""

from __future__ import annotations

import os

FLOOD_FACTOR, MAX_FLOOD_BYTES = 64, 32 << 20  # output beyond so many times its limit, or beyond so much, ends the program
_MAX_READS = 16  # each takes what a pipe holds; a writer that lives may fill it as fast as it is read


class OutputTail:
    """Output of one program. Up to `limit` bytes it is whole; beyond, half of them are its head and half its tail.

    Args:
        limit: bytes kept.
        skip: how many bytes come first that the program did not print: the mark that it was ready to run.
    """

    def __init__(self, *, limit: int, skip: int) -> None:
        self._limit = limit
        self._skip = skip
        self._head = bytearray()
        self._tail = bytearray()
        self.num_bytes = -skip

    @property
    def is_ready(self) -> bool:
        """Whether the program was reached at all."""
        return self.num_bytes >= 0

    @property
    def is_flood(self) -> bool:
        return self.num_bytes > max(2 * self._limit, min(FLOOD_FACTOR * self._limit, MAX_FLOOD_BYTES))

    def add(self, part: bytes) -> None:
        skipped = min(len(part), max(0, -self.num_bytes))
        self.num_bytes += len(part)
        part = part[skipped:]
        room = self._limit - len(self._head)
        self._head += part[:room]
        self._tail += part[room:]
        if len(self._tail) > 2 * self._limit:  # seldom, so that a drip of single bytes costs no quadratic copying
            del self._tail[: -self._limit]

    def drain(self, descriptor: int) -> None:
        """Take what is left in a pipe whose writers are dead, without ever waiting for one that is not, or racing it."""
        for _ in range(_MAX_READS):
            try:
                part = os.read(descriptor, 262_144)
            except BlockingIOError:
                return
            if not part:
                return
            self.add(part)

    def kept(self) -> bytes:
        """All of it, when it is no longer than the limit."""
        return bytes(self._head)

    def text(self) -> str:
        """Undecodable bytes are replaced; what is left out is counted in the middle."""
        if self.num_bytes <= self._limit:
            return self._head.decode("utf-8", "replace")
        half = self._limit // 2
        tail = (self._head + self._tail)[-half:] if len(self._tail) < half else self._tail[-half:]
        left_out = self.num_bytes - 2 * half
        head_text, tail_text = self._head[:half].decode("utf-8", "replace"), tail.decode("utf-8", "replace")
        return f"{head_text}\n[... {left_out} bytes left out ...]\n{tail_text}"

    def head_text(self) -> str:
        """For a program that was stopped in the middle of a flood: the part that does not depend on when."""
        return f"{self._head.decode('utf-8', 'replace')}\n[... output went on; the program was stopped ...]\n"

    @classmethod
    def cut(cls, text: str, *, limit: int) -> str:
        """`text` as if it had been printed."""
        output = cls(limit=limit, skip=0)
        output.add(text.encode("utf-8", "replace"))
        return output.text()
