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
from strop.reports.number_format import Table, Unit, cell, figure
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


def size(analysis: Analysis) -> str:
    """What was read."""
    total, steps = analysis.total, list(analysis.steps)
    span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    num_left_out = analysis.num_without_entropies
    left_out = f"; {num_left_out:,} rollouts without entropies left out" if num_left_out else ""
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
    return Table.of(
        {
            "part": name,
            "tokens": f"{tally.num_tokens:,}",
            "entropy, nats": cell(tally.entropy_nats),
            "in the top 20%": f"{tally.num_high:,}",
            "of the part": cell(tally.high_share, Unit.PERCENT),
            "of the top 20%": cell(tally.num_high / num_high if num_high else None, Unit.PERCENT),
        }
        for name, tally in ((name, figures.part(part)) for part, name in PARTS.items())
    )


def positions_table(figures: Figures) -> Table:
    """Forking and reflection tokens by what came before their completion; positions that no completion has are left out."""
    found = {position: figures.reasoning(position) for position in POSITIONS if figures.turns[position]}
    return Table.of(
        {
            "position": POSITIONS[position],
            "turns": f"{figures.turns[position]:,}",
            f"nats 0–{LAST_OFFSET}": cell(figures.first(position).entropy_nats),
            "reasoning": f"{tally.num_tokens:,}",
            "forking": f"{tally.num_high:,} · {cell(tally.high_share, Unit.PERCENT)}",
            "reflection": f"{tally.num_reflection:,} · {cell(tally.reflection_share, Unit.PERCENT)}",
            "both": f"{tally.num_high_reflection:,}",
        }
        for position, tally in found.items()
    )


_MIN_REACH = 0.05  # of a position's completions: means of fewer are noise and are not drawn
_POSITIONS = {position: (name, 2 * number) for number, (position, name) in enumerate(POSITIONS.items())}  # name, colour
_PARTS = {part: (name, colour) for (part, name), colour in zip(PARTS.items(), (0, 3, 1), strict=True)}
_FIRST = "Mean nats at offsets 0 to 50."
_FORKING = "Share of reasoning tokens that are in their rollout's top 20%."
_REFLECTION = "Share of reasoning tokens in reflection words."
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
    found = [(text.replace("\n", "⏎"), tally) for text, tally in figures.forking(_NUM_TEXTS)]
    rows = tuple((text, f"{tally.num_tokens:,}", cell(tally.entropy_nats)) for text, tally in found)
    return Table(columns=("text", "forking tokens", "entropy, nats"), rows=rows)


def _words_table(figures: Figures) -> Table:
    positions = [position for position in POSITIONS if figures.turns[position]]
    words = {word for _, word in figures.words}
    counts = {word: [figures.words[position, word] for position in positions] for word in words}
    ranked = sorted(counts.items(), key=lambda item: (-sum(item[1]), item[0]))[:_NUM_WORDS]
    rows = tuple((word, *(f"{number:,}" for number in numbers)) for word, numbers in ranked)
    return Table(columns=("word", *map(POSITIONS.__getitem__, positions)), rows=rows)


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
        draw("First tokens of completions", _FIRST, _POSITIONS, lambda each, at: each.first(at).entropy_nats),
        draw("Forking tokens", _FORKING, _POSITIONS, lambda each, at: each.reasoning(at).high_share, Unit.PERCENT),
        draw("Reflection tokens", _REFLECTION, _POSITIONS, lambda each, at: each.reasoning(at).reflection_share, Unit.PERCENT),
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
    series = []
    for key, (label, colour) in names.items():
        points = tuple((float(step), found) for step, each in steps.items() if (found := value(each, key)) is not None)
        series += [Series(label=label, points=points, colour=colour)] if points else []
    plot = Plot(title=title, series=tuple(series), unit=unit, y_low=0.0)
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
