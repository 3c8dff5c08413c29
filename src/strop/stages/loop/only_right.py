"""Judges demonstrations by a stage's reward, so that only those that are right are imitated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from strop.errors import MachineError, TaskError
from strop.evaluation.metrics import Verdict, verdict_of
from strop.recipe.stage import PlayedKeys
from strop.rewards import judge_group, make_reward
from strop.rollout.player import Excluded, Judge, all_of
from strop.rollout.prompt import load_prompt
from strop.run_directory import StageDirectory, shortened
from strop.stages.context import StageContext
from strop.stages.data import TASK, TRAJECTORY, Row, rows_in
from strop.tasks.files import writing_rows
from strop.tasks.rows import RowSource, iterate_rows
from strop.types import Group, Task, Trajectory

ItemT = TypeVar("ItemT")
_AT_ONCE = 32


def why_not_right(is_right: bool | None) -> str:
    """Return why an attempt with this verdict is not kept; empty if it is right."""
    if is_right is None:
        return "no verdict: no part of the reward says whether it is right"
    return "" if is_right else "wrong: its answer is not right"


def attempts_in(rows: Iterable[Row]) -> Iterator[tuple[Task, Trajectory]]:
    """Yield rows of conversations as what can be judged. Raises `TaskError` for a row without a task."""
    for row in rows:
        if "task" not in row:
            raise TaskError(
                f"only_right is true, but conversation {row.get('id')!r} has no true answer to judge it by. Leave only_right"
                " out, or name stages of demonstrations or rejection_sampling in data."
            )
        yield TASK.validate_python(row["task"]), TRAJECTORY.validate_python(row["trajectory"])


def with_truths(
    stage: PlayedKeys, truths: RowSource, attempts: Iterable[tuple[Task, Trajectory]]
) -> Iterator[tuple[Task, Trajectory]]:
    """Yield attempts, each at its task with the answer that `truths` has for its question. Raises `TaskError` without one."""
    bare = load_prompt(stage.prompt).bare
    answers = {bare(truth.question).strip(): truth.answer for truth in iterate_rows(truths, split="train")}
    for task, attempt in attempts:
        question = bare(task.question).strip()
        if question not in answers:
            raise TaskError(
                f"truths: {truths.source('train')} has no row with the question of task {task.id!r} of {task.source},"
                f" {shortened(repr(question))}. Add the row, or remove the task."
            )
        yield replace(task, answer=answers[question]), attempt


async def judge_demonstrations(context: StageContext, stage: PlayedKeys, attempts: Iterable[tuple[Task, Trajectory]]) -> str:
    """Judge `attempts` by the stage's reward, unless an earlier try did, write the verdicts, and return them in words.

    An attempt that cannot be judged because the machine fails is void: it is not kept, and a warning says so.

    Raises:
        TaskError: no attempt is right, or a task has no answer to judge by.
        MachineError: all are void.
    """
    path = _verdicts_path(context.directory)
    if not path.exists():
        await _write_verdicts(context, stage, attempts, path)
    dropped = Counter(str(row["reason"]).partition(":")[0] for row in rows_in(path))
    num, first = dropped.total(), next(rows_in(path), {})
    num_kept = dropped.pop("", 0)
    context.event("demonstrations_judged", num_kept=num_kept, num_dropped=num - num_kept, dropped=dict(dropped))
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) or "none"
    if num and not num_kept:
        raise TaskError(
            f"stages.{context.name}: none of {num} demonstrations is right ({reasons}). The first is of task {first['id']!r},"
            f" whose true answer is {first['answer']!r}. All verdicts are in {path}. Check that the reward reads answers in the"
            f" form of the demonstrations, or leave only_right out; then rerun the stage with --from {context.name}."
        )
    return f"{num_kept} of {num} demonstrations, those that are right (dropped: {reasons})"


def only_kept(directory: StageDirectory, items: Iterable[ItemT]) -> Iterator[ItemT]:
    """Yield those of `items`, one for each demonstration that was judged, whose demonstrations are kept."""
    verdicts = rows_in(_verdicts_path(directory))
    yield from (item for item, row in zip(items, verdicts, strict=True) if row["is_kept"])


def _verdicts_path(directory: StageDirectory) -> Path:
    """Whether each demonstration is kept, and if not, why. They are in order."""
    return directory.path / "data" / "verdicts.jsonl"


async def _write_verdicts(
    context: StageContext, stage: PlayedKeys, attempts: Iterable[tuple[Task, Trajectory]], path: Path
) -> None:
    reward = make_reward(stage.reward, context.runner)
    judge, verdict = Judge(reward=reward, weights=stage.reward.weights), verdict_of(stage.reward)
    needs_answer = stage.reward.compares_answers
    num, void = 0, list[str]()
    try:
        with writing_rows(path) as add:
            waiting = iter(attempts)
            while several := list(islice(waiting, _AT_ONCE)):
                if needs_answer and (without := [task.id for task, _ in several if not task.answer.strip()]):
                    raise TaskError(f"stages.{context.name}: only_right is true, but task {without[0]!r} has no true answer.")
                for row in await all_of([_judged(judge, verdict, task, each) for task, each in several]):
                    add(row)
                    num += 1
                    void += [row["reason"]] if row["reason"].startswith("void") else []
            if void and len(void) == num:
                raise MachineError(f"stages.{context.name}: no demonstration of {num} could be judged; the first is {void[0]}")
    finally:
        await reward.close()
    if void:
        context.warn(f"{len(void)} of {num} demonstrations could not be judged and are dropped; the first is {void[0]}")


async def _judged(judge: Judge, verdict: Verdict, task: Task, attempt: Trajectory) -> Row:
    row = {"id": task.id, "source": task.source, "answer": task.answer}
    try:
        scored = await judge.score(task, attempt)
    except MachineError as error:
        return {**row, "is_kept": False, "reason": f"void: {error}", "reward_parts": {}}
    group = judge_group(judge.reward, Group(task=task, task_index=attempt.key.task_index, trajectories=(scored,)))
    if not group.trajectories:
        why = scored.reward_parts.why if isinstance(scored.reward_parts, Excluded) else "no judge could judge it"
        return {**row, "is_kept": False, "reason": f"void: {why}", "reward_parts": {}}
    [judged] = group.trajectories
    reason = why_not_right(verdict(judged))
    return {**row, "is_kept": not reason, "reason": reason, "reward_parts": dict(judged.reward_parts)}
