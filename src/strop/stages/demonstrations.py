"""Conversations that a demonstrator plays in the real environment, their order in training, and which of them are right.

With `only_right` a stage's reward judges demonstrations, so that only those that are right are imitated.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from strop.errors import MachineError, TaskError
from strop.evaluation.metrics import Verdict, verdict_of
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, PlayedKeys, PosedKeys, Product, Stage, StageResult
from strop.rewards import judge_group, make_reward
from strop.rollout.chat_template import ChatFormat
from strop.rollout.demonstrate import demonstrate, in_form_of
from strop.rollout.environment import ToolEnvironments, all_of
from strop.rollout.player import Excluded, Judge
from strop.rollout.prompt import Prompt, load_prompt
from strop.run_directory import StageDirectory, iter_lines, shortened
from strop.stages.context import (
    TASK,
    TRAJECTORY,
    Row,
    StageContext,
    conversation_maker,
    kept_path,
    load_chat,
    open_tasks,
    product_of,
)
from strop.stages.loop.engines import task_files
from strop.tasks.demonstrators import DemonstratorConfig, RecordedDemonstrator
from strop.tasks.files import IndexedRows, writing_rows
from strop.tasks.readers import Unreadable
from strop.tasks.rows import RowSource, iterate_rows
from strop.training.sft import Demonstration, Segment
from strop.types import Group, RolloutKey, Task, Trajectory, derive_seed

ItemT = TypeVar("ItemT")
_AT_ONCE = 32
_HELD_AT_ONCE = 1024  # played ones, until they are handed on


async def play_demonstrations(
    context: StageContext, stage: PosedKeys, demonstrator: DemonstratorConfig, chat: ChatFormat, *, num: int
) -> AsyncIterator[tuple[Task, Trajectory]]:
    """Yield demonstrations of the first `num` training tasks, played with the real tools, in the order of the tasks.

    Tasks that the demonstrator cannot do are left out, with a warning. No more than `_HELD_AT_ONCE` are in memory.

    Raises:
        TaskError: it can do none of them.
    """
    tasks = open_tasks(context.recipe, context.name, stage.tasks, seed=context.seed("tasks"), split="train")
    tool = next((each.spec.name for each in context.tools), "")
    prompt = load_prompt(stage.prompt)
    environments = ToolEnvironments(chat, prompt, context.tools, stage.limits)
    gate = asyncio.Semaphore(_AT_ONCE)
    problems = set[str]()

    async def play(index: int) -> tuple[Task, Trajectory] | TaskError:
        task = tasks.task(index)
        seed = context.seed("demonstration", index)
        try:
            replies = demonstrator.script(task, tool=tool, seed=seed)
        except TaskError as error:
            return error
        if isinstance(demonstrator, RecordedDemonstrator):  # its tags are those of its rows
            problems.update(thought_tag_problem(stage.prompt, prompt, reply("")) for reply in replies)
        else:
            replies = [in_form_of(prompt, reply) for reply in replies]
        async with gate:
            key = RolloutKey(task_index=index, attempt=0)
            try:
                played = await demonstrate(
                    task,
                    key,
                    replies,
                    environments=environments,
                    chat=chat,
                    calls=environments.format,
                    max_tokens=stage.sampling.max_tokens,
                    seed=seed,
                    prefill=prompt.prefill,
                )
            except Unreadable as error:
                return TaskError(f"task {task.id!r}: {error}.")
            return task, played

    limit = num if tasks.num_tasks is None else min(num, tasks.num_tasks)
    num_done, first_fault = 0, ""
    for start in range(0, limit, _HELD_AT_ONCE):
        for each in await asyncio.gather(*(play(index) for index in range(start, min(limit, start + _HELD_AT_ONCE)))):
            if isinstance(each, tuple):
                num_done += 1
                yield each
            else:
                first_fault = first_fault or str(each)
    if not num_done:
        raise TaskError(f"stages.{context.name}.demonstrator: it can do none of {limit} tasks; of the first, {first_fault}")
    if num_done < num:
        why = "there are no more tasks" if num_done == limit else "the others could not be written"
        context.warn(f"{num_done} demonstrations, not {num}: {why}")
    for problem in sorted(problems - {""}):
        context.warn(problem)


def thought_tag_problem(name: str, prompt: Prompt, said: str) -> str:
    """Return what is wrong if `said` has thoughts in another tag than the prompt of that name asks for, else nothing."""
    asked = prompt.raw + "".join(message.content for message in prompt.messages)
    other = next((tag for tag in ("reason", "think") if tag != prompt.think_tag and f"</{tag}>" in said), "")
    if not other or f"<{prompt.think_tag}>" not in asked:
        return ""
    return (
        f"demonstrations have thoughts in <{other}>, but prompt {name!r} asks for <{prompt.think_tag}>: a reward that"
        f" reads this form will find none. Rename the tags in the file, or set a prompt that asks for <{other}>."
    )


async def write_demonstrations(
    context: StageContext, stage: PosedKeys, demonstrator: DemonstratorConfig, chat: ChatFormat, path: Path, *, num: int
) -> int:
    """Play demonstrations and write them into `path` as conversations. Returns their number."""
    make_row, num_written = conversation_maker(context, stage.prompt, chat), 0
    with writing_rows(path) as add:
        async for task, played in play_demonstrations(context, stage, demonstrator, chat, num=num):
            add(make_row(task, played))
            num_written += 1
    return num_written


def as_demonstration(trajectory: Trajectory) -> Demonstration:
    """Return a trajectory with the provenance of its tokens: what the demonstrator said is imitated, all else is context.

    The demonstrator may be the policy itself; tokens that were forced on it are not imitated.
    """
    segments = [Segment(ids=trajectory.prompt_ids, is_demonstrator=False)]
    for turn in trajectory.turns:
        said = zip(turn.completion.ids, turn.completion.is_forced, strict=True)
        for is_forced, tokens in groupby(said, key=lambda token: token[1]):
            segments.append(Segment(ids=tuple(token for token, _ in tokens), is_demonstrator=not is_forced))
        segments.append(Segment(ids=turn.observation_ids, is_demonstrator=False))
    return Demonstration(segments=tuple(segment for segment in segments if segment.ids))


def batch_at(rows: IndexedRows[ItemT], step: int, *, batch_size: int, seed: int, with_rest: bool = False) -> list[ItemT]:
    """Return the batch of a step, a pure function of its arguments: each epoch in another order.

    The remainder of an epoch is left out, or with `with_rest` its last batch. Rows of all lengths are mixed: batches sorted by
    length would weigh a token of a short batch more than one of a long batch.
    """
    batches_per_epoch = -(-len(rows) // batch_size) if with_rest else len(rows) // batch_size
    epoch, position = divmod(step, batches_per_epoch)
    order = shuffled(len(rows), derive_seed(seed, "epoch", epoch))
    return [rows[index] for index in order[position * batch_size : (position + 1) * batch_size]]


@lru_cache(maxsize=1)  # the current epoch: to shuffle 200 000 numbers at each step takes longer than a small step
def shuffled(num: int, seed: int) -> array[int]:
    """Return the numbers below `num` in the order that `seed` decides."""
    order = array("Q", range(num))
    random.Random(seed).shuffle(order)
    return order


_JUDGED_AT_ONCE = 32


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
    dropped = Counter(str(row["reason"]).partition(":")[0] for row in iter_lines(path))
    num, first = dropped.total(), next(iter_lines(path), {})
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
    verdicts = iter_lines(_verdicts_path(directory))
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
            while several := list(islice(waiting, _JUDGED_AT_ONCE)):
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
    parts: dict[str, float] = {}
    try:
        scored = await judge.score(task, attempt)
        group = judge_group(judge.reward, Group(task=task, task_index=attempt.key.task_index, trajectories=(scored,)))
        if group.trajectories:
            reason, parts = why_not_right(verdict(group.trajectories[0])), dict(group.trajectories[0].reward_parts)
        else:
            why = scored.reward_parts.why if isinstance(scored.reward_parts, Excluded) else "no judge could judge it"
            reason = f"void: {why}"
    except MachineError as error:
        reason = f"void: {error}"
    row = {"id": task.id, "source": task.source, "answer": task.answer}
    return {**row, "is_kept": not reason, "reason": reason, "reward_parts": parts}


class DemonstrationsStage(Stage):
    """Conversations that a demonstrator plays in the real environment, for stages that mix them with others."""

    makes = Product.CONVERSATIONS
    root_keys = frozenset({"sandbox", "tools"})

    class Config(PosedKeys):
        """Keys of `kind = "demonstrations"`."""

        init: str = Field(description="Stage whose tokenizer the conversations are written in.")
        demonstrator: DemonstratorConfig = Field(description="What writes the demonstrations.")
        num_demonstrations: int = Field(ge=1, description="Number of demonstrations: one for each of the first tasks.")

    config: Config

    def files(self) -> Mapping[str, Path]:
        return task_files("tasks", self.config.tasks, ["train"])

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        return Estimate(arithmetic=f"{self.config.num_demonstrations} demonstrations")

    async def run(self, context: StageContext) -> StageResult:
        """Play and write the conversations."""
        config, path = self.config, kept_path(context.directory)
        chat = load_chat(product_of(context.run, config.init))
        context.started(1, 0)
        num = await write_demonstrations(context, config, config.demonstrator, chat, path, num=config.num_demonstrations)
        return StageResult(summary=f"{num} demonstrations", product=path)
