"""Stages that play a fixed set of tasks with a policy that does not learn from it, and keep what it gets right.

`filter` keeps tasks and `rejection_sampling` conversations. Evaluations play their tasks in the same way.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from strop.curation.rules import Outcome, outcome_of
from strop.errors import MachineError, TaskError
from strop.evaluation.metrics import verdict_of
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, PlayedKeys, Product, Sampled, StageResult, check_differ
from strop.reports.number_format import counted
from strop.rewards.base import written
from strop.rewards.language import scripts_of
from strop.runs.lineage import weights_digest
from strop.stages.context import StageContext, conversation_maker, load_chat, product_of, tasks_to_play
from strop.stages.loop.engines import MachineStage, task_files, tasks_there
from strop.stages.loop.ledger import settle_rollouts, void_reasons, write_timeline
from strop.stages.loop.rollouts import open_player
from strop.tasks.files import writing_rows
from strop.types import Group, ScoredTrajectory

_TASKS_AT_ONCE = 256  # their rollouts are held in memory until their groups are closed
_CALLS = re.compile(r"<(tool_call|python)>.*?(?:</\1>|\Z)", re.DOTALL)
_EAST_ASIAN = frozenset({"han", "kana"})  # Japanese writes with both


class FixedSetKeys(PlayedKeys):
    """Keys of a stage in which a model plays a fixed set of tasks."""

    init: str = Field(description="Stage whose model plays.")
    num_tasks: int | None = Field(default=None, ge=1, description="Number of tasks, the first of them. Default: all.")
    k: int = Field(default=8, ge=1, description="Rollouts of each task.")

    @model_validator(mode="after")
    def _can_differ(self) -> Self:
        check_differ(self.sampling.temperature, self.k, "1.0 is usual. Or set k = 1.")
        return self

    @property
    def num_first_tasks(self) -> int:
        return min(self.num_tasks or super().num_first_tasks, super().num_first_tasks)


class FixedSetStage(MachineStage):
    """Base of stages in which a model plays a fixed set of tasks."""

    root_keys = frozenset({"engine", "sandbox", "scheduler", "tools"})
    plays = True

    config: FixedSetKeys

    def files(self) -> Mapping[str, Path]:
        config = self.config
        return task_files("tasks", config.tasks, [config.played_split]) if config.has_own_tasks else {}

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        config = self.config
        there = tasks_there(name, config, recipe, config.num_tasks)  # None where nothing says how many there are
        limit = "up to " if there is None else ""
        num_tasks = config.num_tasks or 0 if there is None else min(there, config.num_tasks or there)
        num = num_tasks * config.k
        tasks = f"{limit}{counted(num_tasks, 'task')}" if num_tasks else "all tasks"
        total = f" = {limit}{counted(num, 'rollout')}" if num_tasks else ""
        return Estimate(
            arithmetic=f"{tasks} x {counted(config.k, 'rollout')}{total}",
            sampled=Sampled(tokens=num * config.sampling.max_tokens, rollouts=num),
        )


class SampledKeys(FixedSetKeys):
    """Keys of a stage that makes rows from the rollouts of a fixed set of tasks, and writes the outcome of each task."""

    data: tuple[str, ...] = Field(default=(), description="Stages whose tasks are played, instead of `tasks`.")

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.num_tasks is None and not self.data and self.tasks.is_endless:
            raise ValueError(f"tasks.kind = {self.tasks.kind!r} makes tasks without end. Set num_tasks, or data.")
        return self


async def play_tasks(
    context: StageContext, stage: FixedSetKeys, *, seed: int, weights: str = "", tasks_at_once: int | None = None
) -> AsyncIterator[Group]:
    """Yield a group of `k` rollouts for each of the stage's tasks, in their order.

    Rollouts that an interrupted try finished are not played again. No more groups are held than are played at once.

    Args:
        weights: digest of the model, if it is known; only rollouts that were sampled from the same weights count as finished.

    Raises:
        UserError: there are no tasks, or an engine could never hold a rollout of them.
        MachineError: every rollout is void.
    """
    model, source = product_of(context.run, stage.init), tasks_to_play(context, stage)
    num = stage.num_tasks if source.num_tasks is None else min(stage.num_tasks or source.num_tasks, source.num_tasks)
    if num is None:
        raise TaskError(f"stages.{context.name}: its tasks have no end. Set num_tasks.")
    context.started(num, 0)
    num_closed = num_void = num_valid = 0
    parts: list[Path] = []
    size = tasks_at_once or _TASKS_AT_ONCE
    weights = weights or weights_digest(model)
    async with open_player(context, stage, model) as player:
        player.check(stage, source)
        for number, start in enumerate(range(0, num, size)):
            parts.append(context.directory.rollouts(number))  # one for each part, because a ledger is read whole on resume
            with player.ledger(parts[-1], weights) as ledger:
                tasks = [(index, source.task(index)) for index in range(start, min(start + size, num))]
                waiting: dict[int, Group] = {}  # closed before one that comes before it
                next_index = start
                async for group in player.play(stage, tasks, ledger, num_rollouts=stage.k, seed=seed):
                    waiting[group.task_index] = group
                    num_closed, num_void = num_closed + 1, num_void + group.num_void
                    num_valid += len(group.trajectories)
                    while next_index in waiting:
                        yield waiting.pop(next_index)
                        next_index += 1
                    context.progress.step({}, num_closed)
            write_timeline(context, number, player.pool.last_batch)
    for problem in await asyncio.to_thread(lambda: [*settle_rollouts(context.directory, upto=len(parts), keep=len(parts))]):
        context.warn(problem)
    if not num_void:
        return
    reasons = Counter(reason for rollouts in parts for reason in void_reasons(rollouts))
    why = reasons.most_common(1)[0][0].rstrip(".") if reasons else "the reward could not judge them"
    why = f"The most frequent reason: {why}."
    if not num_valid:
        where = parts[0].parent
        raise MachineError(f"stages.{context.name}: every rollout of {num} tasks is void. {why} All reasons are in {where}.")
    context.warn(f"{num_void} rollouts are void and are not counted. {why}")


class Filter(FixedSetStage):
    """Keeps the tasks that a policy gets right neither too often nor too rarely.

    rStar2-Agent (arXiv 2508.20722), section 4.3, drops those that are right 8 times of 8.
    """

    makes = Product.TASKS

    class Config(SampledKeys):
        """Keys of `kind = "filter"`."""

        min_right: int = Field(default=0, ge=0, description="Fewest right rollouts of a task that is kept.")
        max_right: int | None = Field(
            default=None, ge=0, description="Most right rollouts of a task that is kept. Default: k - 1."
        )

        @property
        def most_right(self) -> int:
            return self.k - 1 if self.max_right is None else self.max_right

        @model_validator(mode="after")
        def _keeps_something(self) -> Self:
            if not self.min_right <= self.most_right <= self.k:
                raise ValueError(
                    f"min_right is {self.min_right} and max_right {self.most_right} of k = {self.k} rollouts. Choose min_right"
                    " <= max_right <= k."
                )
            return self

    config: Config

    async def run(self, context: StageContext) -> StageResult:
        """Play, judge and write. Raises `TaskError` if no task is kept."""
        config, directory = self.config, context.directory
        num_kept = num_dropped = num_unknown = 0
        first, verdict = "", verdict_of(config.reward)
        with (
            writing_rows(directory.dropped) as drop,
            writing_rows(directory.kept) as keep,
            writing_rows(directory.outcomes) as add_outcome,
        ):
            async for group in play_tasks(context, config, seed=context.seed("rollouts")):
                outcome = outcome_of(group, verdict)
                add_outcome(asdict(outcome))
                if reason := why_dropped(outcome, config):
                    num_dropped += 1
                    first = first or reason
                    counts = {"num_right": outcome.num_right, "num_judged": outcome.num_judged}
                    drop(asdict(group.task) | {"reason": reason, **counts})
                else:
                    num_kept += 1
                    num_unknown += not outcome.num_judged
                    keep(asdict(group.task))
        num = num_kept + num_dropped
        if not num_kept:
            raise TaskError(
                f"stages.{context.name}: none of {num} tasks has {config.min_right} to {config.most_right} right rollouts of"
                f" {config.k}; of the first: {first}. Loosen min_right or max_right, or give it other tasks. All reasons are in"
                f" {directory.dropped}."
            )
        unknown = f" ({num_unknown} of them without a verdict)" if num_unknown else ""
        summary = f"{num_kept} of {num} tasks kept{unknown}, {num_dropped} dropped"
        return StageResult(summary=summary, product=directory.kept)


def why_dropped(outcome: Outcome, stage: Filter.Config) -> str:
    """Return why a task is dropped; empty if it is kept.

    A rollout without a verdict may be right or wrong: a task is dropped only if no verdict on it could change that.
    """
    num_right, num_unknown = outcome.num_right, max(0, stage.k - outcome.num_judged)
    of = f"{num_right} of {stage.k} rollouts are right" + (f", {num_unknown} void" if num_unknown else "")
    if num_right > stage.most_right:
        return f"{of}, more than max_right = {stage.most_right}: too easy"
    if num_right + num_unknown < stage.min_right:
        return f"{of}, fewer than min_right = {stage.min_right}: too hard, or its answer is wrong"
    return ""


def why_not_right(is_right: bool | None) -> str:
    """Return why an attempt with this verdict is not kept; empty if it is right."""
    if is_right is None:
        return "no verdict: no part of the reward says whether it is right"
    return "" if is_right else "wrong: its answer is not right"


class RejectionSampling(FixedSetStage):
    """Keeps the right rollouts of a policy as conversations to imitate; DeepSeek-R1 (arXiv 2501.12948) section 2.3.

    Which figures R1 used is not published.
    """

    makes = Product.CONVERSATIONS

    class Config(SampledKeys):
        """Keys of `kind = "rejection_sampling"`."""

        max_per_task: int | None = Field(default=None, ge=1, description="Rollouts to keep of a task, at most. Default: all.")
        drop_repeats: bool = Field(default=True, description="Keep only the first of a task's rollouts with the same tokens.")
        max_foreign_share: float = Field(
            default=0.0, ge=0, le=1, description="Largest share of words in another script than most words."
        )
        max_paragraph_chars: int = Field(default=2000, ge=1, description="Longest paragraph, in characters.")
        allow_code_blocks: bool = Field(default=False, description="Keep rollouts with ``` outside of tool calls.")

    config: Config

    async def run(self, context: StageContext) -> StageResult:
        """Sample, judge and write the conversations. Raises `TaskError` if nothing is kept."""
        config, directory = self.config, context.directory
        make_row = conversation_maker(context, config.prompt, load_chat(product_of(context.run, config.init)))
        verdict = verdict_of(config.reward)
        why: Counter[str] = Counter()
        num_tasks = num_kept = num_void = 0
        with (
            writing_rows(directory.dropped) as drop,
            writing_rows(directory.kept) as keep,
            writing_rows(directory.outcomes) as add_outcome,
        ):
            async for group in play_tasks(context, config, seed=context.seed("rollouts")):
                num_tasks += 1
                num_void += group.num_void
                add_outcome(asdict(outcome_of(group, verdict)))
                for scored, reason in zip(group.trajectories, reasons(group, config), strict=True):
                    row = make_row(group.task, scored.trajectory)
                    if reason:
                        why[reason.partition(":")[0]] += 1
                        shown = {name: row[name] for name in ("id", "source", "messages")}
                        drop(shown | {"reason": reason, "answer": group.task.answer})
                    else:
                        num_kept += 1
                        keep(row)
        dropped = ", ".join(f"{num} {reason}" for reason, num in why.most_common()) or "none"
        if not num_kept:
            raise TaskError(
                f"stages.{context.name}: no rollout of {num_tasks} tasks is kept: {dropped}. Sample more (k), give it easier"
                f" tasks, or loosen its rules. All reasons are in {directory.dropped}."
            )
        void = f"; {num_void} are void" if num_void else ""
        summary = f"{num_kept} conversations of {num_tasks} tasks kept; dropped: {dropped}{void}"
        return StageResult(summary=summary, product=directory.kept)


def reasons(group: Group, stage: RejectionSampling.Config) -> list[str]:
    """Why each rollout of a group is dropped, in order; empty for one that is kept."""
    found = []
    said: set[tuple[tuple[int, ...], ...]] = set()
    num_kept = 0
    for scored in group.trajectories:
        ids = tuple(turn.completion.ids for turn in scored.trajectory.turns)
        reason = why_rejected(scored, stage)
        if not reason and stage.drop_repeats and ids in said:
            reason = "repeated: the same as one that is kept"
        if not reason and stage.max_per_task is not None and num_kept >= stage.max_per_task:
            reason = f"enough: max_per_task = {stage.max_per_task} of its task are kept"
        if not reason:
            said.add(ids)
            num_kept += 1
        found.append(reason)
    return found


def why_rejected(scored: ScoredTrajectory, stage: RejectionSampling.Config) -> str:
    """What is wrong with a rollout by itself; empty where nothing is."""
    if reason := why_not_right(verdict_of(stage.reward)(scored)):
        return reason
    if scored.trajectory.is_truncated:
        return "truncated: it ran out of tokens"
    text = _CALLS.sub(" ", written(scored.trajectory))
    if not stage.allow_code_blocks and "```" in text:
        return "code block: it has one outside of a tool call"
    apart = "\n\n".join(turn.completion_text for turn in scored.trajectory.turns)  # where a tool has answered, too
    longest = max(len(each.strip()) for each in re.split(r"\n\s*\n", _CALLS.sub("\n\n", apart)))
    if longest > stage.max_paragraph_chars:
        return f"long paragraph: of {longest} characters"
    if (share := foreign_share(text)) > stage.max_foreign_share:
        return f"mixed languages: {share:.1%} of its words are in another script than most"
    return ""


def foreign_share(text: str) -> float:
    """Words in another script than most words of `text`, as a share of all.

    Code, mathematics and single Latin or Greek letters, which name variables, count nowhere.
    """
    scripts = Counter("East Asian" if script in _EAST_ASIAN else script for script in scripts_of(text))
    total = scripts.total()
    return 1 - max(scripts.values()) / total if total else 0.0
