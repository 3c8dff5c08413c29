"""Which rollouts of a run its report shows: a few groups of a few steps of each stage, and whatever is rare in these steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from strop.reports.log import RunLog, StageLog
from strop.runs import RunDirectory, read_json, read_lines
from strop.types import RolloutKey, ScoredTrajectory, StopReason, ToolOutcome

STEPS_PER_STAGE = 4
GROUPS_PER_STEP = 2
ROLLOUTS_PER_GROUP = 8

Kind: TypeAlias = StopReason | ToolOutcome
"""How a rollout ended, or what became of a call of it."""
_Played: TypeAlias = Mapping[RolloutKey, tuple[ScoredTrajectory, Mapping[str, Any]]]

_SCORED = TypeAdapter(ScoredTrajectory)
_KEY = TypeAdapter(RolloutKey)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRollout:
    """A rollout with what was decided of it."""

    scored: ScoredTrajectory
    entry: Mapping[str, Any]  # of the step's selection
    line: Mapping[str, Any]  # of the step's rollouts
    lineage: tuple[RolloutKey, ...]  # from the one that began at the prompt to itself

    @property
    def key(self) -> RolloutKey:
        return self.scored.trajectory.key

    @property
    def kinds(self) -> frozenset[Kind]:
        trajectory = self.scored.trajectory
        return frozenset({trajectory.stop_reason, *(call.outcome for call in trajectory.calls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenGroup:
    """Those rollouts of a group that are shown, branches below their parent."""

    selected: Mapping[str, Any]  # the group in the step's selection: its task, and an entry of each rollout
    rollouts: tuple[ChosenRollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStep:
    """Those groups of a step that are shown, and how many there were."""

    stage: StageLog
    step: int
    num_groups: int
    groups: tuple[ChosenGroup, ...]

    @property
    def rollouts(self) -> list[ChosenRollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]


def choose_rollouts(run: RunDirectory, log: RunLog) -> list[ChosenStep]:
    """Of each stage first, last and steps between; of each step groups whose rewards differ before those that tie.

    Beside these, one rollout of each stop reason and of each outcome of a call that no rollout before it on the page has.
    """
    chosen: list[ChosenStep] = []
    shown: set[Kind] = set()
    for stage in log.stages:
        for step in _spread(_closed_steps(run, stage.name), STEPS_PER_STAGE):
            chosen.append(_choose(run, stage, step, shown))
            shown.update(*(rollout.kinds for rollout in chosen[-1].rollouts))
    return chosen


def _choose(run: RunDirectory, stage: StageLog, step: int, shown: Collection[Kind]) -> ChosenStep:
    """Of one step; `shown` kinds need no rollout of their own."""
    selected: list[dict[str, Any]] = read_json(run.stage(stage.name).selection(step)).get("groups", [])
    lines = read_lines(run.stage(stage.name).rollouts(step))
    played = {scored.trajectory.key: (scored, line) for line in lines for scored in [_SCORED.validate_python(line["rollout"])]}
    mixed_first = sorted(selected, key=lambda group: len({entry.get("reward") for entry in group["rollouts"]}) < 2)
    members = [_members(group, played) for group in mixed_first]
    usual = [rollout for each in members[:GROUPS_PER_STEP] for rollout in _some_of_both(each)]
    keys = {rollout.key for rollout in usual}
    seen = frozenset(shown).union(*(rollout.kinds for rollout in usual))
    for rollout in chain.from_iterable(members):
        if not rollout.kinds <= seen:
            keys.add(rollout.key)
            seen |= rollout.kinds
    groups = [
        ChosenGroup(
            selected=group,
            rollouts=tuple(sorted((each for each in rollouts if each.key in keys), key=lambda each: each.lineage)),
        )
        for group, rollouts in zip(mixed_first, members, strict=True)
    ]
    return ChosenStep(
        stage=stage,
        step=step,
        num_groups=len(selected),
        groups=tuple(group for place, group in enumerate(groups) if place < GROUPS_PER_STEP or group.rollouts),
    )


def _members(group: Mapping[str, Any], played: _Played) -> list[ChosenRollout]:
    """The rollouts of a group that were written down."""
    found = [(entry, *played[key]) for entry in group["rollouts"] if (key := _KEY.validate_python(entry["key"])) in played]
    return [
        ChosenRollout(scored=scored, entry=entry, line=line, lineage=_lineage(scored, played)) for entry, scored, line in found
    ]


def _lineage(scored: ScoredTrajectory, played: _Played) -> tuple[RolloutKey, ...]:
    """What a rollout branched off, from the prompt to itself: sorted by it, branches stand below their parent."""
    lineage = [scored.trajectory.key]
    parent = scored.trajectory.parent
    while parent is not None:
        lineage.insert(0, parent)
        parent = played[parent][0].trajectory.parent if parent in played else None
    return tuple(lineage)


def _some_of_both(members: Sequence[ChosenRollout]) -> list[ChosenRollout]:
    """At most `ROLLOUTS_PER_GROUP`, with dropped ones among them: why they were dropped is half of the story."""
    kept = [each for each in members if each.entry["is_kept"]]
    dropped = [each for each in members if not each.entry["is_kept"]]
    num_dropped = min(len(dropped), max(ROLLOUTS_PER_GROUP // 2, ROLLOUTS_PER_GROUP - len(kept)))
    return kept[: ROLLOUTS_PER_GROUP - num_dropped] + dropped[:num_dropped]


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
