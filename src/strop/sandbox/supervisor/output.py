"""Keeps the head and the tail of what a program prints, however much it prints, and hides the paths of this machine in it."""

from __future__ import annotations

import codecs
import os
import sys
import sysconfig
from pathlib import Path

from strop.sandbox.inside import wire
from strop.sandbox.inside.filesystem import place_inside

FLOOD_FACTOR, MAX_FLOOD_BYTES = 64, 32 << 20  # output beyond so many times its limit, or beyond so much, ends the program
_MAX_READS = 16  # each takes all that a pipe holds; a living writer may fill it as fast as it is read


class OutputTail:
    """Output of one program as UTF-8. Bytes that are not UTF-8 are replaced on arrival, so the limit holds for the result.

    Up to `limit` bytes are kept whole; of more, the first and the last half of `limit`.

    Args:
        limit: bytes of UTF-8 to keep.
        skip: how many bytes come before the output of the program: the mark that it was ready to run.
    """

    def __init__(self, *, limit: int, skip: int) -> None:
        self._limit = limit
        self._num_to_skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head = bytearray()
        self._tail = bytearray()
        self.num_bytes = 0

    @property
    def is_ready(self) -> bool:
        """Whether the program began to run."""
        return self._num_to_skip == 0

    @property
    def is_flood(self) -> bool:
        return self.num_bytes > max(2 * self._limit, min(FLOOD_FACTOR * self._limit, MAX_FLOOD_BYTES))

    def add(self, part: bytes) -> None:
        num_skipped = min(len(part), self._num_to_skip)
        self._num_to_skip -= num_skipped
        self._keep(self._decoder.decode(part[num_skipped:]))

    def drain(self, descriptor: int) -> None:
        """Add what is left in a pipe whose writers are dead. Never waits."""
        for _ in range(_MAX_READS):
            try:
                part = os.read(descriptor, 262_144)
            except BlockingIOError:
                return
            if not part:
                return
            self.add(part)

    def text(self) -> str:
        """What is kept. The middle says how many bytes are left out."""
        self._finish()
        if self.num_bytes <= self._limit:
            return self._head.decode()
        half = self._limit // 2
        head = self._head[:half].decode("utf-8", "ignore")  # a cut may split a character
        tail = (self._head + self._tail)[-half:] if len(self._tail) < half else self._tail[-half:]
        return f"{head}\n[... {self.num_bytes - 2 * half} bytes left out ...]\n{tail.decode('utf-8', 'ignore')}"

    def head_text(self) -> str:
        """For a program that was stopped in the middle of a flood: the part that does not depend on the time of the stop."""
        self._finish()
        return f"{self._head.decode('utf-8', 'ignore')}\n[... output went on; the program was stopped ...]\n"

    @classmethod
    def cut(cls, text: str, *, limit: int) -> str:
        """Return `text` as if a program had printed it."""
        output = cls(limit=limit, skip=0)
        output.add(text.encode("utf-8", "replace"))
        return output.text()

    def _keep(self, text: str) -> None:
        part = text.encode()
        self.num_bytes += len(part)
        room = self._limit - len(self._head)
        self._head += part[:room]
        self._tail += part[room:]
        if len(self._tail) > 2 * self._limit:  # seldom, so that many short writes cost no quadratic copying
            del self._tail[: -self._limit]

    def _finish(self) -> None:
        """Replace a character that was cut off at the end of the output."""
        self._keep(self._decoder.decode(b"", final=True))


_NAMES = {
    str(Path(wire.__file__).parent): "runner",
    **{sysconfig.get_path(name): "python" for name in ("stdlib", "platstdlib")},
    **{sysconfig.get_path(name): "site-packages" for name in ("purelib", "platlib")},
    sys.prefix: "python-prefix",
    sys.base_prefix: "python-prefix",
}
_COMMON = {"/", "/usr", "/usr/local"}  # prefixes that reveal nothing about this machine
_PATHS = sorted(
    {(seen, name) for path, name in _NAMES.items() if path not in _COMMON for seen in (path, place_inside(path))},
    key=lambda pair: -len(pair[0]),
)


def hide_paths(text: str) -> str:
    """Return `text` with neutral names for the paths of the interpreter and its libraries: it is the same on every machine."""
    for path, name in _PATHS:
        text = text.replace(path, name)
    return text
