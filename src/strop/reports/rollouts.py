"""The rollouts that a report shows, with every token, its log-prob and its entropy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter
from tokenizers import Tokenizer

from strop.errors import RunError
from strop.evaluation.metrics import kind_of
from strop.evaluation.results import EvalFiles, read_eval
from strop.reports.log import Metrics, RunLog, StageLog, finite
from strop.run_directory import RunDirectory, iter_lines, read_json, read_lines
from strop.types import RolloutKey, ScoredTrajectory, Task, ToolCall, Trajectory, Turn


def find_tokenizer(run: RunDirectory, log: RunLog, stage: StageLog) -> Tokenizer | None:
    """Return the tokenizer of the stage, of its initial model or of an earlier stage; None if none has a file."""
    names = [each.name for each in log.stages]
    earlier = names[: names.index(stage.name)]
    files = (
        place / "tokenizer.json"
        for name in [stage.name, *([stage.init] if stage.init else []), *reversed(earlier)]
        for place in _models(run, name)
    )
    return next((_read_tokenizer(file) for file in files if file.is_file()), None)


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # `tokenizers` raises nothing more specific
        raise RunError(f"{file}: not a tokenizer: {error}. Restore the file.") from error


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each id. If several ids share a character, the first gets all of it and the others are empty."""
    pieces: list[str] = []
    while len(pieces) < len(ids):
        start = len(pieces)
        for width in (1, 2, 3, 4):
            text = tokenizer.decode(list(ids[start : start + width]), skip_special_tokens=False)
            if "\ufffd" not in text:
                break
        else:
            text, width = tokenizer.decode([ids[start]], skip_special_tokens=False), 1
        if (tokenizer.id_to_token(ids[start]) or "").startswith("▁") and not text.startswith(" "):
            text = " " + text  # SentencePiece removes the space before the first word of a text
        pieces += [text, *[""] * (min(width, len(ids) - start) - 1)]
    return pieces


def _models(run: RunDirectory, stage: str) -> list[Path]:
    """Return the places of the model of `stage`: its directory, or the path that it recorded."""
    directory = run.stage(stage)
    elsewhere = read_json(directory.done).get("model") if directory.done.exists() else None
    return [directory.model, *([Path(elsewhere)] if elsewhere else [])]


STEPS_PER_STAGE = 4
GROUPS_PER_STEP = 2
ROLLOUTS_PER_GROUP = 8
EXAMPLES = 10  # of each kind of response, of an evaluation
TEXT_BUDGET = 600_000  # characters of the whole page
TOKEN_BUDGET = 30_000  # tokens of the whole page; about 35 bytes each

_Played: TypeAlias = Mapping[RolloutKey, tuple[ScoredTrajectory, Mapping[str, Any]]]

