"""Marked rollouts -> figures: sums and counts, which add up over rollouts and steps; means are taken last.

Entropies are in nats. Only sampled tokens count, each once: those that a branch shares with its parent count with the parent.

The live curves of forking and reflection tokens (rStar2-Agent, arXiv 2508.20722, section 5.4) come from the same figures. The
embedded engine reports the entropy of every token that it samples. For servers, which report none, the trainer scores them
before the first update of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from strop.algorithms.method import Column, Selection
from strop.analysis.marks import MarkedTurn, Part, Position, has_entropies, mark, with_entropies
from strop.reports.rollouts import token_texts
from strop.rollout.chat_template import ChatFormat
from strop.training.batch import TokenBatch, in_canonical_order
from strop.types import RolloutKey, Trajectory

LAST_OFFSET = 50
"""ARPO (arXiv 2507.19849), section 1.2: entropy rises in the first 10 to 50 tokens after a tool's result."""


class Kind(NamedTuple):
    """What is counted of a token; for the first tokens of a completion also their offset, and for forking ones their text.

    The offset is the number of sampled tokens between the observation, or the prompt, and the token.
    """

    position: Position
    part: Part
    is_high: bool
    is_reflection: bool
    offset: int | None = None
    text: str = ""

    @property
    def is_forking(self) -> bool:
        return self.is_high and self.part is Part.REASONING


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Some tokens. A mean or share of nothing is None, which is not 0."""

    num_tokens: int
    entropy_nats: float | None
    num_high: int
    high_share: float | None
    high_entropy_nats: float | None  # mean of the marked tokens
    num_reflection: int
    reflection_share: float | None
    reflection_entropy_nats: float | None  # mean of tokens in reflection words
    num_high_reflection: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that is counted, of one step or of several."""

    num_rollouts: int = 0
    turns: Counter[Position] = field(default_factory=Counter)
    words: Counter[tuple[Position, str]] = field(default_factory=Counter)
    tokens: dict[Kind, tuple[int, float]] = field(default_factory=dict)  # how many, and the sum of their entropies

    def __add__(self, other: Self) -> Figures:
        both = Figures(self.num_rollouts + other.num_rollouts, self.turns + other.turns, self.words + other.words)
        for kind, (num, entropy) in [*self.tokens.items(), *other.tokens.items()]:
            both.add(kind, num, entropy)
        return both

    def add(self, kind: Kind, num: int, entropy: float) -> None:
        """Count `num` tokens more, with this sum of entropies."""
        num_before, entropy_before = self.tokens.get(kind, (0, 0.0))
        self.tokens[kind] = num_before + num, entropy_before + entropy

    def part(self, part: Part) -> Tally:
        """Of one part, at any position."""
        return self._tally(kind for kind in self.tokens if kind.part is part)

    def reasoning(self, position: Position) -> Tally:
        """Of the reasoning of completions at one position: its `num_high` are the forking tokens there."""
        return self._tally(kind for kind in self.tokens if kind.part is Part.REASONING and kind.position is position)

    def window(self, *positions: Position) -> list[Tally]:
        """Of completions at any of `positions`, by offset: of those that are long enough."""
        return [
            self._tally(kind for kind in self.tokens if kind.offset == offset and kind.position in positions)
            for offset in range(LAST_OFFSET + 1)
        ]

    def first(self, *positions: Position) -> Tally:
        """Of the tokens at offsets 0 to 50 of completions at any of `positions`."""
        return self._tally(kind for kind in self.tokens if kind.offset is not None and kind.position in positions)

    @property
    def all_tokens(self) -> Tally:
        return self._tally(self.tokens)

    def forking(self, limit: int) -> list[tuple[str, Tally]]:
        """The texts that are forking tokens most often; of equal ones in alphabetical order."""
        kinds: dict[str, list[Kind]] = {}
        for kind in self.tokens:
            if kind.is_forking:
                kinds.setdefault(kind.text, []).append(kind)
        tallies = [(text, self._tally(of_text)) for text, of_text in kinds.items()]
        return sorted(tallies, key=lambda each: (-each[1].num_tokens, each[0]))[:limit]

    def _tally(self, kinds: Iterable[Kind]) -> Tally:
        found = list(kinds)
        num_tokens, entropy = self._sums(found)
        num_high, high_entropy = self._sums(kind for kind in found if kind.is_high)
        num_reflection, reflection_entropy = self._sums(kind for kind in found if kind.is_reflection)
        return Tally(
            num_tokens=num_tokens,
            entropy_nats=_ratio(entropy, num_tokens),
            num_high=num_high,
            high_share=_ratio(num_high, num_tokens),
            high_entropy_nats=_ratio(high_entropy, num_high),
            num_reflection=num_reflection,
            reflection_share=_ratio(num_reflection, num_tokens),
            reflection_entropy_nats=_ratio(reflection_entropy, num_reflection),
            num_high_reflection=self._sums(kind for kind in found if kind.is_high and kind.is_reflection)[0],
        )

    def _sums(self, kinds: Iterable[Kind]) -> tuple[int, float]:
        found = list(kinds)
        return sum(self.tokens[kind][0] for kind in found), sum(self.tokens[kind][1] for kind in found)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def count(rollouts: Iterable[Sequence[MarkedTurn]]) -> Figures:
    """The figures of some rollouts."""
    found = list(rollouts)
    figures = Figures(len(found))
    for turn in (turn for rollout in found for turn in rollout if turn.is_own):
        figures.turns[turn.position] += 1
        figures.words.update((turn.position, word) for word in turn.words)
        for place, token in enumerate(turn.sampled):
            offset = place if place <= LAST_OFFSET else None
            text = token.text if token.is_forking else ""
            kind = Kind(turn.position, token.part, token.is_high, token.is_reflection, offset, text)
            figures.add(kind, 1, token.entropy)
    return figures


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
        "tokens/forking_entropy_nats": reasoning.high_entropy_nats,
        "tokens/forking_fraction": reasoning.high_share,
        "tokens/reflection_fraction": reasoning.reflection_share,
        "tokens/reflection_entropy_nats": reasoning.reflection_entropy_nats,
    }
    return {name: value for name, value in curves.items() if value is not None}
