"""An analysis -> the page: tables, plots, and rollouts with their marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.analysis.marks import TOP_SHARE
from strop.analysis.parts import Part
from strop.analysis.plots import by_offset, over_steps
from strop.analysis.read import Analysis, Shown
from strop.analysis.rollout import MarkedTurn, Token
from strop.analysis.statistics import Figures, most_frequent
from strop.analysis.words import POSITIONS, Table, findings, parts_table, positions_table, shown, size
from strop.reports.html import render
from strop.types import ToolCall

_MAX_TOKENS = 1200  # of one completion; what is left out is counted
_MAX_CHARS = 1500  # of one observation
_NUM_TEXTS, _NUM_WORDS = 24, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """The tokens of one completion, or its two ends and how many lie between."""

    head: tuple[Token, ...]
    num_left_out: int
    tail: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One turn, as it is shown."""

    position: str
    num_tokens: int
    num_forking: int
    num_reflection: int
    strip: Strip
    calls: tuple[ToolCall, ...]
    observation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """One rollout, as it is shown."""

    step: int
    name: str
    reward: str
    stop_reason: str
    turns: tuple[TurnView, ...]

    @property
    def calls(self) -> list[ToolCall]:
        return [call for turn in self.turns for call in turn.calls]


def analysis_page(analysis: Analysis) -> str:
    """One file that needs no other."""
    total = analysis.total
    return render(
        "analysis.html.j2",
        {
            "run": analysis.run,
            "stage": analysis.stage,
            "size": size(analysis),
            "findings": findings(total),
            "parts": parts_table(total),
            "positions": positions_table(total),
            "offsets": by_offset(total),
            "steps": over_steps(analysis),
            "texts": _texts_table(total),
            "words": _words_table(total),
            "rollouts": [_rollout(each) for each in reversed(analysis.shown)],
            "token_class": token_class,
            "token_heat": token_heat,
            "top_share": f"{TOP_SHARE:.0%}",
        },
    )


def token_class(token: Token) -> str:
    """What the style sheet shows of a token."""
    names = {
        "tok": True,
        "high": token.is_high,
        "second": token.is_reflection,
        "in-call": token.part is Part.TOOL_CALL,
        "in-answer": token.part is Part.ANSWER,
        "forced": not token.is_sampled,
        "rest": token.text == "",
    }
    return " ".join(name for name, holds in names.items() if holds)


def token_heat(token: Token) -> str:
    """How strong the mark is: a token may be in the top 20 % of a rollout that is sure of everything."""
    return f"{min(1.0, token.entropy / 1.5):.2f}"


def _rollout(each: Shown) -> RolloutView:
    trajectory = each.scored.trajectory
    key = trajectory.key
    branch = f" · branch {key.branch}" if key.branch else ""
    return RolloutView(
        step=each.step,
        name=f"{trajectory.task_id} · attempt {key.attempt}{branch}",
        reward=shown(each.scored.reward),
        stop_reason=trajectory.stop_reason.value.replace("_", " "),
        turns=tuple(
            TurnView(
                position=POSITIONS[marked.position] + ("" if marked.is_own else ", shared with its parent"),
                num_tokens=len(marked.sampled),
                num_forking=sum(token.is_forking for token in marked.sampled),
                num_reflection=sum(token.is_reflection for token in marked.sampled),
                strip=_strip(marked),
                calls=turn.calls,
                observation=_clipped(turn.observation_text),
            )
            for turn, marked in zip(trajectory.turns, each.marked.turns, strict=True)
        ),
    )


def _strip(turn: MarkedTurn) -> Strip:
    tokens = turn.tokens
    if len(tokens) <= _MAX_TOKENS:
        return Strip(head=tokens, num_left_out=0, tail=())
    num_head = 2 * _MAX_TOKENS // 3
    num_tail = _MAX_TOKENS - num_head
    return Strip(head=tokens[:num_head], num_left_out=len(tokens) - _MAX_TOKENS, tail=tokens[-num_tail:])


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}\n… {len(text) - _MAX_CHARS:,} characters left out …"


def _texts_table(figures: Figures) -> Table:
    rows = (
        (text.replace("\n", "⏎"), f"{tally.num_tokens:,}", shown(tally.entropy))
        for text, tally in most_frequent(figures.forking, _NUM_TEXTS)
    )
    return Table(columns=("text", "forking tokens", "entropy, nats"), rows=tuple(rows))


def _words_table(figures: Figures) -> Table:
    positions = [position for position in POSITIONS if figures.turns.get(position)]
    counts = {word: [figures.words[position][word] for position in positions] for word in _all_words(figures)}
    ranked = sorted(counts.items(), key=lambda item: (-sum(item[1]), item[0]))[:_NUM_WORDS]
    return Table(
        columns=("word", *(POSITIONS[position] for position in positions)),
        rows=tuple((word, *(f"{number:,}" for number in numbers)) for word, numbers in ranked),
    )


def _all_words(figures: Figures) -> Sequence[str]:
    return sorted({word for words in figures.words.values() for word in words})
