"""Conversations as demonstrations: the stage that reads them from files, and token ids of read and of played ones.

They go through the model's chat template as rollouts do: the demonstrator's text is encoded once, the text of the environment
follows, and only the demonstrator's tokens are imitated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import Field

from strop.errors import TaskError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, Product, Stage, StageResult
from strop.rollout.chat_template import ChatFormat, Span
from strop.rollout.chat_template import Message as ChatMessage
from strop.rollout.demonstrate import retold, said_ids, stops_at_call
from strop.rollout.prompt import load_prompt
from strop.rollout.tool_calls import CallFormat, make_call_format
from strop.stages.context import TASK, TRAJECTORY, StageContext, dropped_path, kept_path, tokenizer_digest
from strop.stages.demonstrations import as_demonstration, thought_tag_problem
from strop.tasks.conversations import Conversation, Message, as_row, conversation_of, read_conversations
from strop.tasks.files import writing_rows
from strop.tasks.readers import Unreadable
from strop.tools.protocol import Tool
from strop.training.sft import Demonstration, Segment
from strop.types import Task, Trajectory


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
        with writing_rows(kept_path(directory)) as keep, writing_rows(dropped_path(directory)) as drop:
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
        return StageResult(summary=f"{num_kept} conversations of {config.path}{dropped}", product=kept_path(directory))


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
