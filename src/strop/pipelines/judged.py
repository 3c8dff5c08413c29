"""Keeps the demonstrations of a stage that its reward calls right, and writes down of every other why it is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from strop.errors import MachineError, TaskError
from strop.evaluation.verdict import Verdict, verdict_of
from strop.pipelines.row_files import RowFile
from strop.pipelines.stage import StageContext
from strop.pipelines.stage_config import Stage
from strop.pipelines.stage_data import TASK, TRAJECTORY, Row, RowsWriter
from strop.pipelines.true_answers import compares_answers
from strop.rewards import judge_group, make_reward
from strop.rollout.play import Judge
from strop.rollout.protocol import Excluded
from strop.rollout.table import all_of
from strop.runs import StageDirectory
from strop.types import Group, Task, Trajectory

ItemT = TypeVar("ItemT")

_AT_ONCE = 32
_MAX_TRIES = 3  # of one judgement, when the fault is ours: as of a rollout's


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many demonstrations are kept, and how many are dropped for each reason."""

    num_kept: int
    dropped: Mapping[str, int]

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    def __str__(self) -> str:
        of = f"{self.num_kept} of {self.num_kept + self.num_dropped} demonstrations, those that are right"
        return f"{of} (dropped: {self.reasons or 'none'})"

    @property
    def reasons(self) -> str:
        return ", ".join(f"{num} {reason}" for reason, num in self.dropped.items())


def why_not_right(is_right: bool | None) -> str:
    """What is said of an attempt with this verdict; empty of one that is right."""
    if is_right is None:
        return "no verdict: no part of the reward says whether it is right"
    return "" if is_right else "wrong: its answer is not right"


def verdicts_path(directory: StageDirectory) -> Path:
    """Of each demonstration, in their order, whether it is kept, and if not, why."""
    return directory.path / "data" / "verdicts.jsonl"


def attempts_in(rows: Iterable[Row]) -> Iterator[tuple[Task, Trajectory]]:
    """Rows of conversations as what can be judged.

    Raises:
        TaskError: a row was written down by others, without a task.
    """
    for row in rows:
        if "task" not in row:
            raise TaskError(
                f"only_right is true, but conversation {row.get('id')!r} has no true answer to judge it by: somebody wrote it"
                " down. Leave only_right out, or name stages of demonstrations or rejection_sampling in data."
            )
        yield TASK.validate_python(row["task"]), TRAJECTORY.validate_python(row["trajectory"])


async def judge_demonstrations(context: StageContext, stage: Stage, attempts: Iterable[tuple[Task, Trajectory]]) -> Tally:
    """Judge them by the stage's reward, unless an earlier try did, and write the verdicts down.

    One that no one can judge by a fault of ours is void: it is not kept, and a warning says so (law 3).

    Raises:
        TaskError: none is right, or a task has no answer to judge by.
        MachineError: all are void.
    """
    path = verdicts_path(context.directory)
    if not path.exists():
        await _write(context, stage, attempts, path)
    tally = _tally(path)
    facts = {"num_kept": tally.num_kept, "num_dropped": tally.num_dropped, "dropped": dict(tally.dropped)}
    context.event("demonstrations_judged", **facts)
    if tally.num_dropped and not tally.num_kept:
        with RowFile(path) as rows:
            first = rows[0]
        raise TaskError(
            f"stages.{context.name}: none of {tally.num_dropped} demonstrations is right ({tally.reasons}). The first is of"
            f" task {first['id']!r}, whose true answer is {first['answer']!r}. All verdicts are in {path}. Check that the tasks"
            " hold true answers and that the reward reads answers in the form of the demonstrations, or leave only_right out;"
            f" then make the stage anew with --from {context.name}."
        )
    return tally


def only_kept(directory: StageDirectory, items: Iterable[ItemT]) -> Iterator[ItemT]:
    """Of `items`, one for each demonstration that was judged, those of demonstrations that are kept."""
    with RowFile(verdicts_path(directory)) as rows:
        yield from (item for item, row in zip(items, rows, strict=True) if row["is_kept"])


async def _write(context: StageContext, stage: Stage, attempts: Iterable[tuple[Task, Trajectory]], path: Path) -> None:
    reward = make_reward(stage.reward, context.runner)
    judge, verdict = Judge(reward=reward, weights=stage.reward.weights), verdict_of(stage.reward)
    needs_answer = compares_answers(stage.reward)
    num, void = 0, list[str]()
    try:
        with RowsWriter(path) as file:
            waiting = iter(attempts)
            while several := list(islice(waiting, _AT_ONCE)):
                for task, _ in several:
                    if needs_answer and not task.answer.strip():
                        raise TaskError(
                            f"stages.{context.name}: only_right is true, but task {task.id!r} has no true answer to judge its"
                            " demonstration by. Give it one, or leave only_right out."
                        )
                for row in await all_of([_judged(judge, verdict, task, each) for task, each in several]):
                    file.add(row)
                    num += 1
                    void += [row["reason"]] if row["reason"].startswith("void") else []
            if void and len(void) == num:
                raise MachineError(
                    f"stages.{context.name}: nobody could judge any of {num} demonstrations; the first is {void[0]}"
                )
    finally:
        await reward.close()
    if void:
        context.warn(f"{len(void)} of {num} demonstrations could not be judged and are dropped; the first is {void[0]}")


async def _judged(judge: Judge, verdict: Verdict, task: Task, attempt: Trajectory) -> dict[str, Any]:
    parts: Mapping[str, float] = {}
    reason = ""
    for _ in range(_MAX_TRIES):
        try:
            scored = await judge.score(task, attempt)
        except MachineError as error:
            reason = f"void: {error}"
            continue
        alone = judge_group(judge.reward, Group(task=task, task_index=attempt.key.task_index, trajectories=(scored,)))
        if not alone.trajectories:
            why = scored.reward_parts.why if isinstance(scored.reward_parts, Excluded) else "no judge could judge it"
            reason = f"void: {why}"
        else:
            parts, reason = alone.trajectories[0].reward_parts, why_not_right(verdict(alone.trajectories[0]))
        break
    told = {"id": task.id, "source": task.source, "answer": task.answer}
    return {**told, "is_kept": not reason, "reason": reason, "reward_parts": dict(parts)}


def _tally(path: Path) -> Tally:
    with RowFile(path) as rows:
        reasons = Counter(str(row["reason"]).partition(":")[0] for row in rows)
    num_kept = reasons.pop("", 0)
    return Tally(num_kept=num_kept, dropped=dict(reasons.most_common()))
