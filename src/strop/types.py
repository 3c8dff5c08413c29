"""The nouns that every layer speaks. Frozen, keyword-only, small; what can be derived is a property."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Annotated, TypeAlias, overload

from pydantic import PlainSerializer

from strop.errors import TaskError


class FinishReason(StrEnum):
    """Why the engine stopped sampling one completion."""

    STOP = "stop"  # a stop id or a stop string
    LENGTH = "length"  # max_tokens


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"  # the policy ended a turn without a tool call
    LENGTH = "length"  # the token budget ran out inside a completion
    TURN_LIMIT = "turn_limit"  # a tool call in the last allowed turn; it is not run
    TOOL_BUDGET = "tool_budget"  # a tool call beyond the number allowed; it is not run
    OVERFLOW = "overflow"  # the observation no longer fits the token budget; ids are left as they were


class ToolOutcome(StrEnum):
    """What became of one tool call. By status, never by looking for words in its text."""

    STDOUT = "stdout"
    ECHO = "echo"
    EMPTY = "empty"
    ERROR = "error"
    TIMEOUT = "timeout"
    KILLED = "killed"
    REJECTED = "rejected"
    MALFORMED = "malformed"  # not JSON, or no name or arguments
    UNCLOSED = "unclosed"  # an opening tag without its closing one
    UNKNOWN_TOOL = "unknown_tool"
    WRONG_ARGUMENTS = "wrong_arguments"
    TOO_MANY_CALLS = "too_many_calls"  # behind the last that a turn may hold
    NOT_RUN = "not_run"  # the rollout ended on this call (turn limit, tool budget)

    @property
    def is_error(self) -> bool:
        """True where rStar2-Agent's Eq. 4 counts an error: the agent's mistakes, none of ours."""
        return self not in (*_RAN_WELL, *_STOPPED_BY_US)

    @property
    def is_counted(self) -> bool:
        """True for a call of Eq. 4, wrong or not; a call that a limit of ours kept from being read or run is none."""
        return self not in _STOPPED_BY_US

    @property
    def is_dispatched(self) -> bool:
        """True where a tool was asked and gave the result; any other call was answered, or dropped, before it reached one."""
        return self not in (*_NEVER_REACHED_A_TOOL, *_STOPPED_BY_US)


# Not calls of Eq. 4: a limit of ours kept them from being read or run.
_STOPPED_BY_US = (ToolOutcome.TOO_MANY_CALLS, ToolOutcome.NOT_RUN)
_RAN_WELL = (ToolOutcome.STDOUT, ToolOutcome.ECHO, ToolOutcome.EMPTY)
_NEVER_REACHED_A_TOOL = (ToolOutcome.MALFORMED, ToolOutcome.UNCLOSED, ToolOutcome.UNKNOWN_TOOL, ToolOutcome.WRONG_ARGUMENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem and what is needed to judge an answer to it."""

    id: str
    question: str
    answer: str
    source: str  # where it comes from: a file, a hub data set, a generator
    facts: Mapping[str, str] = field(default_factory=dict)  # what else a reward, an environment or a report reads

    def __getitem__(self, fact: str) -> str:
        """Return a fact. Raises `TaskError` if the task does not have it."""
        if fact not in self.facts:
            known = ", ".join(self.facts) or "none"
            raise TaskError(f"task {self.id!r} has no fact {fact!r} (its facts: {known}). Add the column to tasks.facts.")
        return self.facts[fact]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RolloutKey:
    """Which rollout of a step; its order is the canonical order of rows."""

    task_index: int  # position in the stage's stream of tasks
    attempt: int
    branch: int = 0


class Floats(Sequence[float]):
    """An immutable sequence of floats in 8 bytes each, where a tuple takes 32. It equals a tuple of the same numbers."""

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values = array("d", values)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)

    @overload
    def __getitem__(self, place: int) -> float: ...
    @overload
    def __getitem__(self, place: slice) -> Floats: ...
    def __getitem__(self, place: int | slice) -> float | Floats:
        found = self._values[place]
        return found if isinstance(found, float) else Floats(found)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Floats | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


_OfFloats: TypeAlias = Annotated[Sequence[float], PlainSerializer(list)]  # pydantic knows lists and tuples only
_IDS: dict[int, int] = {}


