"""Conversations that are imitated: played by a demonstrator in the real environment or read from files, and their token ids.

They go through the model's chat template as rollouts do: the demonstrator's text is encoded once, the text of the environment
follows, and only the demonstrator's tokens are imitated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from pydantic import Field

from strop.errors import TaskError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, PosedKeys, Product, Stage, StageResult
from strop.rollout.chat_template import ChatFormat, Span
from strop.rollout.chat_template import Message as ChatMessage
from strop.rollout.demonstrate import demonstrate, in_form_of, retold, said_ids, stops_at_call
from strop.rollout.environment import ToolEnvironments
from strop.rollout.prompt import Prompt, load_prompt
from strop.rollout.tool_calls import CallFormat, make_call_format
from strop.stages.context import (
    TASK,
    TRAJECTORY,
    StageContext,
    conversation_maker,
    load_chat,
    open_tasks,
    product_of,
    tokenizer_digest,
)
from strop.stages.loop.engines import task_files
from strop.tasks.conversations import Conversation, Message, as_row, conversation_of, read_conversations
from strop.tasks.demonstrators import DemonstratorConfig, RecordedDemonstrator
from strop.tasks.files import writing_rows
from strop.tasks.readers import Unreadable
from strop.tools.protocol import Tool
from strop.training.sft import Demonstration, Segment
from strop.types import RolloutKey, Task, Trajectory

_AT_ONCE = 32
_HELD_AT_ONCE = 1024  # played ones, until they are handed on


class Conversations(Stage):
    """Conversations that others wrote down, of several turns with calls and results, for stages that imitate or mix them."""

    makes = Product.CONVERSATIONS
    root_keys = frozenset({"tools"})

    class Config(Stage.Config):
        """Keys of `kind = "conversations"`."""

        prompt: str = Field(default="rstar2", description="The prompt in whose form tool calls are rewritten.")
        path: str = Field(description="File of rows with `messages` (.jsonl, .json, .parquet), as `strop data convert` writes.")
        limit: int | None = Field(default=None, ge=1, description="Number of conversations, from the first. Default: all.")

    config: Config

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        num = "all" if self.config.limit is None else f"the first {self.config.limit}"
        return Estimate(arithmetic=f"{num} conversations of {self.config.path}")

    async def run(self, context: StageContext) -> StageResult:
        """Read, and write what can be imitated. Raises `TaskError` if nothing can, or a row is no conversation."""
        config, directory = self.config, context.directory
        context.started(1, 0)
        prompt = load_prompt(config.prompt)
        calls = make_call_format(prompt.calls, [tool.spec for tool in context.tools])
        num_kept = num_dropped = 0
        first = ""
        problems = set[str]()
        with writing_rows(directory.kept) as keep, writing_rows(directory.dropped) as drop:
            for conversation in read_conversations(Path(config.path).expanduser()):
                try:
                    turns = turns_of(conversation, calls)
                except Unreadable as error:
                    num_dropped += 1
                    first = first or f"{conversation.id}: {error}".rstrip(".")
                    drop(as_row(conversation) | {"reason": str(error)})
                    continue
                num_kept += 1
                problems.update(thought_tag_problem(config.prompt, prompt, said) for said, _ in turns)
                keep(as_row(conversation) | {"prompt": config.prompt})
                if num_kept == config.limit:
                    break
        if not num_kept:
            why = f"none of the {num_dropped} conversations can be imitated. {first}" if num_dropped else "it has no rows"
            raise TaskError(
                f"stages.{context.name}.path: {config.path}: {why}. Name another file, or give the stage a prompt whose calls"
                " are those of its rows."
            )
        for problem in sorted(problems - {""}):
            context.warn(problem)
        dropped = f", {num_dropped} dropped; the first is {first}" if num_dropped else ""
        return StageResult(summary=f"{num_kept} conversations of {config.path}{dropped}", product=directory.kept)


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
        config, path = self.config, context.directory.kept
        chat = load_chat(product_of(context.run, config.init))
        context.started(1, 0)
        num = await write_demonstrations(context, config, config.demonstrator, chat, path, num=config.num_demonstrations)
        return StageResult(summary=f"{num} demonstrations", product=path)


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
            first = next(demonstrator.script(task, tool=tool, seed=seed))
        except TaskError as error:
            return error
        is_recorded = isinstance(demonstrator, RecordedDemonstrator)  # whose tags are those of its rows
        if is_recorded:
            problems.add(thought_tag_problem(stage.prompt, prompt, first))
        async with gate:
            key = RolloutKey(task_index=index, attempt=0)
            try:
                played = await demonstrate(
                    task,
                    key,
                    demonstrator.script(task, tool=tool, seed=seed),
                    environments=environments,
                    chat=chat,
                    calls=environments.format,
                    max_tokens=stage.sampling.max_tokens,
                    seed=seed,
                    prefill=prompt.prefill,
                    form=str if is_recorded else partial(in_form_of, prompt),
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


def as_demonstrations(rows: Iterable[Mapping[str, Any]], chat: ChatFormat, tools: Sequence[Tool]) -> Iterator[Demonstration]:
    """Yield each row with the provenance of its tokens.

    Ids are valid only for their own tokenizer. A student with another one gets the same text under its own template, each
    text encoded once.
    """
    own, specs = tokenizer_digest(chat), [tool.spec for tool in tools]
    for row in rows:
        if "trajectory" not in row:
            prompt = load_prompt(str(row["prompt"]))
            yield as_written_demonstration(row, chat, make_call_format(prompt.calls, specs), prefill=prompt.prefill)
            continue
        trajectory = TRAJECTORY.validate_python(row["trajectory"])
        if row["tokenizer"] == own:
            yield as_demonstration(trajectory)
        else:
            yield encoded_again(TASK.validate_python(row["task"]), trajectory, str(row["prompt"]), chat, tools)


def encoded_again(
    task: Task, trajectory: Trajectory, prompt_name: str, chat: ChatFormat, tools: Sequence[Tool]
) -> Demonstration:
    """Return a rollout in the ids of another tokenizer."""
    prompt, specs = load_prompt(prompt_name), [tool.spec for tool in tools]
    calls = make_call_format(prompt.calls, specs)
    segments = [Segment(ids=prompt.ids(chat, task.question, specs), is_demonstrator=False)]
    for number, turn in enumerate(trajectory.turns):
        said = chat.completion_ids(turn.completion_text)
        is_answered = trajectory.is_answered(number)
        goes_on = is_answered and calls.continues_turn
        said = said[:-1] if goes_on else said
        segments.append(Segment(ids=said, is_demonstrator=True))
        if is_answered:
            observed = chat.observation_ids(
                [call.text for call in turn.calls],
                completion_ended=not goes_on,
                wrapper=calls.wrapper,
                continues_turn=calls.continues_turn,
                prefill=prompt.prefill,
            )
            segments.append(Segment(ids=observed, is_demonstrator=False))
    return Demonstration(segments=tuple(segment for segment in segments if segment.ids))


def as_written_demonstration(
    row: Mapping[str, Any], chat: ChatFormat, calls: CallFormat, *, prefill: str = ""
) -> Demonstration:
    """Return a row of a `conversations` stage in the ids of a model. Raises `TaskError` if the model's calls cannot say it.

    Args:
        prefill: where a turn begins with it, as in rollouts, it is not imitated.
    """
    try:
        conversation = conversation_of(row, id=str(row.get("id")), source=str(row.get("source")))
        turns = turns_of(conversation, calls)
    except Unreadable as error:
        raise TaskError(f"conversation {row.get('id')!r}: {error}. Rerun the stage that read it (--from).") from error
    before = takewhile(lambda each: each.role != "assistant", conversation.messages)
    opening = [ChatMessage(role=each.role, spans=(Span(text=each.content, is_ours=each.role == "system"),)) for each in before]
    begun = [prefill if said.startswith(prefill) else "" for said, _ in turns]
    segments = [Segment(ids=chat.prompt_ids(opening, begun[0]), is_demonstrator=False)]
    for number, (said, following) in enumerate(turns):
        goes_on = stops_at_call(said, calls)
        rest = said.removeprefix(begun[number])
        segments.append(Segment(ids=said_ids(rest, chat, calls), is_demonstrator=True))
        if following:
            is_user = following[0].role == "user"
            answered = chat.observation_ids(
                [each.content for each in following],
                completion_ended=not goes_on,
                wrapper=("", "") if is_user else calls.wrapper,
                continues_turn=goes_on,
                prefill="" if goes_on or number + 1 == len(turns) else begun[number + 1],
            )
            segments.append(Segment(ids=answered, is_demonstrator=False))
    return Demonstration(segments=tuple(segment for segment in segments if segment.ids))


def turns_of(conversation: Conversation, calls: CallFormat) -> list[tuple[str, Sequence[Message]]]:
    """Return what the demonstrator says turn by turn, with calls in the form of `calls`, and the messages after each turn.

    Raises:
        Unreadable: a call cannot be read or written, a result answers no call, or a user interrupts.
    """
    messages = conversation.messages
    places = [index for index, each in enumerate(messages) if each.role == "assistant"]
    turns: list[tuple[str, Sequence[Message]]] = []
    for place, after in zip(places, [*places[1:], len(messages)], strict=True):
        said, num_calls = retold(messages[place].content, calls)
        following = messages[place + 1 : after]
        roles = {each.role for each in following}
        if len(roles) > 1:
            raise Unreadable("a user speaks between a tool's answer and what is said to it")
        if "tool" in roles and not num_calls:
            raise Unreadable(f"a tool answers, but nothing was called in {messages[place].content[:80]!r}")
        if "user" in roles and num_calls and calls.continues_turn:
            raise Unreadable("a user answers a call, which stops in the middle of a turn")
        turns.append((said, following))
    return turns
