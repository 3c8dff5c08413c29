"""The JSON document of an analysis, described in docs/analysis.md, and its tables and findings in words."""

from __future__ import annotations

from typing import Any

from strop.analysis.marks import TOP_SHARE, Part, Position
from strop.analysis.read import Analysis
from strop.analysis.statistics import LAST_OFFSET, Figures, Offsets, Tally, most_frequent
from strop.reports.scales import Table, Unit, figure

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


PARTS = {Part.REASONING: "reasoning", Part.TOOL_CALL: "tool calls", Part.ANSWER: "answers"}
POSITIONS = {
    Position.START: "at the start",
    Position.SUCCESS: "after a success",
    Position.ERROR: "after an error",
    Position.OTHER: "after another observation",
}
NONE = "–"


def shown(value: float | None, unit: Unit = Unit.PLAIN) -> str:
    """A figure, or a dash where there was nothing to take it of."""
    return NONE if value is None else figure(value, unit)


def size(analysis: Analysis) -> str:
    """What was read."""
    total, steps = analysis.total, list(analysis.steps)
    span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    left_out = (
        f"; {analysis.num_without_entropies:,} rollouts without entropies left out" if analysis.num_without_entropies else ""
    )
    return f"{span}: {total.num_rollouts:,} rollouts, {total.all_tokens.num_tokens:,} sampled tokens{left_out}"


def findings(figures: Figures) -> list[str]:
    """What the papers ask of these figures, each in a sentence; only what there is something to say of."""
    found = []
    start, behind = figures.window(Position.START).entropy, figures.window(*OBSERVED).entropy
    if start is not None and behind is not None:
        found.append(
            f"The first {LAST_OFFSET + 1} tokens after an observation have {figure(behind)} nats on average, those of a rollout"
            f" {figure(start)}: {_compared(behind, start)} after an observation."
        )
    call, reasoning = figures.part(Part.TOOL_CALL).entropy, figures.part(Part.REASONING).entropy
    if call is not None and reasoning is not None:
        found.append(
            f"Tokens of tool calls have {figure(call)} nats, tokens of reasoning {figure(reasoning)}:"
            f" {_compared(call, reasoning)} in calls."
        )
    shares = {
        name: share for position, name in POSITIONS.items() if (share := figures.reasoning(position).high_share) is not None
    }
    if len(shares) > 1:
        listed = ", ".join(f"{figure(share, Unit.PERCENT)} {name}" for name, share in shares.items())
        found.append(f"Of reasoning tokens, forking ones are {listed}.")
    return found


def _compared(value: float, other: float) -> str:
    return "more" if value > other else "less" if value < other else "the same"


def parts_table(figures: Figures) -> Table:
    """Entropy of tool calls against reasoning and answers."""
    num_high = figures.all_tokens.num_high
    rows = []
    for part, name in PARTS.items():
        tally = figures.part(part)
        of_marked = tally.num_high / num_high if num_high else None
        rows.append(
            (
                name,
                f"{tally.num_tokens:,}",
                shown(tally.entropy),
                f"{tally.num_high:,}",
                shown(tally.high_share, Unit.PERCENT),
                shown(of_marked, Unit.PERCENT),
            )
        )
    columns = ("part", "tokens", "entropy, nats", "in the top 20%", "of the part", "of the top 20%")
    return Table(columns=columns, rows=tuple(rows))


def positions_table(figures: Figures) -> Table:
    """Forking and reflection tokens by what came before their completion; positions that no completion has are left out."""
    rows = []
    for position, name in POSITIONS.items():
        if not figures.turns.get(position):
            continue
        tally = figures.reasoning(position)
        rows.append(
            (
                name,
                f"{figures.turns[position]:,}",
                shown(figures.window(position).entropy),
                f"{tally.num_tokens:,}",
                f"{tally.num_high:,} · {shown(tally.high_share, Unit.PERCENT)}",
                f"{tally.num_reflection:,} · {shown(tally.reflection_share, Unit.PERCENT)}",
                f"{tally.num_high_reflection:,}",
            )
        )
    columns = ("position", "turns", f"nats 0–{LAST_OFFSET}", "reasoning", "forking", "reflection", "both")
    return Table(columns=columns, rows=tuple(rows))