def shared_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Return `ids` with one object for each number, in 8 bytes an id where a new object takes 36."""
    ids = tuple(ids)
    return tuple(map(_IDS.setdefault, ids, ids)) if set(map(type, ids)) == {int} else ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine returned in one turn: ids exactly as sampled, and which of them were forced on the policy.

    `logprobs` and `entropies` are in nats, of the distribution sampled from: after temperature, over the full vocabulary.
    `entropies` is empty when the engine cannot tell. `spans` says which weights sampled which tokens: more than one span if
    weights were published while it was sampled.
    """

    ids: tuple[int, ...]
    logprobs: _OfFloats
    entropies: _OfFloats
    is_forced: tuple[bool, ...]
    spans: tuple[tuple[int, int], ...]  # (policy version, number of tokens), in order
    finish_reason: FinishReason
    cached_tokens: int  # how many of the request's ids were not computed again
    drafted_tokens: int = field(default=0, compare=False)  # how many of `ids` took no step of the engine; depends on its load

    def __post_init__(self) -> None:
        """Keep the sequences in little memory: a step of a paper has tens of millions of tokens."""
        for name, kind in (("ids", shared_ids), ("logprobs", Floats), ("entropies", Floats)):
            object.__setattr__(self, name, kind(getattr(self, name)))

    @classmethod
    def spoken(cls, ids: tuple[int, ...], *, logprob: float = 0.0, entropies: Sequence[float] = ()) -> Completion:
        """Return a whole completion that no engine sampled, with one log-prob for all of its tokens."""
        return cls(
            ids=ids,
            logprobs=(logprob,) * len(ids),
            entropies=entropies,
            is_forced=(False,) * len(ids),
            spans=((0, len(ids)),),
            finish_reason=FinishReason.STOP,
            cached_tokens=0,
        )

    @classmethod
    def joined(cls, pieces: Sequence[Completion]) -> Completion:
        """Return the completion that was sampled in these pieces, in this order, each from where the one before it ended."""
        if len(pieces) == 1:
            return pieces[0]
        spans: list[tuple[int, int]] = []
        for version, num in chain.from_iterable(piece.spans for piece in pieces):
            if spans and spans[-1][0] == version:
                num += spans.pop()[1]
            spans.append((version, num))
        together = {
            name: tuple(chain.from_iterable(getattr(piece, name) for piece in pieces))
            for name in ("ids", "logprobs", "entropies", "is_forced")
        }
        return cls(
            **together,
            spans=tuple(spans),
            finish_reason=pieces[-1].finish_reason,
            cached_tokens=pieces[0].cached_tokens,
            drafted_tokens=sum(piece.drafted_tokens for piece in pieces),
        )

    @property
    def policy_version(self) -> int:
        """Of the oldest weights that sampled a token of it; -1 without tokens."""
        return min((version for version, _ in self.spans), default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the policy made, and what came of it. `text` is what the policy was shown."""

    name: str
    arguments: str  # as the policy wrote them
    outcome: ToolOutcome
    text: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion and the observation after it. Ids are the truth; the two texts are views of them, for people."""

    completion: Completion
    calls: tuple[ToolCall, ...]
    observation_ids: tuple[int, ...]
    completion_text: str
    observation_text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "observation_ids", shared_ids(self.observation_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at a task. Token ids are kept as they arose, never re-encoded from text.

    A branch repeats the first `forked_at` response tokens of its `parent`: the same ids, log-probs and masks, which were
    sampled once. It forks behind an observation; the rest is its own.
    """

    key: RolloutKey
    task_id: str
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    parent: RolloutKey | None = None  # in the same group; None for a rollout from the prompt
    forked_at: int = 0  # response tokens shared with the parent, observations included; 0 without one

    @property
    def text(self) -> str:
        """What the policy wrote in its last turn."""
        return self.turns[-1].completion_text if self.turns else ""

    @property
    def ids(self) -> list[int]:
        """Prompt, completions and observations in the order in which they arose."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += [*turn.completion.ids, *turn.observation_ids]
        return ids

    @property
    def loss_mask(self) -> list[bool]:
        """True on tokens that the policy sampled; False on prompt, forced tokens and observations."""
        mask = [False] * len(self.prompt_ids)
        for turn in self.turns:
            mask += [not forced for forced in turn.completion.is_forced] + [False] * len(turn.observation_ids)
        return mask

    @property
    def sampled_logprobs(self) -> list[float]:
        """The engine's log-prob of each sampled token, in nats, aligned with `ids`; 0 where nothing was sampled."""
        logprobs = [0.0] * len(self.prompt_ids)
        for turn in self.turns:
            logprobs += [*turn.completion.logprobs, *([0.0] * len(turn.observation_ids))]
        return logprobs

    @property
    def num_response_tokens(self) -> int:
        """Everything after the prompt, observations included."""
        return sum(len(turn.completion.ids) + len(turn.observation_ids) for turn in self.turns)

    def is_answered(self, at: int) -> bool:
        """Whether turn `at` was answered. The end of turn that `limits.forced_eos` appends is an observation, but no answer."""
        is_at_limit = self.stop_reason is StopReason.TOOL_BUDGET and at == len(self.turns) - 1
        return bool(self.turns[at].observation_ids) and not is_at_limit

    @property
    def calls(self) -> list[ToolCall]:
        return [call for turn in self.turns for call in turn.calls]

    @property
    def num_errors(self) -> int:
        """Calls that went wrong by the agent's own doing."""
        return sum(call.outcome.is_error for call in self.calls)

    @property
    def is_truncated(self) -> bool:
        """Stopped by a budget of tokens, not by the policy."""
        return self.stop_reason in (StopReason.LENGTH, StopReason.OVERFLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory and its judgement. `reward` is the weighted sum of `reward_parts`."""

    trajectory: Trajectory
    reward: float
    reward_parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The scored trajectories of one task, in canonical order. Void rollouts are counted, never included."""

    task: Task
    task_index: int
    trajectories: tuple[ScoredTrajectory, ...]
    num_void: int = 0
    excluded: tuple[Trajectory, ...] = ()  # void ones that finished, but that no judge could judge

    @property
    def tree(self) -> list[Trajectory]:
        """All finished trajectories, compared or not: the parent of a branch may be one that no judge could judge."""
        return [*(scored.trajectory for scored in self.trajectories), *self.excluded]

    @property
    def rewards(self) -> list[float]:
        return [scored.reward for scored in self.trajectories]

    @property
    def is_tied(self) -> bool:
        """All rewards equal: nothing to learn from the comparison."""
        return len(set(self.rewards)) < 2


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of the named parts, the same on every machine and in every process.

    Parts keep their kind and their borders: `derive_seed(1, "2")` and `derive_seed("1", 2)` differ, and so do
    `derive_seed("ab", "c")` and `derive_seed("a", "bc")`.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"strop-seed")
    for part in parts:
        encoded = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return int.from_bytes(digest.digest(), "little") >> 1
