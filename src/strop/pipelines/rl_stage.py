"""Reinforcement learning: roll out, select, update, publish, write down; one step after the other.

tasks -> play -> scored groups -> select -> advantages + pack -> updates -> publish -> run log
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.protocol import Column, Selection
from strop.errors import CannotLearnError
from strop.evaluation.summary import num_sampled_tokens, rollout_metrics, tool_call_metrics
from strop.pipelines import checkpoints
from strop.pipelines.engines import open_fleet, write_timeline
from strop.pipelines.ledger import StepLedger
from strop.pipelines.recipe import RlStage
from strop.pipelines.room import check_engines
from strop.pipelines.sft_stage import write_model
from strop.pipelines.skipped import update_or_keep
from strop.pipelines.stage import StageContext, load_chat, make_player, model_of
from strop.rewards import make_reward
from strop.rollout.chat import ChatFormat
from strop.rollout.fleet import Fleet
from strop.rollout.play import play
from strop.rollout.protocol import Reward
from strop.runs import write_json
from strop.tasks import make_tasks
from strop.tasks.protocol import TaskSource
from strop.training.batch import TokenBatch, pack, split_by_group
from strop.training.opening import open_trainer
from strop.training.protocol import Trainer, UpdateReport
from strop.types import Group


async def run_rl_stage(context: StageContext, stage: RlStage) -> tuple[Path, str]:
    """Train from the last checkpoint to the last step; returns the model directory and one sentence about it."""
    init = model_of(context.run, stage.init)
    chat = load_chat(init)
    async with AsyncExitStack() as opened:
        trainer = open_trainer(
            init,
            stage.trainer,
            reference=init if Column.REFERENCE_LOGPROBS in stage.method.needs else None,
            total_updates=stage.steps * stage.updates_per_step * stage.epochs,
        )
        opened.push_async_callback(trainer.close)
        fleet = await open_fleet(context, init, chat)
        opened.push_async_callback(fleet.close)
        reward = make_reward(stage.reward, context.runner)
        opened.push_async_callback(reward.close)
        check_engines(context.recipe, context.name, stage, chat, context.tools(), fleet)
        loop = _Loop(context, stage, trainer, fleet, reward, chat)
        done = await checkpoints.resume(context, trainer)
        context.progress.stage_started(context.name, stage.kind, stage.steps, done)
        metrics = context.metrics(done_steps=done)
        weights = await fleet.publish(partial(trainer.publish, version=done), version=done)
        num_stuck = int(metrics.last.get("update/stuck_steps", 0))
        for step in range(done + 1, stage.steps + 1):
            figures, weights, problems = await loop.step(step, weights)
            problems = [] if is_solved(figures) else problems
            num_stuck = num_stuck + 1 if problems else 0
            metrics.append(step, {**figures, "update/stuck_steps": num_stuck})  # before the checkpoint that makes it count
            for problem in problems:
                context.warn(f"step {step} cannot learn: {problem}")
            if step % stage.checkpoint_every == 0 and step < stage.steps:
                await checkpoints.save(context, trainer, step, keep=stage.keep_checkpoints)
            if num_stuck >= stage.give_up_after:
                raise CannotLearnError(
                    f"stages.{context.name}: {num_stuck} steps in a row could not learn; of step {step}: {'; '.join(problems)}"
                    f" Everything up to step {step} is in {context.directory.path}. Try easier tasks, a better starting point"
                    " (SFT), more rollouts per task, or raise give_up_after to go on."
                )
        metrics.close()
        await write_model(context, trainer)
        return context.directory.model, f"{stage.steps} steps of {stage.method.name}, {trainer.num_updates} updates"


def is_solved(figures: Mapping[str, float]) -> bool:
    """Whether a step left no gradient because most rollouts are right, which is no reason to give up."""
    return figures.get("update/grad_norm", 0.0) == 0 and figures.get("rollout/accuracy", 0.0) > 0.5


class _Loop:
    """What stays the same from step to step."""

    def __init__(
        self,
        context: StageContext,
        stage: RlStage,
        trainer: Trainer,
        fleet: Fleet,
        reward: Reward,
        chat: ChatFormat,
    ) -> None:
        self.context, self.stage = context, stage
        self.trainer, self.fleet, self.reward, self.chat = trainer, fleet, reward, chat
        self.tasks: TaskSource = make_tasks(stage.tasks, seed=context.seed("tasks"), split="train")

    async def step(self, step: int, weights: str) -> tuple[dict[str, float], str, list[str]]:
        """One step from the policy with checksum `weights`: its metrics, the next policy's checksum, why it could not learn."""
        stage, clock = self.stage, _Clock()
        groups = await self._roll_out(step, weights)
        rollout_s, played = clock.lap(), self.fleet.last_batch
        write_timeline(self.context, step, played)
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
        self._write_selection(step, selections, advantages)
        weights = await self.fleet.publish(partial(self.trainer.publish, version=step), version=step)
        figures = (
            rollout_metrics(groups)
            | played.as_metrics()
            | tool_call_metrics(groups)
            | _selection_metrics(selections)
            | _update_metrics(reports)
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
        return figures, weights, _why_stuck(groups, selections, advantages, reports)

    async def _roll_out(self, step: int, weights: str) -> list[Group]:
        """The step's groups in canonical order; what an interrupted try of the same policy finished is not played again."""
        stage, context = self.stage, self.context
        first = (step - 1) * stage.tasks_per_step
        tasks = [(index, self.tasks.task(index)) for index in range(first, first + stage.tasks_per_step)]
        ledger = StepLedger(context.directory.rollouts(step), weights=weights, policy_version=self.fleet.policy_version)
        player = make_player(
            stage, engine=self.fleet, chat=self.chat, tools=context.tools(), reward=self.reward, observe=ledger
        )
        try:
            playing = play(
                tasks,
                player,
                num_rollouts=stage.rollouts_per_task,
                seed=context.seed("rollouts", step),
                observer=ledger,
                finished=ledger.finished_before,
            )
            groups = [group async for group in playing]
        finally:
            ledger.close()
        return sorted(groups, key=lambda group: group.task_index)

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

    def _write_selection(self, step: int, selections: Sequence[Selection], advantages: Sequence[Sequence[Tensor]]) -> None:
        groups = [
            {
                "task": asdict(selection.group.task),
                "task_index": selection.group.task_index,
                "num_void": selection.group.num_void,
                "rollouts": _rollout_records(selection, of_kept),
            }
            for selection, of_kept in zip(selections, advantages, strict=True)
        ]
        write_json(self.context.directory.selection(step), {"step": step, "groups": groups})


def _rollout_records(selection: Selection, advantages: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Per rollout of the group: kept or not and why, its reward, and its largest advantage by size (0 when dropped)."""
    of_kept = iter(advantages)
    records = []
    for scored, decision in zip(selection.group.trajectories, selection.decisions, strict=True):
        advantage = 0.0
        if decision.is_kept:
            tokens = next(of_kept)
            advantage = tokens[tokens.abs().argmax()].item() if tokens.numel() else 0.0
        records.append(
            {
                "key": asdict(scored.trajectory.key),
                "is_kept": decision.is_kept,
                "reason": decision.reason,
                "figures": dict(decision.figures),
                "advantage": advantage,
                "reward": scored.reward,
            }
        )
    return records


def _selection_metrics(selections: Sequence[Selection]) -> dict[str, float]:
    return {
        "groups/used": float(sum(bool(selection.kept) for selection in selections)),
        "groups/rollouts_used": float(sum(len(selection.kept) for selection in selections)),
    }


def _update_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Means over the step's updates; nothing of an empty step, so that a curve shows a hole and not a zero."""
    num_skipped = sum(report.is_skipped for report in reports)
    reports = [report for report in reports if not report.is_skipped]
    if not reports:
        return {"update/skipped": float(num_skipped)}
    num = len(reports)
    metrics = {
        "update/skipped": float(num_skipped),
        "update/loss": sum(report.loss for report in reports) / num,
        "update/grad_norm": sum(report.grad_norm for report in reports) / num,
        "update/learning_rate": reports[-1].learning_rate,
    }
    for name in reports[0].statistics:
        values = [report.statistics[name] for report in reports]
        is_maximum = name.endswith("_max")
        metrics[f"policy/{name}"] = max(values) if is_maximum else sum(values) / num
    return metrics


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
    scored = [each for group in groups for each in group.trajectories]
    if not scored:
        return ["every rollout is void: engine, tools or judge fail; the ledger beside the step's rollouts says how."]
    has_advantage = any(bool(of_tokens.any()) for of_group in advantages for of_tokens in of_group)
    if all(group.is_tied for group in groups) and not has_advantage:
        rewards = {each.reward for each in scored}
        same = f"all {len(scored)} rewards are {rewards.pop():g}" if len(rewards) == 1 else "within each, all rewards are equal"
        return [f"every group is tied: {same}."]
    if not any(selection.kept for selection in selections):
        reasons = Counter(decision.reason for selection in selections for decision in selection.decisions)
        return [f"the method kept none of {len(scored)} rollouts, most often because: {reasons.most_common(1)[0][0]}."]
    calls = [call for each in scored for call in each.trajectory.calls]
    problems = []
    if calls and all(call.outcome.is_error for call in calls):
        problems.append(f"every one of {len(calls)} tool calls failed; the last said {calls[-1].text[:120]!r}.")
    problems += [f"update {report.update} was skipped: {report.skip_reason}" for report in reports if report.is_skipped]
    if reports and all(report.grad_norm == 0 for report in reports):
        problems.append("the gradient is zero.")
    return problems


class _Clock:
    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed

    @property
    def total(self) -> float:
        return self._last - self._start
