"""Makes one set of several: all rows, counts, or shares of a total, without replacement and in a seeded order."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

from strop.errors import TaskError
from strop.pipelines.recipe import MixStage
from strop.pipelines.stage import StageContext
from strop.pipelines.stage_data import kept_path, open_rows, write_rows


async def run_mix_stage(context: StageContext, stage: MixStage) -> tuple[Path, str]:
    """Draw and write; returns the file and one sentence about it. Raises `TaskError` where there are too few rows."""
    context.progress.stage_started(context.name, stage.kind, 1, 0)
    with ExitStack() as opened:
        rows = {name: opened.enter_context(open_rows(context.run, name)) for name in stage.data}
        counts = counts_of(stage, {name: len(each) for name, each in rows.items()})
        starts = list(accumulate(map(len, rows.values()), initial=0))
        drawn = array("Q")  # rows of all stages are numbered through, and stay on disk until they are written
        for start, (name, each) in zip(starts, rows.items(), strict=False):
            if counts[name] > len(each):
                raise TaskError(
                    f"stages.{context.name}: {counts[name]} rows of {name!r} are asked for, but it made {len(each)}. Lower"
                    f" the count (or share, or total), or let {name!r} make more."
                )
            draw = random.Random(context.seed("draw", name))
            drawn.extend(start + number for number in draw.sample(range(len(each)), counts[name]))
        random.Random(context.seed("order")).shuffle(drawn)
        files = list(rows.values())
        places = ((bisect_right(starts, number) - 1, number) for number in drawn)
        write_rows(kept_path(context.directory), (files[place][number - starts[place]] for place, number in places))
        told = ", ".join(f"{counts[name]} of {len(each)} of {name}" for name, each in rows.items())
        return kept_path(context.directory), f"{len(drawn)} rows: {told}"


def counts_of(stage: MixStage, available: Mapping[str, int]) -> Mapping[str, int]:
    """How many rows of each stage; of shares those that add up to `total`, the largest remainders rounded up."""
    if stage.counts is not None:
        return stage.counts
    if stage.shares is None or stage.total is None:
        return available
    exact = {name: share * stage.total for name, share in stage.shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder: Sequence[str] = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: stage.total - sum(counts.values())]:
        counts[name] += 1
    return counts