_SCORED = TypeAdapter(ScoredTrajectory)
_KEY = TypeAdapter(RolloutKey)
_TASK = TypeAdapter(Task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A completion or an observation: its text, its length, and the strip of its tokens where there is one."""

    text: str
    num_tokens: int
    strip: int  # position in `RolloutTable.strips`; -1: text only


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """One turn: the completion, its tool calls and the observation."""

    completion: Passage
    calls: tuple[ToolCall, ...]
    observation: Passage


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """A rollout with its rewards and whether it was kept."""

    scored: ScoredTrajectory
    entry: Mapping[str, Any]  # of the step's selection
    line: Mapping[str, Any]  # of the step's rollouts
    lineage: tuple[RolloutKey, ...]  # from the root rollout to itself
    step: int
    turns: tuple[ShownTurn, ...] = ()

    @property
    def trajectory(self) -> Trajectory:
        return self.scored.trajectory

    @property
    def name(self) -> str:
        return _name(self.trajectory.key)

    @property
    def origin(self) -> str:
        """Where it branched; empty for one from the prompt."""
        parent = self.trajectory.parent
        return f"{self.trajectory.forked_at:,} tokens of {_name(parent)}" if parent else ""

    @property
    def reward_parts(self) -> Metrics:
        return finite(self.scored.reward_parts)

    @property
    def advantage(self) -> float | None:
        """None where none was recorded."""
        return self.entry.get("advantage")

    @property
    def is_kept(self) -> bool:
        return bool(self.entry["is_kept"])

    @property
    def fate(self) -> str:
        """What became of it: kept or dropped, or how an evaluation judged it."""
        return str(self.entry.get("kind") or ("kept" if self.is_kept else "dropped"))

    @property
    def figures(self) -> Metrics:
        return finite(self.entry.get("figures") or {})

    @property
    def policy_version(self) -> str:
        """The versions of the sampling weights and how many publications the oldest is behind its step."""
        versions = sorted(map(int, self.line.get("weights", ())))
        behind = self.step - 1 - versions[0] if versions else 0
        return ", ".join(map(str, versions)) + (f" ({behind} behind)" if behind > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownGroup:
    """The rollouts of a task that are shown, branches below their parent."""

    task: Task
    entries: Sequence[Mapping[str, Any]]  # of all rollouts, in the step's selection
    rollouts: tuple[ShownRollout, ...]
    prompt: Passage | None = None

    @property
    def num_kept(self) -> int:
        return sum(bool(entry["is_kept"]) for entry in self.entries)

    @property
    def largest_advantage(self) -> float:
        return max((abs(entry.get("advantage") or 0.0) for entry in self.entries), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """The groups of a step that are shown, and how many it has."""

    stage: StageLog
    step: int
    num_groups: int
    groups: tuple[ShownGroup, ...]
    kinds: Mapping[str, int] = field(default_factory=dict)  # of an evaluation: how many rollouts are of each kind

    @property
    def rollouts(self) -> list[ShownRollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTable:
    """Everything shown, and the token strips that the page draws when a rollout is opened."""

    steps: tuple[ShownStep, ...]
    strips: tuple[Mapping[str, Any], ...]
    has_tokens: bool  # False: no tokenizer was found, so tokens are shown as text only


def read_rollouts(run: RunDirectory, log: RunLog) -> RolloutTable:
    """Read the rollouts that the page shows."""
    chosen = _choose_steps(run, log)
    num_rollouts = max(1, sum(len(step.rollouts) for step in chosen))
    strips: list[Mapping[str, Any]] = []
    steps = []
    has_tokens = True
    for step in chosen:
        tokenizer = find_tokenizer(run, log, step.stage)
        has_tokens = has_tokens and tokenizer is not None
        formatter = _Formatter(tokenizer, strips, TEXT_BUDGET // num_rollouts, TOKEN_BUDGET // num_rollouts)
        steps.append(replace(step, groups=tuple(map(formatter.group, step.groups))))
    return RolloutTable(steps=tuple(steps), strips=tuple(strips), has_tokens=has_tokens)


def _choose_steps(run: RunDirectory, log: RunLog) -> list[ShownStep]:
    """Choose the first, the last and some steps between of each stage, and examples of each evaluation."""
    chosen: list[ShownStep] = []
    for stage in log.stages:
        if (evaluation := run.stage(stage.name).evaluation).exists():
            examples = _choose_examples(run, stage, read_eval(evaluation))
            chosen += [examples] if examples.groups else []
        chosen += [_choose(run, stage, step) for step in _spread(_closed_steps(run, stage.name), STEPS_PER_STAGE)]
    return chosen


def _choose(run: RunDirectory, stage: StageLog, step: int) -> ShownStep:
    """Choose rollouts of the first groups of one step. Groups whose rewards differ come before the others."""
    selected: list[dict[str, Any]] = read_json(run.stage(stage.name).selection(step)).get("groups", [])
    lines = read_lines(run.stage(stage.name).rollouts(step))
    played = {scored.trajectory.key: (scored, line) for line in lines for scored in [_SCORED.validate_python(line["rollout"])]}
    found = [(group, _members(group["rollouts"], played, step)) for group in selected]
    # Of an old step a few groups have rollouts.
    mixed_first = sorted(found, key=lambda each: (not each[1], len({entry.get("reward") for entry in each[0]["rollouts"]}) < 2))
    groups = []
    for group, rollouts in mixed_first[:GROUPS_PER_STEP]:
        wanted = sorted(_some_of_both(rollouts), key=lambda each: each.lineage)
        groups.append(ShownGroup(task=_TASK.validate_python(group["task"]), entries=group["rollouts"], rollouts=tuple(wanted)))
    return ShownStep(stage=stage, step=step, num_groups=len(selected), groups=tuple(groups))


def _choose_examples(run: RunDirectory, stage: StageLog, evaluation: EvalFiles) -> ShownStep:
    """Choose the first rollouts of each kind of an evaluation. No more are read than it takes to find them."""
    problems = dict(enumerate(evaluation.problems))  # by place: two tasks may have one id
    kinds: Mapping[str, int] = evaluation.result.get("kinds", {})
    missing = Counter({kind: min(EXAMPLES, number) for kind, number in kinds.items()})
    found: dict[int, list[ShownRollout]] = {}
    for entry in iter_lines(run.stage(stage.name).rollouts(0)):
        if not (missing.total() and problems):
            break
        scored = _SCORED.validate_python(entry["rollout"])
        key, problem = scored.trajectory.key, problems.get(scored.trajectory.key.task_index)
        if problem is None or problem["num_void"] or key.attempt >= len(problem["correct"]):
            continue  # `correct` has an item for each attempt only where none is void
        is_right = bool(problem["correct"][key.attempt])
        kind = kind_of(scored, is_right=is_right).value
        if missing[kind] > 0:
            missing[kind] -= 1
            judged = {"is_kept": is_right, "kind": kind}
            shown = ShownRollout(scored=scored, entry=judged, line=entry, lineage=(key,), step=0)
            found.setdefault(key.task_index, []).append(shown)
    groups = []
    for index, rollouts in sorted(found.items()):
        problem = problems[index]
        task = Task(id=str(problem["id"]), question=problem["question"], answer=problem["answer"], source="")
        groups.append(ShownGroup(task=task, entries=[each.entry for each in rollouts], rollouts=tuple(rollouts)))
    return ShownStep(stage=stage, step=0, num_groups=len(problems), groups=tuple(groups), kinds=kinds)


def _members(entries: Sequence[Mapping[str, Any]], played: _Played, step: int) -> list[ShownRollout]:
    """Return the rollouts of a group that are in the file of rollouts."""
    found = [(entry, *played[key]) for entry in entries if (key := _KEY.validate_python(entry["key"])) in played]
    return [
        ShownRollout(scored=scored, entry=entry, line=line, lineage=_lineage(scored, played), step=step)
        for entry, scored, line in found
    ]


def _lineage(scored: ScoredTrajectory, played: _Played) -> tuple[RolloutKey, ...]:
    """Return the keys from the root rollout to this one. Sorting by them puts branches below their parent."""
    lineage = [scored.trajectory.key]
    parent = scored.trajectory.parent
    while parent is not None:
        lineage.insert(0, parent)
        parent = played[parent][0].trajectory.parent if parent in played else None
    return tuple(lineage)


def _some_of_both(members: Sequence[ShownRollout]) -> list[ShownRollout]:
    """Return at most `ROLLOUTS_PER_GROUP`, kept and dropped ones."""
    kept = [each for each in members if each.is_kept]
    dropped = [each for each in members if not each.is_kept]
    num_dropped = min(len(dropped), max(ROLLOUTS_PER_GROUP // 2, ROLLOUTS_PER_GROUP - len(kept)))
    return kept[: ROLLOUTS_PER_GROUP - num_dropped] + dropped[:num_dropped]


def _closed_steps(run: RunDirectory, stage: str) -> list[int]:
    """Return the steps whose rollouts are all judged: those that have a selection file."""
    directory = run.stage(stage).selection(0).parent
    names = sorted(path.name for path in directory.glob("step-*.selection.json"))
    return [int(name.removeprefix("step-").removesuffix(".selection.json")) for name in names]


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """Return `count` of `steps` at equal distances, including the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


class _Formatter:
    """Turns ids and texts into passages within a budget per rollout, and collects their strips of tokens."""

    def __init__(self, tokenizer: Tokenizer | None, strips: list[Mapping[str, Any]], num_chars: int, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._strips = strips
        self._num_chars = num_chars
        self._num_tokens = num_tokens

    def group(self, group: ShownGroup) -> ShownGroup:
        """Return `group` with its prompt and the turns of its rollouts."""
        prompt = self._prompt(group.rollouts[0].trajectory.prompt_ids) if group.rollouts else None
        return replace(group, prompt=prompt, rollouts=tuple(map(self._rollout, group.rollouts)))

    def _rollout(self, rollout: ShownRollout) -> ShownRollout:
        turns = rollout.trajectory.turns
        return replace(rollout, turns=tuple(self._turn(turn, len(turns)) for turn in turns))

    def _turn(self, turn: Turn, num_turns: int) -> ShownTurn:
        """Show one of `num_turns` turns. Each has an equal share of its rollout's budget."""
        chars, tokens = self._num_chars // (2 * num_turns), self._num_tokens // (2 * num_turns)
        completion, observed = turn.completion, turn.observation_ids
        of_policy: dict[str, list[float] | list[int]] = {
            "p": [round(value, 3) for value in completion.logprobs],
            "h": [round(value, 3) for value in completion.entropies],
            "f": [int(forced) for forced in completion.is_forced],
        }
        spare = max(0, tokens - len(observed))  # the completion gets what a short observation leaves
        return ShownTurn(
            completion=self._passage(completion.ids, turn.completion_text, of_policy, chars, tokens + spare),
            calls=turn.calls,
            observation=self._passage(observed, turn.observation_text, {}, chars, tokens),
        )

    def _prompt(self, ids: Sequence[int]) -> Passage:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False) if self._tokenizer else ""
        return Passage(text=clipped(text, self._num_chars), num_tokens=len(ids), strip=-1)

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
        return Passage(text=clipped(text, chars), num_tokens=len(ids), strip=strip)


def _name(key: RolloutKey) -> str:
    return f"attempt {key.attempt}" + (f" · branch {key.branch}" if key.branch else "")


def _ends(length: int, limit: int) -> tuple[int, int]:
    """Return begin and end of a gap that leaves `limit` of `length`: two thirds before it, one third after it."""
    if length <= limit:
        return length, length
    head = 2 * limit // 3
    return head, length - (limit - head)


def clipped(text: str, limit: int) -> str:
    """Return `text` with its middle left out if it is longer than `limit`, or 200 characters."""
    head, tail = _ends(len(text), max(200, limit))
    if head == tail:
        return text
    return f"{text[:head]}\n… {tail - head:,} characters left out …\n{text[tail:]}"
