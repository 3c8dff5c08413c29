"""Difficulty filter: keep the tasks that the current policy gets right neither too often nor too rarely."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from strop.errors import TaskError
from strop.evaluation.verdict import Verdict, verdict_of
from strop.pipelines.recipe import FilterStage
from strop.pipelines.sampled import play_sampled
from strop.pipelines.stage import StageContext
from strop.pipelines.stage_data import dropped_path, kept_path, write_rows
from strop.types import Group


async def run_filter_stage(context: StageContext, stage: FilterStage) -> tuple[Path, str]:
    """Play, judge and write; returns the file of kept tasks and one sentence about it.

    Raises:
        TaskError: no task is kept.
    """
    kept: list[tuple[int, dict[str, Any]]] = []
    dropped: list[tuple[int, dict[str, Any]]] = []
    verdict, num_without_verdict = verdict_of(stage.reward), 0
    async for group in play_sampled(context, stage):
        reason = why_dropped(group, stage)
        task = asdict(group.task)
        if reason:
            num_right, num_judged = _counts(group, verdict)
            dropped.append((group.task_index, task | {"reason": reason, "num_right": num_right, "num_judged": num_judged}))
        else:
            kept.append((group.task_index, task))
            num_without_verdict += bool(group.trajectories) and not _counts(group, verdict)[1]
    for path, rows in ((dropped_path(context.directory), dropped), (kept_path(context.directory), kept)):
        write_rows(path, (row for _, row in sorted(rows, key=lambda each: each[0])))
    num = len(kept) + len(dropped)
    if not kept:
        raise TaskError(
            f"stages.{context.name}: none of {num} tasks has {stage.min_right} to {stage.most_right} right rollouts of"
            f" {stage.k}; of the first: {min(dropped)[1]['reason']}. Loosen min_right or max_right, or give it other tasks."
            f" All reasons are in {dropped_path(context.directory)}."
        )
    without = f" ({num_without_verdict} of them since nothing says what is right)" if num_without_verdict else ""
    return kept_path(context.directory), f"{len(kept)} of {num} tasks kept{without}, {len(dropped)} dropped"


def why_dropped(group: Group, stage: FilterStage) -> str:
    """Why a task does not stay, by how many of its rollouts are right; empty where it does.

    A rollout that is void, or that no part of the reward judges right or wrong, speaks for neither side: a task is dropped only
    where it could not have changed that (law 3).
    """
    num_right, num_judged = _counts(group, verdict_of(stage.reward))
    num_void = stage.k - num_judged
    of = f"{num_right} of {stage.k} rollouts are right" + (f", {num_void} void" if num_void > 0 else "")
    if num_right > stage.most_right:
        return f"{of}, more than max_right = {stage.most_right}: too easy"
    if num_right + max(0, num_void) < stage.min_right:
        return f"{of}, fewer than min_right = {stage.min_right}: too hard, or its answer is wrong"
    return ""


def _counts(group: Group, verdict: Verdict) -> tuple[int, int]:
    """How many rollouts are right, and of how many that is known."""
    found = [verdict(scored) for scored in group.trajectories]
    return found.count(True), len(found) - found.count(None)
