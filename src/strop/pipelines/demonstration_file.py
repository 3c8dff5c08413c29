"""Keeps the demonstrations of a stage on disk while it trains: a batch of them is in memory, and where each begins."""

from __future__ import annotations

import contextlib
import tempfile
from array import array
from collections.abc import Iterable
from itertools import accumulate, chain, pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from strop.runs import writing_to
from strop.training.sft import Demonstration, Segment

_ID = "i"  # 4 bytes


class DemonstrationFile:
    """Demonstrations by number, in a file without a name, which is gone when it is closed or the process ends. A context.

    Takes 8 bytes of memory a demonstration, and 4 of disk a token. Each is written as it comes and read when it is asked for:
    how many segments it has; of each its length, doubled, plus 1 where it is a demonstrator's; and all ids.
    """

    def __init__(self, directory: Path, demonstrations: Iterable[Demonstration]) -> None:
        with writing_to(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - until it is closed
        self._starts = array("Q", [0])
        try:
            for each in demonstrations:
                told = [len(segment.ids) * 2 + segment.is_demonstrator for segment in each.segments]
                record = array(_ID, chain([len(told)], told, each.ids)).tobytes()
                with writing_to(directory):
                    self._file.write(record)
                self._starts.append(self._starts[-1] + len(record))
            with writing_to(directory):
                self._file.flush()
        except BaseException:
            with contextlib.suppress(OSError):  # what could not be written is tried again as it is closed
                self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Demonstration:
        """Raises `IndexError` where there is no such demonstration, counted from 0."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        self._file.seek(self._starts[number])
        record = array(_ID)
        record.frombytes(self._file.read(self._starts[number + 1] - self._starts[number]))
        num_segments, told = record[0], record[1 : record[0] + 1]
        ends = accumulate((each // 2 for each in told), initial=1 + num_segments)
        return Demonstration(
            segments=tuple(
                Segment(ids=tuple(record[start:end]), is_demonstrator=bool(each % 2))
                for (start, end), each in zip(pairwise(ends), told, strict=True)
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()
