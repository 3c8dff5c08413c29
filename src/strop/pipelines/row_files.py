"""Reads the rows of a .jsonl that a stage made, by their number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from strop.errors import RunError
from strop.tasks.line_file import LineFile


class RowFile:
    """The rows of a file that nobody writes any more, in its order; 16 bytes of memory a row. A context, which holds it open.

    As `read_lines` does, it leaves out a last line that a kill cut short.
    """

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path, drops_cut_line=True)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        """Raises `IndexError` where there is no such row, counted from 0, and `RunError` where it is not JSON."""
        line = self._lines[number]
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise RunError(
                f"{self._lines.name}:{number + 1}: not valid JSON ({error}). Remove that line, then try again."
            ) from error
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._lines.close()
