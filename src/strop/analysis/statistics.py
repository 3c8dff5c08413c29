"""Counts the tokens of trajectories: figures are sums and counts, of which means are taken last.

A token has a part, an entropy in nats, a rank by it, and what came before its turn. Both formats of calls are recognized: JSON
in `<tool_call>` tags (rStar2-Agent, arXiv 2508.20722), and a tag with the tool's name (ARPO, arXiv 2507.19849). A part begins
with its opening tag and ends with its closing one. Only sampled tokens count, each once: those that a branch shares with its
parent count with the parent.

The live curves of forking and reflection tokens (rStar2-Agent, section 5.4) come from the same figures. The embedded engine
reports the entropy of every token that it samples. For servers, which report none, the trainer scores them before the first
update of the step.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple, Self

from strop.algorithms.method import Column, Selection
from strop.answer_text import closes_at
from strop.evaluation.metrics import REFLECTION
from strop.reports.rollouts import token_texts
from strop.rollout.chat_template import ChatFormat
from strop.rollout.tool_calls import OPENING, block_spans
from strop.training.batch import TokenBatch, in_canonical_order
from strop.types import RolloutKey, Trajectory, Turn

Span = tuple[int, int]  # characters of a text: first, and one past the last

_ANSWER = re.compile(r"<answer>.*?(?:</answer>|\Z)", re.DOTALL)
_BOX = "\\boxed{"


class Part(StrEnum):
    """What a token is part of."""

    REASONING = "reasoning"  # whatever is neither of the others: tags of reasoning and the end of the turn, too
    TOOL_CALL = "tool_call"
    ANSWER = "answer"


def token_parts(texts: Sequence[str], *, called: Collection[str]) -> list[Part]:
    """The part of each token of one completion; `called` names the tools that it called, by whatever format.

    A token on the border of a part belongs to it. Without an executed call, a completion has no tool-call part, because its
    prompt may offer no tools. An answer within a call belongs to the call. Without a tag, the answer is the last `\\boxed{}`.
    """
    text = "".join(texts)
    calls = call_spans(text, called=called) if called else []
    calls_of = inside(texts, calls)
    answers_of = inside(texts, answer_spans(text))
    return [
        Part.TOOL_CALL if is_call else Part.ANSWER if is_answer else Part.REASONING
        for is_call, is_answer in zip(calls_of, answers_of, strict=True)
    ]


def inside(texts: Sequence[str], spans: Sequence[Span]) -> list[bool]:
    """Of each token, whether any character of it lies in one of `spans`, which are in order of their ends.

    An empty text is the rest of the character before it, and lies where that lies.
    """
    found: list[bool] = []
    start, at = 0, 0
    for text in texts:
        end = start + len(text)
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        is_inside = at < len(spans) and spans[at][0] < end and start < end
        found.append(is_inside if text else bool(found) and found[-1])
        start = end
    return found


def _touches(span: Span, others: Sequence[Span]) -> bool:
    """Whether `span` has a character in common with one of `others`, which are in order and do not overlap."""
    after = bisect_right(others, span[0], key=lambda other: other[1])
    return after < len(others) and others[after][0] < span[1]


def call_spans(text: str, *, called: Collection[str]) -> list[Span]:
    """Where calls stand in `text`: blocks of JSON, or else the last tag with the name of a tool in `called`."""
    if OPENING in text:
        return block_spans(text)
    tag = re.compile(f"<({'|'.join(re.escape(name) for name in called if name) or '(?!)'})>")
    openings = list(tag.finditer(text))
    if not openings:
        return []
    last = openings[-1]
    closing = f"</{last.group(1)}>"
    end = text.rfind(closing, last.end())
    return [(last.start(), len(text) if end < 0 else end + len(closing))]


def answer_spans(text: str) -> list[Span]:
    r"""Every answer tag of `text`; of a text without one its last `\boxed{}`, up to the brace that closes it."""
    tagged = [match.span() for match in _ANSWER.finditer(text)]
    start = text.rfind(_BOX)
    if tagged or start < 0:
        return tagged
    return [(start, min(closes_at(text, start + len(_BOX) - 1), len(text)))]


TOP_SHARE = 0.2
"""rStar2-Agent (arXiv 2508.20722), section 5.4 and Figures 10 and 11: the top 20 % of each trajectory."""


def top_entropy(entropies: Sequence[float], *, share: float = TOP_SHARE) -> set[int]:
    """Return the places of the floor(share * n) highest entropies of a rollout's sampled tokens; of equal ones the first.

    The same rule as `strop.algorithms.losses`, which trains only on these tokens.
    """
    num_marked = int(len(entropies) * share + 1e-9)  # a share of 0.3 of ten tokens is 2.9999... in binary
    order = sorted(range(len(entropies)), key=lambda place: -entropies[place])
    return set(order[:num_marked])


class Position(StrEnum):
    """What the policy was shown just before it wrote a completion."""

    START = "start"  # the prompt
    SUCCESS = "after_success"  # the result of calls that all went right
    ERROR = "after_error"  # that of calls of which any went wrong by the policy's doing
    OTHER = "after_other"  # an observation without any call, of an environment of one's own


def has_entropies(trajectory: Trajectory) -> bool:
    """Return whether `trajectory` has an entropy for every token; those of server engines have none."""
    return all(len(turn.completion.entropies) == len(turn.completion.ids) for turn in trajectory.turns)


def with_entropies(trajectory: Trajectory, entropies: Sequence[float]) -> Trajectory | None:
    """Return `trajectory` with an entropy for every token: its own, or else `entropies`, which has one for each sampled token.

    Forced tokens get 0. None where entropies are missing.
    """
    if has_entropies(trajectory):
        return trajectory
    if len(entropies) != sum(trajectory.loss_mask):
        return None
    rest, turns = iter(entropies), []
    for turn in trajectory.turns:
        of_turn = tuple(0.0 if is_forced else next(rest) for is_forced in turn.completion.is_forced)
        turns.append(replace(turn, completion=replace(turn.completion, entropies=of_turn)))
    return replace(trajectory, turns=tuple(turns))


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


def count(rollouts: Iterable[tuple[Trajectory, Sequence[Sequence[str]]]]) -> Figures:
    """The figures of some rollouts, which have entropies. With each come the texts of each turn's ids.

    High entropy is a rank among all tokens that were sampled on the way from the prompt to the end, so also among those that a
    branch shares with its parent.
    """
    found = list(rollouts)
    figures = Figures(len(found))
    for trajectory, texts in found:
        turns = [[place for place, forced in enumerate(turn.completion.is_forced) if not forced] for turn in trajectory.turns]
        pairs = list(zip(trajectory.turns, turns, strict=True))
        high = top_entropy([turn.completion.entropies[place] for turn, sampled in pairs for place in sampled])
        num_tokens, num_sampled, position = 0, 0, Position.START
        for (turn, sampled), of_turn in zip(pairs, texts, strict=True):
            if num_tokens >= trajectory.forked_at:
                ranked = {place for number, place in enumerate(sampled, start=num_sampled) if number in high}
                _count_turn(figures, turn, of_turn, sampled=sampled, high=ranked, position=position)
            num_tokens += len(turn.completion.ids) + len(turn.observation_ids)
            num_sampled += len(sampled)
            position = _position_after(turn)
    return figures


def _count_turn(
    figures: Figures, turn: Turn, texts: Sequence[str], *, sampled: Sequence[int], high: Collection[int], position: Position
) -> None:
    """Add one completion. Places of tokens: those that were `sampled`, and of them those of high entropy."""
    text, parts = "".join(texts), token_parts(texts, called={call.name for call in turn.calls})
    # A word counts where every token of it is reasoning: one that begins in a call is the call's.
    token_ends = accumulate(map(len, texts))
    others = [
        (end - len(each), end) for each, end, part in zip(texts, token_ends, parts, strict=True) if part is not Part.REASONING
    ]
    spans = [span for match in REFLECTION.finditer(text) if not _touches(span := match.span(), others)]
    reflects = inside(texts, spans)
    figures.turns[position] += 1
    figures.words.update((position, text[start:end].lower()) for start, end in spans)
    for number, place in enumerate(sampled):
        kind = Kind(position, parts[place], place in high, reflects[place], number if number <= LAST_OFFSET else None)
        figures.add(kind._replace(text=texts[place]) if kind.is_forking else kind, 1, turn.completion.entropies[place])


def _position_after(turn: Turn) -> Position:
    if not turn.calls:
        return Position.OTHER
    return Position.ERROR if any(call.outcome.is_error for call in turn.calls) else Position.SUCCESS


_NUM_COUNTED = 64  # rollouts of a step that the curves are computed from: of 8192 tokens each, they take 4 s

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
        (each, [token_texts(texts_of, turn.completion.ids) for turn in each.turns]) for each in trajectories[:_NUM_COUNTED]
    )
    reasoning = figures.part(Part.REASONING)
    curves = {
        "tokens/forking_entropy_nats": reasoning.high_entropy_nats,
        "tokens/forking_fraction": reasoning.high_share,
        "tokens/reflection_fraction": reasoning.reflection_share,
        "tokens/reflection_entropy_nats": reasoning.reflection_entropy_nats,
    }
    return {name: value for name, value in curves.items() if value is not None}
