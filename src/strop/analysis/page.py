"""The files of an analysis: a JSON document, described in docs/analysis.md, and a page with its tables, findings and plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from strop.analysis.read import Analysis
from strop.analysis.statistics import LAST_OFFSET, TOP_SHARE, Figures, Part, Position
from strop.reports.html import render
from strop.reports.number_format import Table, Unit, figure
from strop.reports.plots import Drawing, Plot, Series
from strop.run_directory import RunDirectory, write_json, write_text

FORMAT_VERSION = 1
OBSERVED = (Position.SUCCESS, Position.ERROR, Position.OTHER)
_NUM_LISTED = 50


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
        "offsets": {str(position): _offsets(total, position) for position in Position}
        | {"after_any": _offsets(total, *OBSERVED)},
        "forking_texts": [
            {"text": text, "num_tokens": tally.num_tokens, "entropy_nats": tally.entropy_nats}
            for text, tally in total.forking(_NUM_LISTED)
        ],
        "reflection_words": {str(position): _words(total, position) for position in total.turns},
        "steps": [{"step": step, **_figures(figures)} for step, figures in analysis.steps.items()],
    }


def _figures(figures: Figures) -> dict[str, Any]:
    total = figures.all_tokens
    positions = {
        str(position): {
            "num_completions": figures.turns[position],
            "first_entropy_nats": figures.first(position).entropy_nats,
            **asdict(figures.reasoning(position)),
        }
        for position in Position
    }
    return {
        "num_rollouts": figures.num_rollouts,
        "num_tokens": total.num_tokens,
        "entropy_nats": total.entropy_nats,
        "high_entropy_nats": total.high_entropy_nats,
        "parts": {str(part): asdict(figures.part(part)) for part in Part},
        "positions": positions,
    }


def _offsets(figures: Figures, *positions: Position) -> dict[str, Any]:
    window = figures.window(*positions)
    return {"entropy_nats": [each.entropy_nats for each in window], "num_tokens": [each.num_tokens for each in window]}


def _words(figures: Figures, position: Position) -> dict[str, int]:
    return {word: num for (at, word), num in figures.words.most_common() if at is position}


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
    compared = (
        (
            f"The first {LAST_OFFSET + 1} tokens after an observation have {{}} nats on average, those of a rollout {{}}: {{}}"
            " after an observation.",
            figures.first(*OBSERVED).entropy_nats,
            figures.first(Position.START).entropy_nats,
        ),
        (
            "Tokens of tool calls have {} nats, tokens of reasoning {}: {} in calls.",
            figures.part(Part.TOOL_CALL).entropy_nats,
            figures.part(Part.REASONING).entropy_nats,
        ),
    )
    found = []
    for sentence, one, other in compared:
        if one is not None and other is not None:
            sign = "more" if one > other else "less" if one < other else "the same"
            found.append(sentence.format(figure(one), figure(other), sign))
    shares = {
        name: share for position, name in POSITIONS.items() if (share := figures.reasoning(position).high_share) is not None
    }
    if len(shares) > 1:
        listed = ", ".join(f"{figure(share, Unit.PERCENT)} {name}" for name, share in shares.items())
        found.append(f"Of reasoning tokens, forking ones are {listed}.")
    return found


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
                shown(tally.entropy_nats),
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
        if not figures.turns[position]:
            continue
        tally = figures.reasoning(position)
        rows.append(
            (
                name,
                f"{figures.turns[position]:,}",
                shown(figures.first(position).entropy_nats),
                f"{tally.num_tokens:,}",
                f"{tally.num_high:,} · {shown(tally.high_share, Unit.PERCENT)}",
                f"{tally.num_reflection:,} · {shown(tally.reflection_share, Unit.PERCENT)}",
                f"{tally.num_high_reflection:,}",
            )
        )
    columns = ("position", "turns", f"nats 0–{LAST_OFFSET}", "reasoning", "forking", "reflection", "both")
    return Table(columns=columns, rows=tuple(rows))


_MIN_REACH = 0.05  # of a position's completions: means of fewer are noise and are not drawn
_POSITIONS = {position: (name, 2 * number) for number, (position, name) in enumerate(POSITIONS.items())}  # name, colour
_PARTS = {part: (name, colour) for (part, name), colour in zip(PARTS.items(), (0, 3, 1), strict=True)}
_OF_REASONING = "Share of reasoning tokens "
_NUM_TEXTS, _NUM_WORDS = 24, 24


def analysis_page(analysis: Analysis) -> str:
    """One file that needs no other."""
    total = analysis.total
    return render(
        "analysis.html.j2",
        run=analysis.run,
        stage=analysis.stage,
        size=size(analysis),
        findings=findings(total),
        parts=parts_table(total),
        positions=positions_table(total),
        offsets=by_offset(total),
        steps=over_steps(analysis),
        texts=_texts_table(total),
        words=_words_table(total),
        top_share=f"{TOP_SHARE:.0%}",
    )


def _texts_table(figures: Figures) -> Table:
    rows = (
        (text.replace("\n", "⏎"), f"{tally.num_tokens:,}", shown(tally.entropy_nats))
        for text, tally in figures.forking(_NUM_TEXTS)
    )
    return Table(columns=("text", "forking tokens", "entropy, nats"), rows=tuple(rows))


def _words_table(figures: Figures) -> Table:
    positions = [position for position in POSITIONS if figures.turns[position]]
    words = {word for _, word in figures.words}
    counts = {word: [figures.words[position, word] for position in positions] for word in words}
    ranked = sorted(counts.items(), key=lambda item: (-sum(item[1]), item[0]))[:_NUM_WORDS]
    return Table(
        columns=("word", *(POSITIONS[position] for position in positions)),
        rows=tuple((word, *(f"{number:,}" for number in numbers)) for word, numbers in ranked),
    )


def by_offset(figures: Figures) -> list[Drawing]:
    """Return the plot of the tokens after each observation and of the first tokens: ARPO (arXiv 2507.19849), section 1.2."""
    entropy = []
    for position in filter(figures.turns.get, Position):
        label, colour = _POSITIONS[position]
        least = _MIN_REACH * figures.turns[position]
        points = tuple(
            (float(offset), each.entropy_nats)
            for offset, each in enumerate(figures.window(position))
            if each.entropy_nats is not None and each.num_tokens >= least
        )
        entropy.append(Series(label=label, points=points, colour=colour))
    plot = Plot(title="Entropy by offset", series=tuple(entropy), x_label="offset", y_low=0.0)
    return [Drawing(plot=plot, note="Nats; mean of the completions that reach it, drawn while 5% do.")]


def over_steps(analysis: Analysis) -> list[Drawing]:
    """Return how each metric changes over the steps; nothing for a single step."""
    if len(analysis.steps) < 2:
        return []
    draw = partial(_drawing, analysis.steps)
    return [
        draw("Entropy by part", "Mean nats of a sampled token.", _PARTS, lambda each, part: each.part(part).entropy_nats),
        draw(
            "First tokens of completions",
            "Mean nats at offsets 0 to 50.",
            _POSITIONS,
            lambda each, at: each.first(at).entropy_nats,
        ),
        draw(
            "Forking tokens",
            _OF_REASONING + "that are in their rollout's top 20%.",
            _POSITIONS,
            lambda each, at: each.reasoning(at).high_share,
            Unit.PERCENT,
        ),
        draw(
            "Reflection tokens",
            _OF_REASONING + "in reflection words.",
            _POSITIONS,
            lambda each, at: each.reasoning(at).reflection_share,
            Unit.PERCENT,
        ),
    ]


def _drawing(
    steps: Mapping[int, Figures],
    title: str,
    note: str,
    names: Mapping[Any, tuple[str, int]],
    value: Callable[[Figures, Any], float | None],
    unit: Unit = Unit.PLAIN,
) -> Drawing:
    """Return the plot of a metric over the steps, with one series for each of `names`; steps without a value are left out."""
    series = [
        Series(
            label=label,
            points=tuple((float(step), found) for step, each in steps.items() if (found := value(each, key)) is not None),
            colour=colour,
        )
        for key, (label, colour) in names.items()
    ]
    plot = Plot(title=title, series=tuple(each for each in series if each.points), unit=unit, y_low=0.0)
    return Drawing(plot=plot, note=note)


def write_analysis(run: RunDirectory, analysis: Analysis) -> tuple[Path, Path]:
    """Page and JSON, in `analysis/` of the run, named by the stage; each replaces what was there, whole or not at all.

    Raises:
        RunError: they cannot be written.
    """
    page, document = (run.path / "analysis" / f"{analysis.stage}.{ending}" for ending in ("html", "json"))
    write_text(page, analysis_page(analysis))
    write_json(document, as_json(analysis))
    return page, document
