"""Reads the lines of a file by their number: in memory is where each begins, and no line but the one that is asked for."""

from __future__ import annotations

import os
import weakref
from array import array
from pathlib import Path
from typing import IO

from strop.errors import TaskError


class LineFile:
    """The lines of a file, numbered from 0; 16 bytes of memory a line. Several threads may read at once.

    The file stays open until this is closed, or gone. Lines that are added to it later are not seen, and one that has another
    content than at first is an error: what is read must not change while somebody learns from it.
    """

    def __init__(self, file: Path | IO[bytes], *, name: str = "", drops_cut_line: bool = False) -> None:
        """Read all of `file` once; one that is open already is read to its end, and may be closed by whoever opened it.

        Args:
            name: what an error calls it; its path by default.
            drops_cut_line: a last line without its end is what a kill left, and none.

        Raises:
            OSError: it cannot be read.
        """
        self.name = name or str(file)
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC) if isinstance(file, Path) else os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self._starts, self._digests = array("Q", [0]), array("q")
        os.lseek(descriptor, 0, os.SEEK_SET)
        with os.fdopen(descriptor, "rb", closefd=False) as lines:
            for line in lines:
                if drops_cut_line and not line.endswith(b"\n"):
                    break
                self._starts.append(self._starts[-1] + len(line))
                self._digests.append(hash(line))

    def __len__(self) -> int:
        return len(self._digests)

    def __getitem__(self, number: int, /) -> bytes:
        """A line with its end. Raises `IndexError` where there is none, `TaskError` where it is gone or not what it was."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        start, length = self._starts[number], self._starts[number + 1] - self._starts[number]
        try:
            line = os.pread(self._descriptor, length, start)
        except OSError as error:
            raise TaskError(f"{self.name}:{number + 1}: cannot be read any more: {error}. Is its disk still there?") from error
        if hash(line) != self._digests[number]:
            raise TaskError(
                f"{self.name}:{number + 1}: this line has changed since the file was opened. Restore the file, or start anew"
                " with the one that is there now; write another version under another name."
            )
        return line

    def close(self) -> None:
        """Nothing can be read any more. Safe to call twice."""
        self._close()
