"""Keeps preferences on disk, as ids, while a reward model learns from them: a batch is in memory, and where each begins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from strop.pipelines.id_file import IdFile
from strop.training.preferences import PreferenceRows


class PreferenceFile:
    """Preferences as ids by number, in an `IdFile`. A context."""

    def __init__(self, directory: Path, preferences: Iterable[PreferenceRows]) -> None:
        self._file = IdFile(directory, ([(ids, each.is_good) for ids in each.rows] for each in preferences))

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, number: int, /) -> PreferenceRows:
        """Raises `IndexError` where there is no such preference, counted from 0."""
        marked = self._file[number]
        return PreferenceRows(rows=tuple(ids for ids, _ in marked), is_good=all(is_good for _, is_good in marked))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.__exit__(kind, error, traceback)
