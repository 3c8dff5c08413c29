"""Keeps preferences on disk, as ids, while a reward model learns from them: a batch is in memory, and where each begins."""

from __future__ import annotations

from collections.abc import Sequence

from strop.pipelines.id_file import IdFile, MarkedIds
from strop.training.preferences import PreferenceRows


class PreferenceFile(IdFile[PreferenceRows]):
    """The ids of the question, then those of each response, marked where the preference is of something good."""

    @staticmethod
    def runs_of(item: PreferenceRows) -> Sequence[MarkedIds]:
        num = item.num_prompt_ids
        return [(item.rows[0][:num], False), *((ids[num:], item.is_good) for ids in item.rows)]

    @staticmethod
    def item_of(runs: Sequence[MarkedIds]) -> PreferenceRows:
        (prompt, _), *responses = runs
        return PreferenceRows(
            rows=tuple(prompt + ids for ids, _ in responses),
            num_prompt_ids=len(prompt),
            is_good=all(is_good for _, is_good in responses),
        )
