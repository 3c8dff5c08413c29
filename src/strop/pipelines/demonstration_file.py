"""Keeps the demonstrations of a stage on disk while it trains: a batch of them is in memory, and where each begins."""

from __future__ import annotations

from collections.abc import Sequence

from strop.pipelines.id_file import IdFile, MarkedIds
from strop.training.sft import Demonstration, Segment


class DemonstrationFile(IdFile[Demonstration]):
    """A run of ids a segment, marked where the demonstrator wrote it."""

    @staticmethod
    def runs_of(item: Demonstration) -> Sequence[MarkedIds]:
        return [(segment.ids, segment.is_demonstrator) for segment in item.segments]

    @staticmethod
    def item_of(runs: Sequence[MarkedIds]) -> Demonstration:
        return Demonstration(segments=tuple(Segment(ids=ids, is_demonstrator=marked) for ids, marked in runs))
