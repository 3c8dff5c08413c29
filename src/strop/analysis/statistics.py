"""Marked rollouts -> figures: sums and counts, which add up over rollouts and steps; means are taken last.

Entropies are in nats. Only sampled tokens count, each once: those that a branch shares with its parent count with the parent.

The live curves of forking and reflection tokens (rStar2-Agent, arXiv 2508.20722, section 5.4) come from the same figures. The
embedded engine reports the entropy of every token that it samples. For servers, which report none, the trainer scores them
before the first update of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self, TypeVar

from strop.algorithms.method import Column, Selection
from strop.analysis.marks import MarkedTurn, Part, Position, has_entropies, mark, with_entropies
from strop.reports.rollouts import token_texts
from strop.rollout.chat_template import ChatFormat
from strop.training.batch import TokenBatch, in_canonical_order
from strop.types import RolloutKey, Trajectory

_SUMS = ("turns", "parts", "offsets", "words", "forking")  # of `Figures`
LAST_OFFSET = 50
"""ARPO (arXiv 2507.19849), section 1.2: entropy rises in the first 10 to 50 tokens after a tool's result."""


def ratio(numerator: float, denominator: float) -> float | None:
    """None where there is nothing to divide by: no tokens are not the same as no entropy."""
    return numerator / denominator if denominator else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Some tokens."""

    num_tokens: int = 0
    entropy_sum: float = 0.0
    num_high: int = 0
    high_entropy_sum: float = 0.0
    num_reflection: int = 0
    num_high_reflection: int = 0
    reflection_entropy_sum: float = 0.0

    def __add__(self, other: Self) -> Tally:
        return Tally(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    @property
    def entropy(self) -> float | None:
        return ratio(self.entropy_sum, self.num_tokens)

    @property
    def high_share(self) -> float | None:
        return ratio(self.num_high, self.num_tokens)

    @property
    def high_entropy(self) -> float | None:
        """Mean entropy of the marked tokens."""
        return ratio(self.high_entropy_sum, self.num_high)

    @property
    def reflection_entropy(self) -> float | None:
        """Mean entropy of tokens in reflection words."""
        return ratio(self.reflection_entropy_sum, self.num_reflection)

    @property
    def reflection_share(self) -> float | None:
        return ratio(self.num_reflection, self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """Sums over completions by offset: the number of sampled tokens between the observation, or the prompt, and the token."""

    entropy_sums: tuple[float, ...] = (0.0,) * (LAST_OFFSET + 1)
    num_tokens: tuple[int, ...] = (0,) * (LAST_OFFSET + 1)

    def __add__(self, other: Self) -> Offsets:
        return Offsets(
            entropy_sums=tuple(a + b for a, b in zip(self.entropy_sums, other.entropy_sums, strict=True)),
            num_tokens=tuple(a + b for a, b in zip(self.num_tokens, other.num_tokens, strict=True)),
        )

    @property
    def entropies(self) -> list[float | None]:
        """The mean at each offset, over the completions that are long enough."""
        return [ratio(total, count) for total, count in zip(self.entropy_sums, self.num_tokens, strict=True)]

    @property
    def entropy(self) -> float | None:
        """The mean over all tokens at offsets 0 to 50."""
        return ratio(sum(self.entropy_sums), sum(self.num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Everything that is counted, of one step or of several."""

    num_rollouts: int = 0
    turns: dict[Position, int] = field(default_factory=dict)
    parts: dict[tuple[Position, Part], Tally] = field(default_factory=dict)
    offsets: dict[Position, Offsets] = field(default_factory=dict)
    words: dict[Position, Counter[str]] = field(default_factory=dict)
    forking: dict[str, Tally] = field(default_factory=dict)  # by text

    def __add__(self, other: Self) -> Figures:
        sums = {name: _added(getattr(self, name), getattr(other, name)) for name in _SUMS}
        return Figures(num_rollouts=self.num_rollouts + other.num_rollouts, **sums)

    def part(self, part: Part) -> Tally:
        """Of one part, wherever it stands."""
        return sum((tally for (_, each), tally in self.parts.items() if each is part), Tally())

    def reasoning(self, position: Position) -> Tally:
        """Of the reasoning of completions at one position: its `num_high` are the forking tokens there."""
        return self.parts.get((position, Part.REASONING), Tally())

    def window(self, *positions: Position) -> Offsets:
        """Of completions at any of `positions`, by offset."""
        return sum((self.offsets.get(position, Offsets()) for position in positions), Offsets())

    @property
    def all_tokens(self) -> Tally:
        return sum(self.parts.values(), Tally())


_Key = TypeVar("_Key")
_Value = TypeVar("_Value", int, Tally, Offsets, Counter[str])


def _added(ours: Mapping[_Key, _Value], theirs: Mapping[_Key, _Value]) -> dict[_Key, _Value]:
    both = dict(ours)
    _add_to(both, theirs)
    return both


def _add_to(sums: dict[_Key, _Value], more: Mapping[_Key, _Value]) -> None:
    for key, value in more.items():
        sums[key] = sums[key] + value if key in sums else value


def count(rollouts: Iterable[Sequence[MarkedTurn]]) -> Figures:
    """The figures of some rollouts."""
    total = Figures(turns={}, parts={}, offsets={}, words={}, forking={})
    num_rollouts = 0
    for rollout in rollouts:
        num_rollouts += 1
        for turn in rollout:
            if turn.is_own:
                _add_to(total.turns, {turn.position: 1})
                _add_to(total.parts, tally_turn(turn))
                _add_to(total.offsets, {turn.position: offsets_of(turn)})
                _add_to(total.words, {turn.position: Counter(turn.words)})
                _add_to(total.forking, _forking(turn))
    return replace(total, num_rollouts=num_rollouts)


def tally_turn(turn: MarkedTurn) -> dict[tuple[Position, Part], Tally]:
    """The sampled tokens of one completion, by the parts that it has."""
    found: dict[tuple[Position, Part], Tally] = {}
    for part in Part:
        tokens = [token for token in turn.sampled if token.part is part]
        if tokens:
            high = [token.entropy for token in tokens if token.is_high]
            found[turn.position, part] = Tally(
                num_tokens=len(tokens),
                entropy_sum=sum(token.entropy for token in tokens),
                num_high=len(high),
                high_entropy_sum=sum(high),
                num_reflection=sum(token.is_reflection for token in tokens),
                num_high_reflection=sum(token.is_high and token.is_reflection for token in tokens),
                reflection_entropy_sum=sum(token.entropy for token in tokens if token.is_reflection),
            )
    return found


def offsets_of(turn: MarkedTurn) -> Offsets:
    """The first sampled tokens of one completion."""
    first = [token.entropy for token in turn.sampled[: LAST_OFFSET + 1]]
    spare = LAST_OFFSET + 1 - len(first)
    return Offsets(entropy_sums=(*first, *[0.0] * spare), num_tokens=(*[1] * len(first), *[0] * spare))


def most_frequent(forking: Mapping[str, Tally], limit: int) -> Sequence[tuple[str, Tally]]:
    """The texts that are forking tokens most often; of equal ones in alphabetical order."""
    return sorted(forking.items(), key=lambda item: (-item[1].num_tokens, item[0]))[:limit]


def _forking(turn: MarkedTurn) -> dict[str, Tally]:
    found: dict[str, Tally] = {}
    for token in turn.sampled:
        if token.is_forking:
            one = Tally(num_tokens=1, entropy_sum=token.entropy, num_high=1, high_entropy_sum=token.entropy)
            found[token.text] = found.get(token.text, Tally()) + one
    return found


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
