"""A trajectory -> its tokens with all that is counted of them: entropy, part, marks, and what came before their turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from strop.analysis.marks import TOP_SHARE, reflection_spans, top_entropy
from strop.analysis.parts import Part, inside, token_parts
from strop.types import Trajectory, Turn


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
    is_high: bool  # among the share of its rollout's sampled tokens that have the highest entropy
    is_reflection: bool  # in a word of second thoughts, in reasoning

    @property
    def is_forking(self) -> bool:
        """A token of high entropy in reasoning: where the policy might have gone on otherwise."""
        return self.is_high and self.part is Part.REASONING


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedTurn:
    """One completion. `is_own` is False where a branch repeats its parent's: sampled once, so counted with the parent."""

    position: Position
    tokens: tuple[Token, ...]
    words: tuple[str, ...]  # of second thoughts in reasoning, in small letters
    is_own: bool

    @property
    def sampled(self) -> list[Token]:
        return [token for token in self.tokens if token.is_sampled]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedRollout:
    """One trajectory, turn by turn."""

    turns: tuple[MarkedTurn, ...]

    @property
    def own_turns(self) -> list[MarkedTurn]:
        return [turn for turn in self.turns if turn.is_own]


def has_entropies(trajectory: Trajectory) -> bool:
    """Whether the engine told the entropy of every token of `trajectory`; server engines tell none."""
    return all(len(turn.completion.entropies) == len(turn.completion.ids) for turn in trajectory.turns)


def mark(trajectory: Trajectory, texts: Sequence[Sequence[str]], *, share: float = TOP_SHARE) -> MarkedRollout:
    """`trajectory`, which has entropies, with its tokens marked; `texts` are those of each turn's ids.

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
    high = {at for at, is_high in zip(ranked, top_entropy(entropies, share=share), strict=True) if is_high}
    turns, num_tokens, before = [], 0, None
    for index, turn in enumerate(trajectory.turns):
        own = num_tokens >= trajectory.forked_at
        high_here = {place for at, place in high if at == index}
        turns.append(_turn(turn, texts[index], high_here, position=_position(before), is_own=own))
        num_tokens += len(turn.completion.ids) + len(turn.observation_ids)
        before = turn
    return MarkedRollout(turns=tuple(turns))


def _turn(turn: Turn, texts: Sequence[str], high: set[int], *, position: Position, is_own: bool) -> MarkedTurn:
    completion = turn.completion
    parts = token_parts(texts, called={call.name for call in turn.calls} if turn.calls else ())
    text = "".join(texts)
    in_reasoning = [part is Part.REASONING for part in parts]
    # A word counts where every token of it is reasoning: one that begins in a call is the call's.
    spans = [
        span
        for span in reflection_spans(text)
        if all(is_reasoning for is_in, is_reasoning in zip(inside(texts, [span]), in_reasoning, strict=True) if is_in)
    ]
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
