"""An analysis -> what its page draws: entropy by offset, and how parts and positions went over the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strop.analysis.parts import Part
from strop.analysis.read import Analysis
from strop.analysis.rollout import Position
from strop.analysis.statistics import Figures
from strop.analysis.words import PARTS, POSITIONS
from strop.reports.panels import Drawing
from strop.reports.plots import Plot, Series
from strop.reports.scales import Unit

_MIN_REACH = 0.05  # of a position's completions: a mean of the few longest ones jumps about, and is not drawn
_COLOURS = {Position.START: 0, Position.SUCCESS: 2, Position.ERROR: 4, Position.OTHER: 6}
_PART_COLOURS = {Part.REASONING: 0, Part.TOOL_CALL: 3, Part.ANSWER: 1}


def by_offset(figures: Figures) -> list[Drawing]:
    """ARPO (arXiv 2507.19849), section 1.2: the tokens after each observation against the first ones of the rollout."""
    windows = {position: figures.window(position) for position in Position if figures.turns.get(position)}
    entropy = tuple(
        Series(
            label=POSITIONS[position],
            points=tuple(
                (float(at), value)
                for at, (value, number) in enumerate(zip(window.entropies, window.num_tokens, strict=True))
                if value is not None and number >= _MIN_REACH * figures.turns[position]
            ),
            colour=_COLOURS[position],
        )
        for position, window in windows.items()
    )
    reach = tuple(
        Series(
            label=POSITIONS[position],
            points=tuple((float(at), float(number)) for at, number in enumerate(window.num_tokens) if number),
            colour=_COLOURS[position],
        )
        for position, window in windows.items()
    )
    return [
        Drawing(
            plot=Plot(title="Entropy by offset", series=entropy, x_label="offset", y_low=0.0),
            note="Nats; mean of the completions that reach it, drawn while 5% do.",
        ),
        Drawing(
            plot=Plot(title="Completions that reach the offset", series=reach, x_label="offset", y_low=0.0),
            note="Who ends earlier is in no mean beyond.",
        ),
    ]


def over_steps(analysis: Analysis) -> list[Drawing]:
    """How each figure went; of one step there is nothing to draw."""
    if len(analysis.steps) < 2:
        return []
    return [
        _parts(analysis, "Entropy by part", lambda figures, part: figures.part(part).entropy, "Mean nats of a sampled token."),
        _positions(
            analysis,
            "First tokens of completions",
            lambda figures, position: figures.window(position).entropy,
            "Mean nats at offsets 0 to 50.",
        ),
        _positions(
            analysis,
            "Forking tokens",
            lambda figures, position: figures.reasoning(position).high_share,
            "Share of reasoning tokens that are in their rollout's top 20%.",
            Unit.PERCENT,
        ),
        _positions(
            analysis,
            "Reflection tokens",
            lambda figures, position: figures.reasoning(position).reflection_share,
            "Share of reasoning tokens in words of second thoughts.",
            Unit.PERCENT,
        ),
        Drawing(
            plot=Plot(
                title="Entropy of the top 20%",
                series=(_series(analysis, "top 20%", [each.all_tokens.high_entropy for each in analysis.steps.values()], 0),),
                y_low=0.0,
            ),
            note="Mean nats of marked tokens: near zero, marks mean little.",
        ),
        _positions(
            analysis,
            "Completions",
            lambda figures, position: float(figures.turns.get(position, 0)) or None,
            "How many stand at each position: shares of few are noise.",
        ),
    ]


def _parts(analysis: Analysis, title: str, value: Callable[[Figures, Part], float | None], note: str) -> Drawing:
    series = tuple(
        _series(analysis, name, [value(figures, part) for figures in analysis.steps.values()], _PART_COLOURS[part])
        for part, name in PARTS.items()
    )
    return Drawing(plot=Plot(title=title, series=series, y_low=0.0), note=note)


def _positions(
    analysis: Analysis, title: str, value: Callable[[Figures, Position], float | None], note: str, unit: Unit = Unit.PLAIN
) -> Drawing:
    series = tuple(
        _series(analysis, name, [value(figures, position) for figures in analysis.steps.values()], _COLOURS[position])
        for position, name in POSITIONS.items()
    )
    seen = tuple(each for each in series if each.points)
    return Drawing(plot=Plot(title=title, series=seen, unit=unit, y_low=0.0), note=note)


def _series(analysis: Analysis, label: str, values: Sequence[float | None], colour: int) -> Series:
    """One value a step; a step without one is left out."""
    points = tuple((float(step), value) for step, value in zip(analysis.steps, values, strict=True) if value is not None)
    return Series(label=label, points=points, colour=colour)
