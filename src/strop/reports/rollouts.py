"""The rollouts a report shows: a few steps of each stage, a few groups of each step, every token with what is known of it.

A page that everybody can open has a size limit, so texts and token strips share fixed budgets; what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from tokenizers import Tokenizer

from strop.reports.log import RunLog, finite
from strop.reports.scales import duration, figure
from strop.reports.tokens import find_tokenizer, token_texts
from strop.runs import RunDirectory, read_json, read_lines
from strop.types import RolloutKey, ScoredTrajectory, Task, Turn

STEPS_PER_STAGE = 4
GROUPS_PER_STEP = 2
ROLLOUTS_PER_GROUP = 8
TEXT_BUDGET = 600_000  # characters of the whole page
TOKEN_BUDGET = 30_000  # tokens of the whole page; about 35 bytes each

_SCORED = TypeAdapter(ScoredTrajectory)
_TASK = TypeAdapter(Task)
_KEY = TypeAdapter(RolloutKey)


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
    """A sample of the run's rollouts: first, last and steps between; groups whose rewards differ before those that tie."""
    chosen = [(stage, step) for stage in log.stages for step in _spread(_closed_steps(run, stage.name), STEPS_PER_STAGE)]
    num_rollouts = max(1, len(chosen)) * GROUPS_PER_STEP * ROLLOUTS_PER_GROUP
    strips: list[Mapping[str, Any]] = []
    steps = []
    has_tokens = True
    for stage, step in chosen:
        tokenizer = find_tokenizer(run, log, stage)
        has_tokens = has_tokens and tokenizer is not None
        press = _Press(tokenizer, strips, TEXT_BUDGET // num_rollouts, TOKEN_BUDGET // num_rollouts)
        steps.append(_step(run, stage.name, step, press))
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


def _step(run: RunDirectory, stage: str, step: int, press: _Press) -> StepView:
    groups: list[dict[str, Any]] = read_json(run.stage(stage).selection(step)).get("groups", [])
    lines = read_lines(run.stage(stage).rollouts(step))
    played = {scored.trajectory.key: (scored, line) for line in lines for scored in [_SCORED.validate_python(line["rollout"])]}
    mixed_first = sorted(groups, key=lambda group: len({entry.get("reward") for entry in group["rollouts"]}) < 2)
    views = tuple(_group(group, played, press, step=step) for group in mixed_first[:GROUPS_PER_STEP])
    return StepView(stage=stage, step=step, num_groups=len(groups), groups=views)


def _group(
    group: Mapping[str, Any],
    played: Mapping[RolloutKey, tuple[ScoredTrajectory, Mapping[str, Any]]],
    press: _Press,
    *,
    step: int,
) -> GroupView:
    task = _TASK.validate_python(group["task"])
    entries: list[dict[str, Any]] = group["rollouts"]
    found = [(entry, *played[key]) for entry in entries if (key := _KEY.validate_python(entry["key"])) in played]
    found = sorted(_some_of_both(found), key=lambda each: _lineage(each[1], played))
    largest = max((abs(entry.get("advantage") or 0.0) for entry in entries), default=0.0)
    return GroupView(
        question=task.question,
        answer=task.answer,
        source=task.source,
        prompt=press.prompt(found[0][1].trajectory.prompt_ids if found else ()),
        num_rollouts=len(entries),
        num_kept=sum(bool(entry["is_kept"]) for entry in entries),
        rollouts=tuple(
            _rollout(entry, scored, line, largest, press, step=step, depth=len(_lineage(scored, played)) - 1)
            for entry, scored, line in found
        ),
    )


def _rollout(
    entry: Mapping[str, Any],
    scored: ScoredTrajectory,
    line: Mapping[str, Any],
    largest: float,
    press: _Press,
    *,
    step: int,
    depth: int,
) -> RolloutView:
    trajectory = scored.trajectory
    advantage = entry.get("advantage")
    return RolloutView(
        name=_name(trajectory.key),
        depth=depth,
        origin=f"{trajectory.forked_at:,} tokens of {_name(trajectory.parent)}" if trajectory.parent else "",
        reward=figure(scored.reward),
        reward_parts=tuple((name, figure(value)) for name, value in finite(scored.reward_parts).items()),
        advantage=advantage,
        advantage_share=(advantage or 0.0) / largest if largest else 0.0,
        is_kept=bool(entry["is_kept"]),
        reason=str(entry.get("reason", "")),
        figures=tuple((name, figure(value)) for name, value in finite(entry.get("figures") or {}).items()),
        stop_reason=trajectory.stop_reason.value.replace("_", " "),
        policy_version=_version(line, step),
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


def _lineage(
    scored: ScoredTrajectory, played: Mapping[RolloutKey, tuple[ScoredTrajectory, Mapping[str, Any]]]
) -> list[RolloutKey]:
    """What a rollout branched off, from the prompt to itself: sorted by it, branches stand below their parent."""
    lineage = [scored.trajectory.key]
    parent = scored.trajectory.parent
    while parent is not None:
        lineage.insert(0, parent)
        parent = played[parent][0].trajectory.parent if parent in played else None
    return lineage


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


def _closed_steps(run: RunDirectory, stage: str) -> list[int]:
    """The steps whose rollouts were all judged: those with a selection beside them."""
    directory = run.stage(stage).selection(0).parent
    names = sorted(path.name for path in directory.glob("step-*.selection.json"))
    return [int(name.removeprefix("step-").removesuffix(".selection.json")) for name in names]


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """`count` of `steps` at equal distances, first and last included."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _some_of_both(
    found: list[tuple[dict[str, Any], ScoredTrajectory, Mapping[str, Any]]],
) -> list[tuple[dict[str, Any], ScoredTrajectory, Mapping[str, Any]]]:
    """At most `ROLLOUTS_PER_GROUP`, in order, with dropped ones among them: why they were dropped is half of the story."""
    kept = [each for each in found if each[0]["is_kept"]]
    dropped = [each for each in found if not each[0]["is_kept"]]
    num_dropped = min(len(dropped), max(ROLLOUTS_PER_GROUP // 2, ROLLOUTS_PER_GROUP - len(kept)))
    shown = kept[: ROLLOUTS_PER_GROUP - num_dropped] + dropped[:num_dropped]
    return sorted(shown, key=lambda each: each[1].trajectory.key)


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
