"""Keeps the demonstrations of a stage on disk while it trains: a batch of them is in memory, and where each begins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from strop.pipelines.id_file import IdFile
from strop.training.sft import Demonstration, Segment


class DemonstrationFile:
    """Demonstrations by number, in an `IdFile`. A context."""

    def __init__(self, directory: Path, demonstrations: Iterable[Demonstration]) -> None:
        self._file = IdFile(
            directory, ([(segment.ids, segment.is_demonstrator) for segment in each.segments] for each in demonstrations)
        )

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, number: int, /) -> Demonstration:
        """Raises `IndexError` where there is no such demonstration, counted from 0."""
        return Demonstration(segments=tuple(Segment(ids=ids, is_demonstrator=marked) for ids, marked in self._file[number]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.__exit__(kind, error, traceback)
