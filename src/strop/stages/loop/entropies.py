"""Entropies of what a step trains on, for `strop analyze`, and the live curves of forking and reflection tokens.

rStar2-Agent (arXiv 2508.20722), section 5.4. The embedded engine reports the entropy of every token that it samples. For
servers, which report none, the trainer scores the tokens before the first update of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.algorithms.method import Column, Selection
from strop.analysis.marks import Part, has_entropies, mark, with_entropies
from strop.analysis.statistics import count
from strop.reports.rollouts import token_texts
from strop.rollout.chat_template import ChatFormat
from strop.training.batch import TokenBatch, in_canonical_order
from strop.types import RolloutKey, Trajectory

_NUM_MARKED = 64  # rollouts of a step that the curves are computed from: of 8192 tokens each, they take 4 s

Entropies = Mapping[RolloutKey, Sequence[float]]


def are_missing(selections: Sequence[Selection]) -> bool:
    """Whether the engine reported no entropies of a rollout that is trained on."""
    return not all(has_entropies(scored.trajectory) for selection in selections for scored in selection.kept)


def scored_entropies(parts: Sequence[Sequence[Selection]], batches: Sequence[TokenBatch]) -> Entropies:
    """The trainer's entropies, in nats, of the trained tokens of each rollout; empty where it scored none.

    Args:
        parts, batches: of each update.
    """
    found: dict[RolloutKey, Sequence[float]] = {}
    for part, batch in zip(parts, batches, strict=True):
        if Column.OLD_ENTROPIES in batch.columns:
            rows = zip(in_canonical_order(part), batch.loss_mask, batch.columns[Column.OLD_ENTROPIES], strict=True)
            found |= {scored.trajectory.key: [round(each, 4) for each in row[mask].tolist()] for scored, mask, row in rows}
    return found


def entropy_curves(selections: Sequence[Selection], entropies: Entropies, chat: ChatFormat) -> dict[str, float]:
    """Return the metrics `tokens/*` of the first rollouts of a step that are trained on; none without entropies."""
    trajectories: list[Trajectory] = []
    for selection in selections:
        for scored in selection.kept:
            whole = with_entropies(scored.trajectory, entropies.get(scored.trajectory.key, ()))
            trajectories += [] if whole is None else [whole]
    texts_of = chat.tokenizer.backend_tokenizer
    figures = count(
        mark(each, [token_texts(texts_of, turn.completion.ids) for turn in each.turns]) for each in trajectories[:_NUM_MARKED]
    )
    reasoning = figures.part(Part.REASONING)
    curves = {
        "tokens/forking_entropy_nats": reasoning.high_entropy,
        "tokens/forking_fraction": reasoning.high_share,
        "tokens/reflection_fraction": reasoning.reflection_share,
        "tokens/reflection_entropy_nats": reasoning.reflection_entropy,
    }
    return {name: value for name, value in curves.items() if value is not None}
