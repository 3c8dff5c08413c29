"""Keeps pairs of responses on disk, as ids, while a policy learns from them: a batch is in memory, and where each begins."""

from __future__ import annotations

from collections.abc import Sequence

from strop.pipelines.id_file import IdFile, MarkedIds
from strop.training.dpo import PairIds


class PairFile(IdFile[PairIds]):
    """Three runs of ids: the prompt, and the responses, which are marked."""

    @staticmethod
    def runs_of(item: PairIds) -> Sequence[MarkedIds]:
        return [(item.prompt, False), (item.chosen, True), (item.rejected, True)]

    @staticmethod
    def item_of(runs: Sequence[MarkedIds]) -> PairIds:
        prompt, chosen, rejected = (ids for ids, _ in runs)
        return PairIds(prompt=prompt, chosen=chosen, rejected=rejected)
