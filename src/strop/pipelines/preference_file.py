"""Keeps preferences on disk, as ids, while a reward model learns from them: a batch is in memory, and where each begins."""

from __future__ import annotations

from collections.abc import Sequence

from strop.pipelines.id_file import IdFile, MarkedIds
from strop.training.preferences import PreferenceRows


class PreferenceFile(IdFile[PreferenceRows]):
    """A run of ids a row, marked where the preference is of something good."""

    @staticmethod
    def runs_of(item: PreferenceRows) -> Sequence[MarkedIds]:
        return [(ids, item.is_good) for ids in item.rows]

    @staticmethod
    def item_of(runs: Sequence[MarkedIds]) -> PreferenceRows:
        return PreferenceRows(rows=tuple(ids for ids, _ in runs), is_good=all(is_good for _, is_good in runs))
