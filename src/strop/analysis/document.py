"""An analysis -> the JSON that other programs read. docs/analysis.md describes each field."""

from __future__ import annotations

from typing import Any

from strop.analysis.marks import TOP_SHARE
from strop.analysis.parts import Part
from strop.analysis.read import Analysis
from strop.analysis.rollout import Position
from strop.analysis.statistics import LAST_OFFSET, Figures, Offsets, Tally, most_frequent

FORMAT_VERSION = 1
OBSERVED = (Position.SUCCESS, Position.ERROR, Position.OTHER)
_NUM_TEXTS = 50


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Everything that was counted. A mean of nothing is null."""
    total = analysis.total
    return {
        "format": FORMAT_VERSION,
        "run": analysis.run,
        "stage": analysis.stage,
        "top_share": TOP_SHARE,
        "last_offset": LAST_OFFSET,
        "num_rollouts_without_entropies": analysis.num_without_entropies,
        **_figures(total),
        "offsets": {str(position): _offsets(total.window(position)) for position in Position}
        | {"after_any": _offsets(total.window(*OBSERVED))},
        "forking_texts": [
            {"text": text, "num_tokens": tally.num_tokens, "entropy_nats": tally.entropy}
            for text, tally in most_frequent(total.forking, _NUM_TEXTS)
        ],
        "reflection_words": {str(position): dict(words.most_common()) for position, words in total.words.items()},
        "steps": [{"step": step, **_figures(figures)} for step, figures in analysis.steps.items()],
    }


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        "num_rollouts": figures.num_rollouts,
        "num_tokens": figures.all_tokens.num_tokens,
        "entropy_nats": figures.all_tokens.entropy,
        "high_entropy_nats": figures.all_tokens.high_entropy,
        "parts": {str(part): _part(figures.part(part)) for part in Part},
        "positions": {str(position): _position(figures, position) for position in Position},
    }


def _part(tally: Tally) -> dict[str, Any]:
    return {
        "num_tokens": tally.num_tokens,
        "entropy_nats": tally.entropy,
        "num_high": tally.num_high,
        "high_share": tally.high_share,
    }


def _position(figures: Figures, position: Position) -> dict[str, Any]:
    tally = figures.reasoning(position)
    return {
        "num_completions": figures.turns.get(position, 0),
        "first_entropy_nats": figures.window(position).entropy,
        "num_reasoning_tokens": tally.num_tokens,
        "reasoning_entropy_nats": tally.entropy,
        "num_forking": tally.num_high,
        "forking_share": tally.high_share,
        "num_reflection": tally.num_reflection,
        "reflection_share": tally.reflection_share,
        "num_forking_reflection": tally.num_high_reflection,
    }


def _offsets(offsets: Offsets) -> dict[str, Any]:
    return {"entropy_nats": offsets.entropies, "num_tokens": list(offsets.num_tokens)}
