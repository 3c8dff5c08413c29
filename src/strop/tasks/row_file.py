"""Rows on disk: read by number, so that they need not fit in memory, and written atomically."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from strop.run_directory import writing_to

RowT = TypeVar("RowT")
RowT_co = TypeVar("RowT_co", covariant=True)


class IndexedRows(Protocol[RowT_co]):
    """Rows by number, from 0: a list, or a `RowFile`."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> RowT_co: ...


class RowFile(Generic[RowT]):
    """Rows by number, from 0, in a file without a name, which is gone when it is closed or the process ends.

    Several threads may read at once. Memory holds 8 bytes a row. A context.
    """

    def __init__(self, rows: Iterable[RowT], directory: Path | None = None) -> None:
        """Write `rows`, one at a time.

        Args:
            directory: where the file is; that of temporary files (TMPDIR) by default.
        """
        place = directory or Path(tempfile.gettempdir())
        self._ends = array("Q")
        with writing_to(place):
            place.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115 - `close` closes it
        self._close = weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        try:
            for row in rows:
                with writing_to(place):
                    file.write(pickle.dumps(row))
                self._ends.append(file.tell())
            with writing_to(place):
                file.flush()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int, /) -> RowT:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = self._ends[number - 1] if number else 0
        row: RowT = pickle.loads(os.pread(self._descriptor, self._ends[number] - start, start))
        return row

    def __iter__(self) -> Iterator[RowT]:
        return (self[number] for number in range(len(self)))

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


@contextmanager
def writing_rows(path: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that adds a row to a new file of JSON lines. After an exception the file is as it was before."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("w", encoding="utf-8")

    def add(row: Mapping[str, Any]) -> None:
        line = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str) + "\n"
        with writing_to(path):
            file.write(line)

    try:
        yield add
        with writing_to(path):
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        with writing_to(path):
            file.close()
        temporary.unlink(missing_ok=True)
