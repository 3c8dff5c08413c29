"""The rollouts that a report shows, every token with what is known of it; which ones these are, chosen_rollouts.py says.

A page that everybody can open has a size limit, so texts and token strips share fixed budgets; what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from tokenizers import Tokenizer

from strop.reports.chosen_rollouts import ChosenGroup, ChosenRollout, ChosenStep, choose_rollouts
from strop.reports.log import RunLog, finite
from strop.reports.scales import duration, figure
from strop.reports.tokens import find_tokenizer, token_texts
from strop.runs import RunDirectory
from strop.types import RolloutKey, Task, Turn

TEXT_BUDGET = 600_000  # characters of the whole page
TOKEN_BUDGET = 30_000  # tokens of the whole page; about 35 bytes each

_TASK = TypeAdapter(Task)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """One tool call, as it is shown."""

    name: str
    arguments: str
    outcome: str
    is_error: bool
    duration: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A completion or an observation: its text, its length, and the strip of its tokens where there is one."""

    text: str
    num_tokens: int
    strip: int  # position in `RolloutTable.strips`; -1: text only


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One turn: what the policy wrote, the calls that it made so, and what it was answered."""

    completion: Passage
    calls: tuple[CallView, ...]
    observation: Passage


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """One rollout with its judgement and its fate."""

    name: str
    depth: int  # how many forks lie between it and the prompt
    origin: str  # where it branched; empty for one from the prompt
    reward: str
    reward_parts: tuple[tuple[str, str], ...]
    advantage: float | None  # None where none was recorded
    advantage_share: float  # of the largest in its group, for the bar; in [-1, 1]
    is_kept: bool
    reason: str
    figures: tuple[tuple[str, str], ...]
    stop_reason: str
    policy_version: str
    num_tokens: int
    turns: tuple[TurnView, ...]

    @property
    def calls(self) -> list[CallView]:
        return [call for turn in self.turns for call in turn.calls]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """The rollouts of one task that are shown, and how many there were."""

    question: str
    answer: str
    source: str
    prompt: Passage
    num_rollouts: int
    num_kept: int
    rollouts: tuple[RolloutView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The groups of one step that are shown."""

    stage: str
    step: int
    num_groups: int
    groups: tuple[GroupView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTable:
    """Everything shown, and the token strips that the page draws when a rollout is opened."""

    steps: tuple[StepView, ...]
    strips: tuple[Mapping[str, Any], ...]
    has_tokens: bool  # False: no tokenizer was found, so tokens are shown as text only


def read_rollouts(run: RunDirectory, log: RunLog) -> RolloutTable:
    """What the page says of each rollout that is shown."""
    chosen = choose_rollouts(run, log)
    num_rollouts = max(1, sum(len(step.rollouts) for step in chosen))
    strips: list[Mapping[str, Any]] = []
    steps = []
    has_tokens = True
    for step in chosen:
        tokenizer = find_tokenizer(run, log, step.stage)
        has_tokens = has_tokens and tokenizer is not None
        press = _Press(tokenizer, strips, TEXT_BUDGET // num_rollouts, TOKEN_BUDGET // num_rollouts)
        steps.append(_step(step, press))
    return RolloutTable(steps=tuple(steps), strips=tuple(strips), has_tokens=has_tokens)


class _Press:
    """Turns ids and texts into passages within a budget a rollout, and collects the strips of tokens that they point to."""

    def __init__(self, tokenizer: Tokenizer | None, strips: list[Mapping[str, Any]], num_chars: int, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._strips = strips
        self._num_chars = num_chars
        self._num_tokens = num_tokens

    def passages(self, turn: Turn, num_turns: int) -> tuple[Passage, Passage]:
        """Completion and observation of one of `num_turns` turns, each with an equal share of its rollout's budget."""
        chars, tokens = self._num_chars // (2 * num_turns), self._num_tokens // (2 * num_turns)
        completion, observed = turn.completion, turn.observation_ids
        of_policy: dict[str, list[float] | list[int]] = {
            "p": [round(value, 3) for value in completion.logprobs],
            "h": [round(value, 3) for value in completion.entropies],
            "f": [int(forced) for forced in completion.is_forced],
        }
        spare = max(0, tokens - len(observed))  # what a short observation leaves is the completion's
        return (
            self._passage(completion.ids, turn.completion_text, of_policy, chars, tokens + spare),
            self._passage(observed, turn.observation_text, {}, chars, tokens),
        )

    def prompt(self, ids: Sequence[int]) -> Passage:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False) if self._tokenizer else ""
        return Passage(text=_clipped(text, self._num_chars), num_tokens=len(ids), strip=-1)

    def _passage(
        self, ids: Sequence[int], text: str, columns: Mapping[str, list[float] | list[int]], chars: int, limit: int
    ) -> Passage:
        strip = -1
        if self._tokenizer is not None and ids:
            head, tail = _ends(len(ids), max(8, limit))
            places = [*range(head), *range(tail, len(ids))]
            pieces = token_texts(self._tokenizer, ids)
            strip = len(self._strips)
            self._strips.append(
                {"t": [pieces[place] for place in places], "i": [ids[place] for place in places]}
                | {name: [column[place] for place in places] for name, column in columns.items() if column}
                | ({"gap": [head, tail - head]} if tail > head else {})
            )
        return Passage(text=_clipped(text, chars), num_tokens=len(ids), strip=strip)


def _step(step: ChosenStep, press: _Press) -> StepView:
    return StepView(
        stage=step.stage.name,
        step=step.step,
        num_groups=step.num_groups,
        groups=tuple(_group(group, press, step=step.step) for group in step.groups),
    )


def _group(group: ChosenGroup, press: _Press, *, step: int) -> GroupView:
    task = _TASK.validate_python(group.selected["task"])
    entries: list[dict[str, Any]] = group.selected["rollouts"]
    largest = max((abs(entry.get("advantage") or 0.0) for entry in entries), default=0.0)
    return GroupView(
        question=task.question,
        answer=task.answer,
        source=task.source,
        prompt=press.prompt(group.rollouts[0].scored.trajectory.prompt_ids if group.rollouts else ()),
        num_rollouts=len(entries),
        num_kept=sum(bool(entry["is_kept"]) for entry in entries),
        rollouts=tuple(_rollout(rollout, largest, press, step=step) for rollout in group.rollouts),
    )


def _rollout(rollout: ChosenRollout, largest: float, press: _Press, *, step: int) -> RolloutView:
    scored, entry = rollout.scored, rollout.entry
    trajectory = scored.trajectory
    advantage = entry.get("advantage")
    return RolloutView(
        name=_name(trajectory.key),
        depth=len(rollout.lineage) - 1,
        origin=f"{trajectory.forked_at:,} tokens of {_name(trajectory.parent)}" if trajectory.parent else "",
        reward=figure(scored.reward),
        reward_parts=tuple((name, figure(value)) for name, value in finite(scored.reward_parts).items()),
        advantage=advantage,
        advantage_share=(advantage or 0.0) / largest if largest else 0.0,
        is_kept=bool(entry["is_kept"]),
        reason=str(entry.get("reason", "")),
        figures=tuple((name, figure(value)) for name, value in finite(entry.get("figures") or {}).items()),
        stop_reason=trajectory.stop_reason.value.replace("_", " "),
        policy_version=_version(rollout.line, step),
        num_tokens=trajectory.num_response_tokens,
        turns=tuple(_turn(turn, len(trajectory.turns), press) for turn in trajectory.turns),
    )


def _version(line: Mapping[str, Any], step: int) -> str:
    """Of the weights that sampled a rollout, and by how many publications they are older than those of its step."""
    if "policy_version" not in line:
        return ""
    behind = step - 1 - int(line["policy_version"])
    return f"{line['policy_version']} ({behind} behind)" if behind > 0 else str(line["policy_version"])


def _name(key: RolloutKey) -> str:
    return f"attempt {key.attempt}" + (f" · branch {key.branch}" if key.branch else "")


def _turn(turn: Turn, num_turns: int, press: _Press) -> TurnView:
    completion, observation = press.passages(turn, num_turns)
    calls = tuple(
        CallView(
            name=call.name or "(no name)",
            arguments=_clipped(call.arguments, 200),
            outcome=call.outcome.value.replace("_", " "),
            is_error=call.outcome.is_error,
            duration=duration(call.duration_s),
        )
        for call in turn.calls
    )
    return TurnView(completion=completion, calls=calls, observation=observation)


def _ends(length: int, limit: int) -> tuple[int, int]:
    """Where a gap begins and ends so that `limit` of `length` are left: two thirds before it, one third after it."""
    if length <= limit:
        return length, length
    head = 2 * limit // 3
    return head, length - (limit - head)


def _clipped(text: str, limit: int) -> str:
    head, tail = _ends(len(text), max(200, limit))
    if head == tail:
        return text
    return f"{text[:head]}\n… {tail - head:,} characters left out …\n{text[tail:]}"
