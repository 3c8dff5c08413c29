"""Keeps rows of token ids on disk while a stage trains on them: in memory is where each begins."""

from __future__ import annotations

import contextlib
import os
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeAlias, TypeVar

from strop.runs import writing_to

_ID = "i"  # 4 bytes

MarkedIds: TypeAlias = tuple[tuple[int, ...], bool]
"""Ids, and what is said of them all."""

ItemT = TypeVar("ItemT")


class IdFile(ABC, Generic[ItemT]):
    """Items by number, as marked ids in a file without a name, which is gone when it is closed or the process ends. A context.

    Takes 8 bytes of memory an item, and 4 of disk an id. Each is written as it comes and read when it is asked for: how many
    runs of ids it has; of each its length, doubled, plus 1 where it is marked; and all ids.
    """

    def __init__(self, directory: Path, items: Iterable[ItemT]) -> None:
        with writing_to(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - until it is closed
        self._starts = array("Q", [0])
        try:
            for item in items:
                runs = self.runs_of(item)
                told = [len(ids) * 2 + is_marked for ids, is_marked in runs]
                record = array(_ID, chain([len(told)], told, *(ids for ids, _ in runs))).tobytes()
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

    @staticmethod
    @abstractmethod
    def runs_of(item: ItemT) -> Sequence[MarkedIds]:
        """The runs of ids that an item is kept as."""

    @staticmethod
    @abstractmethod
    def item_of(runs: Sequence[MarkedIds]) -> ItemT:
        """The item that was kept as these."""

    def __getitem__(self, number: int, /) -> ItemT:
        """Raises `IndexError` where there is no such item, counted from 0."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        start, end = self._starts[number], self._starts[number + 1]
        record = array(_ID)
        record.frombytes(os.pread(self._file.fileno(), end - start, start))
        num_runs, told = record[0], record[1 : record[0] + 1]
        ends = accumulate((each // 2 for each in told), initial=1 + num_runs)
        return self.item_of(
            [(tuple(record[first:behind]), bool(each % 2)) for (first, behind), each in zip(pairwise(ends), told, strict=True)]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()
