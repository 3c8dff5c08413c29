"""The tokens of a trajectory with all that is counted of them: part, entropy, marks, and what came before their turn.

Both formats of calls are recognized: JSON in `<tool_call>` tags (rStar2-Agent, arXiv 2508.20722), and a tag with the tool's
name (ARPO, arXiv 2507.19849). A part begins with its opening tag and ends with its closing one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

from strop.evaluation.metrics import REFLECTION
from strop.rollout.tool_calls import OPENING, block_spans
from strop.types import Trajectory, Turn

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
    depth = 0
    for place in range(start + len(_BOX) - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return [(start, place + 1)]
    return [(start, len(text))]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of a completion."""

    text: str
    entropy: float  # nats, of the distribution that it was sampled from
    part: Part
    is_sampled: bool  # False: forced on the policy; nothing of it is counted
    is_high: bool  # among the sampled tokens of its rollout with the highest entropy
    is_reflection: bool  # in a reflection word, in reasoning

    @property
    def is_forking(self) -> bool:
        """Whether it is a reasoning token of high entropy, where other continuations were likely."""
        return self.is_high and self.part is Part.REASONING


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedTurn:
    """One completion. `is_own` is False if a branch shares it with its parent, for which it is counted."""

    position: Position
    tokens: tuple[Token, ...]
    words: tuple[str, ...]  # reflection words in reasoning, in lower case
    is_own: bool

    @property
    def sampled(self) -> list[Token]:
        return [token for token in self.tokens if token.is_sampled]


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


def mark(trajectory: Trajectory, texts: Sequence[Sequence[str]]) -> tuple[MarkedTurn, ...]:
    """Return `trajectory`, which has entropies, with its tokens marked; `texts` holds the texts of each turn's ids.

    High entropy is a rank among all tokens that were sampled on the way from the prompt to the end, so also among those that a
    branch shares with its parent.
    """
    ranked = [
        (turn, place)
        for turn, each in enumerate(trajectory.turns)
        for place, is_forced in enumerate(each.completion.is_forced)
        if not is_forced
    ]
    entropies = [trajectory.turns[turn].completion.entropies[place] for turn, place in ranked]
    high = {ranked[number] for number in top_entropy(entropies)}
    turns, num_tokens, before = [], 0, None
    for index, turn in enumerate(trajectory.turns):
        own = num_tokens >= trajectory.forked_at
        high_here = {place for at, place in high if at == index}
        turns.append(_turn(turn, texts[index], high_here, position=_position(before), is_own=own))
        num_tokens += len(turn.completion.ids) + len(turn.observation_ids)
        before = turn
    return tuple(turns)


def _turn(turn: Turn, texts: Sequence[str], high: set[int], *, position: Position, is_own: bool) -> MarkedTurn:
    completion = turn.completion
    parts = token_parts(texts, called={call.name for call in turn.calls} if turn.calls else ())
    text = "".join(texts)
    # A word counts where every token of it is reasoning: one that begins in a call is the call's.
    token_ends = accumulate(map(len, texts))
    others = [
        (end - len(each), end) for each, end, part in zip(texts, token_ends, parts, strict=True) if part is not Part.REASONING
    ]
    spans = [span for match in REFLECTION.finditer(text) if not _touches(span := match.span(), others)]
    reflects = inside(texts, spans)
    return MarkedTurn(
        position=position,
        tokens=tuple(
            Token(
                text=texts[place],
                entropy=completion.entropies[place],
                part=parts[place],
                is_sampled=not completion.is_forced[place],
                is_high=place in high,
                is_reflection=reflects[place],
            )
            for place in range(len(completion.ids))
        ),
        words=tuple(text[start:end].lower() for start, end in spans),
        is_own=is_own,
    )


def _position(before: Turn | None) -> Position:
    if before is None:
        return Position.START
    if not before.calls:
        return Position.OTHER
    return Position.ERROR if any(call.outcome.is_error for call in before.calls) else Position.SUCCESS
