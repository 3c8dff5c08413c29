"""The updates of a step, their metrics, and in words for the user why a step could not learn. Skipped batches are kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from strop.algorithms.method import Column, Method, RewardedRows, Selection, checked_advantages
from strop.algorithms.ppo import explained_variance
from strop.errors import CannotLearnError
from strop.run_directory import writing_to
from strop.stages.context import StageContext
from strop.training.batch import TokenBatch, in_canonical_order
from strop.training.optimizer import UpdateReport
from strop.types import Group, RolloutKey, ScoredTrajectory

_MAX_KEPT = 8  # skipped batches of a stage

_RARE = 10  # rollouts for one call


@dataclass(slots=True, kw_only=True)
class StepUpdates:
    """The reports of a step's updates, in order."""

    policy: list[UpdateReport] = field(default_factory=list)
    critic: list[UpdateReport] = field(default_factory=list)
    gave_up: CannotLearnError | None = None  # why the updates ended early, after some were made

    def give_up(self, error: CannotLearnError) -> None:
        """Too many updates in a row were skipped. Raises `error` if none was made before."""
        if all(report.is_skipped for report in [*self.policy, *self.critic]):
            raise error
        self.gave_up = error

    def leave_out(self, num: int, why: str, *, update: int) -> None:
        """Report `num` updates of the policy as skipped, of a step without anything to learn from."""
        nothing = UpdateReport(update=update, loss=nan, grad_norm=nan, learning_rate=nan, statistics={}, skip_reason=why)
        self.policy = [nothing] * num

    def rows(self) -> list[dict[str, Any]]:
        """A row of updates.jsonl for each update."""
        return [*_rows(self.policy, "policy"), *map(_named_critic, _rows(self.critic, "critic"))]


async def keep_skipped(
    context: StageContext, batch: TokenBatch, update: Coroutine[Any, Any, UpdateReport], *, step: int
) -> UpdateReport:
    """The report of `update`. If it is skipped, its batch is written to skipped/step-K-N.pt.

    Raises:
        CannotLearnError: too many in a row were skipped; it names stage and step.
    """
    try:
        report = await update
    except CannotLearnError as error:
        await _keep(context, batch, step, "too many updates in a row were skipped")
        raise CannotLearnError(
            f"stages.{context.name}, step {step}: {error} The state is saved. The same command continues from it; --from"
            " reruns the stage with other settings."
        ) from error
    if report.is_skipped:
        await _keep(context, batch, step, f"an update was skipped: {report.skip_reason}")
    return report


async def _keep(context: StageContext, batch: TokenBatch, step: int, why: str) -> None:
    directory = context.directory.skipped
    num_kept = len(list(directory.glob("step-*.pt"))) if directory.is_dir() else 0
    if not batch.num_loss_tokens or num_kept >= _MAX_KEPT:
        context.warn(f"step {step}: {why}")
        return
    path = directory / f"step-{step:06d}-{num_kept + 1}.pt"
    await asyncio.to_thread(_write, path, batch)
    context.warn(f"step {step}: {why}. Its batch is in {path}")


def _write(path: Path, batch: TokenBatch) -> None:
    columns = {column.value: of_column for column, of_column in batch.columns.items()}
    values = {each.name: getattr(batch, each.name) for each in fields(batch)} | {"columns": columns}
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            torch.save(values, file)


