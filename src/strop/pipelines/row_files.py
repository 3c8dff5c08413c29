"""Reads the rows of a .jsonl by their number: in memory is where each begins, and no row but the one that is asked for."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from strop.errors import RunError


class RowFile:
    """The rows of a file that nobody writes any more, in its order; 8 bytes of memory a row. A context: it holds the file open.

    As `read_lines` does, it leaves out a last line that a kill cut short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._starts = array("Q", [0])
        start = 0
        for line in self._file:
            start += len(line)
            if line.endswith(b"\n"):
                self._starts.append(start)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Raises `IndexError` where there is no such row, counted from 0, and `RunError` where it is not JSON."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        self._file.seek(self._starts[number])
        line = self._file.read(self._starts[number + 1] - self._starts[number])
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise RunError(f"{self._path}:{number + 1}: not valid JSON ({error}). Remove that line, then try again.") from error
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()
