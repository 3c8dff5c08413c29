"""What a critic adds to a step: the advantages that follow from its values, its own updates, its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.gae import explained_variance
from strop.algorithms.protocol import Column, CriticMethod, RewardedRows, Selection
from strop.pipelines.skipped import keep_skipped
from strop.pipelines.stage import StageContext
from strop.pipelines.step_figures import update_metrics, update_rows
from strop.training.batch import TokenBatch, in_canonical_order
from strop.training.protocol import Trainer, UpdateReport


def judge(
    critic: CriticMethod,
    selections: Sequence[Selection],
    parts: Sequence[Sequence[Selection]],
    batches: Sequence[TokenBatch],
) -> tuple[list[TokenBatch], list[list[Tensor]]]:
    """The scored batches of a step with advantages and returns, and these advantages as `Method.advantages` has them.

    Args:
        selections: all of the step.
        parts: what went into each batch.
        batches: with every column that the method needs.
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
    estimates = critic.token_advantages(updates)
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


async def update_critic_or_keep(
    context: StageContext, trainer: Trainer, batch: TokenBatch, critic: CriticMethod, *, step: int
) -> UpdateReport:
    """`trainer.update_critic`; the batch of one that is skipped is kept, as the policy's is."""
    return await keep_skipped(
        context, batch, trainer.update_critic(batch, critic.value_loss, critic.value_statistics), step=step
    )


def critic_metrics(batches: Sequence[TokenBatch], reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Means over the critic's updates, and how much of the step's returns it foresaw before them; {} without a critic."""
    if not reports:
        return {}
    metrics = _named(update_metrics(reports))
    values, returns = (
        torch.cat([batch.columns[column][batch.loss_mask] for batch in batches]) for column in (Column.VALUES, Column.RETURNS)
    )
    explained = explained_variance(values, returns)
    return metrics if math.isnan(explained) else metrics | {"critic/explained_variance": explained}


def critic_rows(reports: Sequence[UpdateReport]) -> list[dict[str, Any]]:
    """Each update of the critic by itself, as `update_rows` has those of the policy."""
    return [_named(row) for row in update_rows(reports, role="critic")]


def _named(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of updates under the critic's name: `update/loss` and `policy/value` become `critic/loss`, `critic/value`."""
    return {f"critic/{key.partition('/')[2]}" if "/" in key else key: value for key, value in figures.items()}