def _means(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Means over the updates that were made. An empty step has no means, so that a curve shows a gap and not a zero."""
    made = [report for report in reports if not report.is_skipped]
    metrics = {"update/skipped": float(len(reports) - len(made))}
    if not made:
        return metrics
    metrics |= {
        "update/loss": sum(report.loss for report in made) / len(made),
        "update/grad_norm": sum(report.grad_norm for report in made) / len(made),
        "update/learning_rate": made[-1].learning_rate,
    }
    for name in made[0].statistics:
        values = [report.statistics[name] for report in made]
        metrics[f"policy/{name}"] = max(values) if name.endswith("_max") else sum(values) / len(made)
    return metrics


def update_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """`_means`, and what the updates cost where any was made."""
    metrics = _means(reports)
    if costs := [report.cost for report in reports if report.cost is not None]:
        time_s, tokens = sum(cost.time_s for cost in costs), sum(cost.tokens for cost in costs)
        flops_per_s = sum(cost.flops for cost in costs) / time_s
        metrics |= {
            "update/tokens_per_s": tokens / time_s,
            "update/flops_per_s": flops_per_s,
            "update/distinct_token_share": tokens / sum(cost.row_tokens for cost in costs),
            "machine/flop_utilisation": flops_per_s / costs[-1].peak_flops_per_s,
            "machine/peak_memory_mib": max(cost.peak_memory_mib for cost in costs),
        }
    return metrics


def _rows(reports: Sequence[UpdateReport], role: str) -> list[dict[str, Any]]:
    return [
        {"role": role, "place": place, "update": report.update, **update_metrics([report])}
        | ({"why_skipped": report.skip_reason} if report.is_skipped else {})
        for place, report in enumerate(reports, start=1)
    ]


def gap_metrics(batches: Sequence[TokenBatch], reports: Sequence[UpdateReport]) -> dict[str, float]:
    """|log-prob of the sampler - log-prob of the trainer's full forward pass| of the same weights, in nats.

    It has no meaning where rollouts are of older weights.
    """
    gaps = [
        (batch.columns[Column.OLD_LOGPROBS] - batch.sampled_logprobs)[batch.loss_mask].abs()
        for batch in batches
        if Column.OLD_LOGPROBS in batch.columns
    ]
    if not gaps:  # the first update is on policy: its own log-probs are of the weights that sampled
        first = next((report.statistics for report in reports if not report.is_skipped), {})
        names = {"sampler_gap_nats": "policy/logprob_gap_mean", "sampler_gap_nats_max": "policy/logprob_gap_max"}
        return {metric: first[name] for name, metric in names.items() if name in first}
    gap = torch.cat(gaps)
    return {"policy/logprob_gap_mean": gap.mean().item(), "policy/logprob_gap_max": gap.max().item()}


def scored_advantages(
    method: Method,
    selections: Sequence[Selection],
    parts: Sequence[Sequence[Selection]],
    batches: list[TokenBatch],
    advantages: list[list[Tensor]],
) -> tuple[list[TokenBatch], list[list[Tensor]]]:
    """The batches of a step, and the advantages of each selection, when all columns are scored.

    They are those from a critic's values, or from rewards less the method's penalties; without either they stay.

    Args:
        selections: all of the step.
        parts: the selections that each batch was made from.
        batches: with every column that the method needs.
        advantages: from the rewards alone.
    """
    rows_of = [in_canonical_order(part) for part in parts]
    updates = [
        RewardedRows(
            rewards=torch.tensor([scored.reward for scored in rows], dtype=torch.float32),
            loss_mask=batch.loss_mask,
            columns=batch.columns,
        )
        for rows, batch in zip(rows_of, batches, strict=True)
    ]
    if method.critic is None:
        penalties = {
            scored.trajectory.key: penalty
            for rows, update in zip(rows_of, updates, strict=True)
            if (of_rows := method.penalties(update)) is not None
            for scored, penalty in zip(rows, of_rows.tolist(), strict=True)
        }
        if not penalties:
            return batches, advantages
        advantages = _penalized(method, selections, penalties)
        of_key = {
            scored.trajectory.key: of_tokens
            for selection, of_group in zip(selections, advantages, strict=True)
            for scored, of_tokens in zip(selection.kept, of_group, strict=True)
        }
        padded = [pad_sequence([of_key[scored.trajectory.key] for scored in rows], batch_first=True) for rows in rows_of]
        changed = zip(batches, padded, strict=True)
        return [replace(batch, advantages=torch.where(batch.loss_mask, of_rows, 0.0)) for batch, of_rows in changed], advantages
    estimates = method.critic.token_advantages(updates)
    judged = [
        replace(batch, advantages=estimate.advantages, columns={**batch.columns, Column.RETURNS: estimate.returns})
        for batch, estimate in zip(batches, estimates, strict=True)
    ]
    of_trajectory = {
        scored.trajectory.key: of_row[: len(scored.trajectory.ids)]
        for rows, batch in zip(rows_of, judged, strict=True)
        for scored, of_row in zip(rows, batch.advantages, strict=True)
    }
    return judged, [[of_trajectory[scored.trajectory.key] for scored in selection.kept] for selection in selections]


def _penalized(method: Method, selections: Sequence[Selection], penalties: Mapping[RolloutKey, float]) -> list[list[Tensor]]:
    """The advantages of each selection from what `penalties` leave of the rewards."""

    def penalized(one: ScoredTrajectory) -> ScoredTrajectory:
        return replace(one, reward=one.reward - penalties.get(one.trajectory.key, 0.0))

    groups = [replace(each.group, trajectories=tuple(map(penalized, each.group.trajectories))) for each in selections]
    return checked_advantages(method, [replace(each, group=group) for each, group in zip(selections, groups, strict=True)])


def critic_metrics(batches: Sequence[TokenBatch], reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Means over the critic's updates, and the share of the returns' variance that its values explained before them."""
    values, returns = (
        torch.cat([batch.columns[column][batch.loss_mask] for batch in batches]) for column in (Column.VALUES, Column.RETURNS)
    )
    explained = explained_variance(values, returns)
    return _named_critic(_means(reports)) | ({} if isnan(explained) else {"critic/explained_variance": explained})


def _named_critic(figures: Mapping[str, Any]) -> dict[str, Any]:
    """`update/loss` and `policy/value` become `critic/loss` and `critic/value`."""
    return {f"critic/{key.partition('/')[2]}" if "/" in key else key: value for key, value in figures.items()}


def why_tied(groups: Sequence[Group], advantages: Sequence[Sequence[Tensor]], *, has_critic: bool) -> str:
    """A sentence where all rewards that are compared are equal; else empty.

    A critic compares all rewards of the step. Advantages that it finds where all of them are equal are noise.
    """
    rewards = [each.reward for group in groups for each in group.trajectories]
    has_any = any(bool(of_tokens.any()) for of_group in advantages for of_tokens in of_group)
    if len(set(rewards)) == 1:
        is_tied, same = has_critic or not has_any, f"all {len(rewards)} rewards are {rewards[0]:g}"
    else:
        is_tied = not has_critic and not has_any and all(group.is_tied for group in groups)
        same = "within each, all rewards are equal"
    return f"every group is tied: {same}.{_how_many_cut_off(groups)}" if rewards and is_tied else ""


def why_nothing_learned(selections: Sequence[Selection], updates: StepUpdates, tie: str, none_kept: str) -> list[str]:
    """Why nothing was learned in this step, or what will soon prevent it; empty where all is well.

    Args:
        tie: as `why_tied` says.
        none_kept: the sentence where rollouts were scored and none was selected, without its full stop.
    """
    groups = [selection.group for selection in selections]
    if not any(group.trajectories for group in groups):
        return ["every rollout is void: engine, tools or judges fail. The ledger next to the step's rollouts has each reason."]
    if tie:
        return [tie, *_why_calls_fail(groups)]
    if not any(selection.kept for selection in selections):
        return [f"{none_kept}.{_how_many_cut_off(groups)}", *_why_calls_fail(groups)]
    problems = _why_calls_fail(groups)
    problems += [f"update {each.update} was skipped: {each.skip_reason}" for each in updates.policy if each.is_skipped]
    if updates.policy and all(report.grad_norm == 0 for report in updates.policy):
        problems.append("the gradient is zero.")
    skipped = [each for each in updates.critic if each.is_skipped]
    return problems + [f"update {each.update} of the critic was skipped: {each.skip_reason}" for each in skipped]


def why_none_kept(selections: Sequence[Selection]) -> str:
    """A sentence with the method's most frequent reason for dropping a rollout."""
    reasons = Counter(decision.reason for selection in selections for decision in selection.decisions)
    if not reasons:
        return "the method kept no rollout"
    return f"the method kept none of {reasons.total()} rollouts, most often because: {reasons.most_common(1)[0][0]}"


def is_solved(metrics: Mapping[str, float], tie: str) -> bool:
    """Whether there is no gradient because most rollouts are right, which is no reason to give up."""
    return metrics.get("rollout/accuracy", 0.0) > 0.5 and (bool(tie) or metrics.get("update/grad_norm", 0.0) == 0)


def _why_calls_fail(groups: Sequence[Group]) -> list[str]:
    """A sentence where every tool call of the step failed, with what the policy was shown last; a rare call is no sign."""
    of_each = [each.trajectory.calls for group in groups for each in group.trajectories]
    calls = [call for calls in of_each for call in calls if call.outcome.is_counted]
    if len(calls) * _RARE <= len(of_each) or not all(call.outcome.is_error for call in calls):
        return []
    return [f"every one of {len(calls)} tool calls failed; the last said {calls[-1].text[:120] or calls[-1].outcome.value!r}."]


def _how_many_cut_off(groups: Sequence[Group]) -> str:
    """A sentence, with a space before it, where rollouts reached their token limit; else empty."""
    scored = [each.trajectory for group in groups for each in group.trajectories]
    num = sum(each.is_truncated for each in scored)
    return f" {num} of {len(scored)} rollouts {'was' if num == 1 else 'were'} cut off at sampling.max_tokens." if num else ""
