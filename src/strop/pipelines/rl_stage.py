"""Reinforcement learning: roll out, select, update, publish, write down; one step after the other, or the next roll out beside.

tasks -> play -> scored groups -> select -> advantages + pack -> updates -> publish -> run log
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from torch import Tensor

from strop.algorithms.protocol import Column, Selection
from strop.errors import CannotLearnError
from strop.evaluation.summary import rollout_metrics, tool_call_metrics
from strop.evaluation.verdict import verdict_of
from strop.pipelines.ahead import Ahead, staleness_metrics
from strop.pipelines.critic import critic_metrics, critic_rows, judge, update_critic_or_keep
from strop.pipelines.idle_parts import IdleParts
from strop.pipelines.recipe import RlStage
from strop.pipelines.skipped import update_or_keep
from strop.pipelines.stage import StageContext, model_of
from strop.pipelines.step_figures import (
    Clock,
    cost_metrics,
    how_many_cut_off,
    not_made,
    selection_metrics,
    update_metrics,
    update_rows,
    why_calls_fail,
    why_no_progress,
    why_some_are_void,
    why_void,
)
from strop.pipelines.step_rollouts import StepRollouts, open_rollouts, write_selection
from strop.pipelines.stepping import StepResult, take_steps
from strop.pipelines.validation import write_product
from strop.reports.scales import counted
from strop.training.batch import Ban, TokenBatch, pack, split_by_group
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
            critic=model_of(context.run, stage.critic_init or stage.init) if Column.VALUES in stage.method.needs else None,
            total_updates=stage.num_updates,
            total_critic_updates=stage.num_critic_updates,
        )
        opened.push_async_callback(trainer.close)
        rollouts = await opened.enter_async_context(open_rollouts(context, stage, init))
        loop = _Loop(context, stage, trainer, rollouts)
        opened.push_async_callback(loop.ahead.close)
        taken = await take_steps(context, stage, trainer, rollouts, loop.step)
        product = await write_product(context, trainer, stage)
        updates = counted(trainer.num_updates, "update")
        return product, f"{counted(taken.steps, 'step')} of {stage.method.name}, {updates}{taken.note}"


class _Loop:
    """What stays the same from step to step."""

    def __init__(self, context: StageContext, stage: RlStage, trainer: Trainer, rollouts: StepRollouts) -> None:
        self.context, self.stage, self.trainer, self.rollouts = context, stage, trainer, rollouts
        self.idle_parts = IdleParts(context)
        self.ahead = Ahead(context, stage, rollouts, is_used=lambda step, group: bool(self._select(step, group).kept))

    async def step(self, step: int, stage: RlStage, weights: str) -> StepResult:
        """One step of `stage`, as its schedule has it now, from the policy with checksum `weights`."""
        method, clock = stage.method, Clock()
        played = await self.ahead.take(step, stage, weights)
        groups, staleness = played.groups, staleness_metrics(played.groups, step) if stage.max_staleness else {}
        self.ahead.begin(step + 1, weights)
        clock.lap()
        selections = [self._select(step, group) for group in groups]
        advantages = method.advantages(selections)  # of the whole step: a mini-batch is no baseline
        parts = split_by_group(selections, stage.updates_per_step)
        batches = await self._pack(stage, parts, selections, advantages)
        if method.critic is not None:
            batches, advantages = judge(method.critic, selections, parts, batches)
        score_s = clock.lap()
        reports, critic_reports, gave_up = await self._update(step, batches)
        tie = _tie(groups, advantages, has_critic=method.critic is not None)
        problems = _why_stuck(groups, selections, tie, reports, critic_reports)
        if not batches:
            num_left_out = stage.updates_per_step * stage.epochs if step > stage.steps_of_critic_alone else 0
            reports = not_made(num_left_out, problems[0], update=self.trainer.num_updates)
        update_s = clock.lap()
        await self.ahead.settle()
        ahead_wait_s = clock.lap()
        write_selection(self.context, step, selections, advantages)
        weights = await self.rollouts.publish(self.trainer, version=step)
        figures = (
            rollout_metrics(groups, verdict_of(stage.reward))
            | dict(played.figures)
            | staleness
            | tool_call_metrics(groups)
            | selection_metrics(selections)
            | ({"groups/refilled": float(len(groups) - stage.tasks_per_step)} if method.refill_rounds else {})
            | self.rollouts.branch_metrics(groups, step)
            | update_metrics(reports)
            | cost_metrics(reports)
            | critic_metrics(batches, critic_reports)
            | ({} if staleness.get("rollout/staleness_max") else _gap_metrics(batches, reports))
            | {
                "rollout/tokens_per_s": played.tokens_per_s,
                "time/rollout_s": played.time_s,
                "time/score_s": score_s,
                "time/update_s": update_s,
                **({"time/ahead_wait_s": ahead_wait_s} if stage.max_staleness else {}),
                "time/publish_s": clock.lap(),
                "time/step_s": clock.total,
            }
        )
        self.idle_parts.look(step, stage, groups)
        self.context.event("step_finished", step=step, weights=weights)
        # What leaves no gradient because most rollouts are right is no reason to give up.
        is_solved = figures.get("rollout/accuracy", 0.0) > 0.5 and (bool(tie) or figures.get("update/grad_norm", 0.0) == 0)
        problems = [] if is_solved else problems
        problems += why_some_are_void(groups, self.context.directory.rollouts(step)) if problems else []
        updates = [*update_rows(reports), *critic_rows(critic_reports)]
        return StepResult(figures=figures, weights=weights, problems=problems, updates=updates, gave_up=gave_up)

    def _select(self, step: int, group: Group) -> Selection:
        seed = self.context.seed("select", step, group.task_index)
        return self.stage.method.select(group, group_size=self.stage.group_size, seed=seed)

    async def _update(
        self, step: int, batches: Sequence[TokenBatch]
    ) -> tuple[list[UpdateReport], list[UpdateReport], CannotLearnError | None]:
        """Every update of a step: reports of the policy, and of the critic where there is one; and why they ended early.

        Raises:
            CannotLearnError: too many were skipped, before any was made.
        """
        method, reports, critic_reports = self.stage.method, [], []
        try:
            for batch in [*batches] * self.stage.epochs:
                if method.critic is not None:
                    report = await update_critic_or_keep(self.context, self.trainer, batch, method.critic, step=step)
                    critic_reports.append(report)
                if step > self.stage.steps_of_critic_alone:
                    report = await update_or_keep(
                        self.context, self.trainer, batch, method.token_loss, method.token_statistics, step=step
                    )
                    reports.append(report)
        except CannotLearnError as error:
            if all(report.is_skipped for report in [*reports, *critic_reports]):
                raise
            return reports, critic_reports, error
        return reports, critic_reports, None

    async def _pack(
        self,
        stage: RlStage,
        parts: Sequence[Sequence[Selection]],
        selections: Sequence[Selection],
        advantages: Sequence[Sequence[Tensor]],
    ) -> list[TokenBatch]:
        """The batch of each update, with every column that the method needs.

        Of a single update old log-probs are what it computes itself, unless they are needed earlier. Of several, all are
        scored before the first.
        """
        method = stage.method
        of_group = {id(selection): each for selection, each in zip(selections, advantages, strict=True)}
        of_estimates = frozenset[Column]() if method.critic is None else method.critic.estimates_need
        is_single = len(parts) * stage.epochs == 1
        columns = method.needs - {Column.OLD_LOGPROBS} | of_estimates if is_single else method.needs
        batches = []
        for part in parts:
            batch = pack(
                part,
                [of_group[id(selection)] for selection in part],
                aggregation=method.aggregation,
                temperature=stage.sampling.temperature,
                constant=method.constant,
                ban=Ban(ids=self.rollouts.stop_ids, num_tokens=stage.sampling.min_tokens),
            )
            for column in sorted(columns):
                batch = await self.trainer.score(batch, column)
            batches.append(batch)
        return batches


def _gap_metrics(batches: Sequence[TokenBatch], reports: Sequence[UpdateReport]) -> dict[str, float]:
    """|log-prob of the sampler - log-prob of the trainer's full forward| of the same weights, in nats (law 5).

    It has no meaning where rollouts are of older weights.
    """
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


def _tie(groups: Sequence[Group], advantages: Sequence[Sequence[Tensor]], *, has_critic: bool) -> str:
    """A sentence where rewards do not tell rollouts apart that are compared; empty where they do.

    A critic compares all of them, and errs: advantages that it finds where all rewards are equal are noise.
    """
    rewards = [each.reward for group in groups for each in group.trajectories]
    if len(set(rewards)) == 1:
        is_tied, same = has_critic or not _has_any(advantages), f"all {len(rewards)} rewards are {rewards[0]:g}"
    else:
        is_tied = not has_critic and all(group.is_tied for group in groups) and not _has_any(advantages)
        same = "within each, all rewards are equal"
    return f"every group is tied: {same}.{how_many_cut_off(groups)}" if rewards and is_tied else ""


def _has_any(advantages: Sequence[Sequence[Tensor]]) -> bool:
    return any(bool(of_tokens.any()) for of_group in advantages for of_tokens in of_group)


def _why_stuck(
    groups: Sequence[Group],
    selections: Sequence[Selection],
    tie: str,
    reports: Sequence[UpdateReport],
    critic_reports: Sequence[UpdateReport],
) -> list[str]:
    """Why this step taught nothing, in words for the user (law 11); empty when it did."""
    if void := why_void(groups):
        return void
    if tie:
        return [tie, *why_calls_fail(groups)]
    if not any(selection.kept for selection in selections):
        reasons = Counter(decision.reason for selection in selections for decision in selection.decisions)
        num_scored = sum(len(group.trajectories) for group in groups)
        why = f"the method kept none of {num_scored} rollouts, most often because: {reasons.most_common(1)[0][0]}."
        return [f"{why}{how_many_cut_off(groups)}", *why_calls_fail(groups)]
    of_critic = [
        f"update {report.update} of the critic was skipped: {report.skip_reason}"
        for report in critic_reports
        if report.is_skipped
    ]
    return why_no_progress(groups, reports) + of_critic
