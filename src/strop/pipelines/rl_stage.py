"""Reinforcement learning: roll out, select, update, publish, write down; one step after the other.

tasks -> play -> scored groups -> select -> advantages + pack -> updates -> publish -> run log
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from torch import Tensor

from strop.algorithms.protocol import Column, Selection
from strop.evaluation.summary import num_sampled_tokens, rollout_metrics, tool_call_metrics
from strop.pipelines.recipe import RlStage
from strop.pipelines.sft_stage import write_model
from strop.pipelines.skipped import update_or_keep
from strop.pipelines.stage import StageContext, model_of
from strop.pipelines.step_figures import Clock, selection_metrics, update_metrics, why_no_progress, why_void
from strop.pipelines.step_rollouts import StepRollouts, open_rollouts, write_selection
from strop.pipelines.stepping import StepResult, take_steps
from strop.training.batch import TokenBatch, pack, split_by_group
from strop.training.opening import open_trainer
from strop.training.protocol import Trainer, UpdateReport
from strop.types import Group


async def run_rl_stage(context: StageContext, stage: RlStage) -> tuple[Path, str]:
    """Train from the last checkpoint to the last step; returns the model directory and one sentence about it."""
    init = model_of(context.run, stage.init)
    async with AsyncExitStack() as opened:
        trainer = open_trainer(
            init,
            stage.trainer,
            reference=init if Column.REFERENCE_LOGPROBS in stage.method.needs else None,
            total_updates=stage.steps * stage.updates_per_step * stage.epochs,
        )
        opened.push_async_callback(trainer.close)
        rollouts = await opened.enter_async_context(open_rollouts(context, stage, init))
        await take_steps(context, stage, trainer, rollouts, _Loop(context, stage, trainer, rollouts).step)
        await write_model(context, trainer)
        return context.directory.model, f"{stage.steps} steps of {stage.method.name}, {trainer.num_updates} updates"


def is_solved(figures: Mapping[str, float]) -> bool:
    """Whether a step left no gradient because most rollouts are right, which is no reason to give up."""
    return figures.get("update/grad_norm", 0.0) == 0 and figures.get("rollout/accuracy", 0.0) > 0.5


class _Loop:
    """What stays the same from step to step."""

    def __init__(self, context: StageContext, stage: RlStage, trainer: Trainer, rollouts: StepRollouts) -> None:
        self.context, self.stage, self.trainer, self.rollouts = context, stage, trainer, rollouts

    async def step(self, step: int, weights: str) -> StepResult:
        """One step from the policy with checksum `weights`."""
        stage, clock = self.stage, Clock()
        groups, played = await self.rollouts.play(step, weights)
        rollout_s = clock.lap()
        selections = [
            stage.method.select(group, group_size=stage.group_size, seed=self.context.seed("select", step, group.task_index))
            for group in groups
        ]
        advantages = stage.method.advantages(selections)  # of the whole step: a mini-batch is no baseline
        batches = await self._pack(selections, advantages)
        score_s = clock.lap()
        reports = [
            await update_or_keep(
                self.context, self.trainer, batch, stage.method.token_loss, stage.method.token_statistics, step=step
            )
            for _ in range(stage.epochs)
            for batch in batches
        ]
        update_s = clock.lap()
        write_selection(self.context, step, selections, advantages)
        weights = await self.rollouts.publish(self.trainer, version=step)
        figures = (
            rollout_metrics(groups)
            | played.as_metrics()
            | tool_call_metrics(groups)
            | selection_metrics(selections)
            | update_metrics(reports)
            | _gap_metrics(batches, reports)
            | {
                "rollout/tokens_per_s": num_sampled_tokens(groups) / rollout_s,
                "time/rollout_s": rollout_s,
                "time/score_s": score_s,
                "time/update_s": update_s,
                "time/publish_s": clock.lap(),
                "time/step_s": clock.total,
            }
        )
        self.context.event("step_finished", step=step, weights=weights)
        problems = [] if is_solved(figures) else _why_stuck(groups, selections, advantages, reports)
        return StepResult(figures=figures, weights=weights, problems=problems)

    async def _pack(self, selections: Sequence[Selection], advantages: Sequence[Sequence[Tensor]]) -> list[TokenBatch]:
        """The batch of each update, with every column that the method needs.

        Of a single update old log-probs are what it computes itself. Of several, all are scored before the first.
        """
        stage, method = self.stage, self.stage.method
        of_group = {id(selection): each for selection, each in zip(selections, advantages, strict=True)}
        parts = split_by_group(selections, stage.updates_per_step)
        is_single = len(parts) * stage.epochs == 1
        columns = method.needs - {Column.OLD_LOGPROBS} if is_single else method.needs
        batches = []
        for part in parts:
            batch = pack(
                part,
                [of_group[id(selection)] for selection in part],
                aggregation=method.aggregation,
                temperature=stage.sampling.temperature,
                constant=method.constant,
            )
            for column in sorted(columns):
                batch = await self.trainer.score(batch, column)
            batches.append(batch)
        return batches


def _gap_metrics(batches: Sequence[TokenBatch], reports: Sequence[UpdateReport]) -> dict[str, float]:
    """|log-prob of the sampler - log-prob of the trainer's full forward| of the same weights, in nats (law 5)."""
    gaps = [
        (batch.columns[Column.OLD_LOGPROBS] - batch.sampled_logprobs)[batch.loss_mask].abs()
        for batch in batches
        if Column.OLD_LOGPROBS in batch.columns
    ]
    if not gaps:  # the first update is on policy, so what it says of its own log-probs is of the same weights
        first = next((report.statistics for report in reports if not report.is_skipped), {})
        names = {"sampler_gap_nats": "policy/logprob_gap_mean", "sampler_gap_nats_max": "policy/logprob_gap_max"}
        return {metric: first[name] for name, metric in names.items() if name in first}
    gap = torch.cat(gaps)
    return {"policy/logprob_gap_mean": gap.mean().item(), "policy/logprob_gap_max": gap.max().item()}


def _why_stuck(
    groups: Sequence[Group],
    selections: Sequence[Selection],
    advantages: Sequence[Sequence[Tensor]],
    reports: Sequence[UpdateReport],
) -> list[str]:
    """Why this step taught nothing, in words for the user (law 11); empty when it did."""
    if void := why_void(groups):
        return void
    scored = [each for group in groups for each in group.trajectories]
    has_advantage = any(bool(of_tokens.any()) for of_group in advantages for of_tokens in of_group)
    if all(group.is_tied for group in groups) and not has_advantage:
        rewards = {each.reward for each in scored}
        same = f"all {len(scored)} rewards are {rewards.pop():g}" if len(rewards) == 1 else "within each, all rewards are equal"
        return [f"every group is tied: {same}."]
    if not any(selection.kept for selection in selections):
        reasons = Counter(decision.reason for selection in selections for decision in selection.decisions)
        return [f"the method kept none of {len(scored)} rollouts, most often because: {reasons.most_common(1)[0][0]}."]
    return why_no_progress(groups, reports)
