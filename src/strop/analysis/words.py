"""What parts and positions are called, and what an analysis says in a sentence and in short tables."""

from __future__ import annotations

from dataclasses import dataclass

from strop.analysis.document import OBSERVED
from strop.analysis.parts import Part
from strop.analysis.read import Analysis
from strop.analysis.rollout import Position
from strop.analysis.statistics import LAST_OFFSET, Figures
from strop.reports.scales import Unit, figure

PARTS = {Part.REASONING: "reasoning", Part.TOOL_CALL: "tool calls", Part.ANSWER: "answers"}
POSITIONS = {
    Position.START: "at the start",
    Position.SUCCESS: "after a success",
    Position.ERROR: "after an error",
    Position.OTHER: "after another observation",
}
NONE = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Figures in rows; the first cell of a row names it."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


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
        told = ", ".join(f"{figure(share, Unit.PERCENT)} {name}" for name, share in shares.items())
        found.append(f"Of reasoning tokens, forking ones are {told}.")
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
