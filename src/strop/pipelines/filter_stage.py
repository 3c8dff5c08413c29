"""Difficulty filter: keep the tasks that the current policy gets right neither too often nor too rarely."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from strop.errors import TaskError
from strop.evaluation.verdict import Verdict, verdict_of
from strop.pipelines.recipe import FilterStage
from strop.pipelines.sampled import outcome_row, play_sampled
from strop.pipelines.stage import StageContext
from strop.pipelines.stage_data import RowsWriter, dropped_path, kept_path, outcomes_path
from strop.types import Group


async def run_filter_stage(context: StageContext, stage: FilterStage) -> tuple[Path, str]:
    """Play, judge and write; returns the file of kept tasks and one sentence about it.

    Raises:
        TaskError: no task is kept.
    """
    directory = context.directory
    verdict = verdict_of(stage.reward)
    num_kept = num_dropped = num_without_verdict = num_void = 0
    first = ""
    with (
        RowsWriter(dropped_path(directory)) as dropped,
        RowsWriter(kept_path(directory)) as kept,
        RowsWriter(outcomes_path(directory)) as outcomes,
    ):
        async for group in play_sampled(context, stage):
            outcomes.add(outcome_row(group, verdict))
            reason = why_dropped(group, stage)
            task = asdict(group.task)
            num_right, num_judged = _counts(group, verdict)
            if reason:
                num_dropped += 1
                first = first or reason
                dropped.add(task | {"reason": reason, "num_right": num_right, "num_judged": num_judged})
            else:
                kept.add(task)
                num_kept += 1
                num_void += not group.trajectories
                num_without_verdict += bool(group.trajectories) and not num_judged
    num = num_kept + num_dropped
    if not num_kept:
        raise TaskError(
            f"stages.{context.name}: none of {num} tasks has {stage.min_right} to {stage.most_right} right rollouts of"
            f" {stage.k}; of the first: {first}. Loosen min_right or max_right, or give it other tasks."
            f" All reasons are in {dropped_path(directory)}."
        )
    since = [
        f"{count} of them since {why}"
        for count, why in ((num_without_verdict, "nothing says what is right"), (num_void, "every rollout is void"))
        if count
    ]
    told = f" ({', '.join(since)})" if since else ""
    return kept_path(directory), f"{num_kept} of {num} tasks kept{told}, {num_dropped} dropped"


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
