"""Keeps pairs of responses on disk, as ids, while a policy learns from them: a batch is in memory, and where each begins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from strop.pipelines.id_file import IdFile
from strop.training.dpo import PairIds


class PairFile:
    """Pairs by number, in an `IdFile`. A context."""

    def __init__(self, directory: Path, pairs: Iterable[PairIds]) -> None:
        self._file = IdFile(directory, ([(pair.prompt, False), (pair.chosen, True), (pair.rejected, True)] for pair in pairs))

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, number: int, /) -> PairIds:
        """Raises `IndexError` where there is no such pair, counted from 0."""
        prompt, chosen, rejected = (ids for ids, _ in self._file[number])
        return PairIds(prompt=prompt, chosen=chosen, rejected=rejected)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.__exit__(kind, error, traceback)
