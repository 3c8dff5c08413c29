"""Conversations that somebody wrote down, of several turns with calls and results, as demonstrations.

They go through the model's own chat template as rollouts do: what a demonstrator says is encoded once, behind it stands what an
environment would have put there, and only the demonstrator's tokens are imitated (law 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from strop.errors import TaskError
from strop.pipelines.data_config import ConversationsStage
from strop.pipelines.stage import StageContext
from strop.pipelines.stage_data import RowsWriter, dropped_path, kept_path
from strop.rollout.call_format import CallFormat, make_call_format
from strop.rollout.chat import ChatFormat, Span
from strop.rollout.chat import Message as ChatMessage
from strop.rollout.prompt import load_prompt
from strop.rollout.retelling import retold, said_ids, stops_at_call
from strop.tasks.conversations import Conversation, Message, as_row, conversation_of, read_conversations
from strop.tasks.readers import Unreadable
from strop.training.sft import Demonstration, Segment


async def run_conversations_stage(context: StageContext, stage: ConversationsStage) -> tuple[Path, str]:
    """Read, and write what can be imitated; returns the file of conversations and one sentence about it.

    Raises:
        TaskError: a row is no conversation, or not one of them can be told in the calls of the stage's prompt.
    """
    context.progress.stage_started(context.name, stage.kind, 1, 0)
    calls = make_call_format(load_prompt(stage.prompt).calls, [tool.spec for tool in context.tools()])
    num_kept = num_dropped = 0
    first = ""
    with RowsWriter(kept_path(context.directory)) as kept, RowsWriter(dropped_path(context.directory)) as dropped:
        for conversation in read_conversations(Path(stage.path).expanduser()):
            try:
                turns_of(conversation, calls)
            except Unreadable as error:
                num_dropped += 1
                first = first or f"{conversation.id}: {error}".rstrip(".")
                dropped.add(as_row(conversation) | {"reason": str(error)})
                continue
            num_kept += 1
            kept.add(as_row(conversation) | {"prompt": stage.prompt})
            if num_kept == stage.limit:
                break
    if not num_kept and not num_dropped:
        raise TaskError(f"stages.{context.name}.path: {stage.path} has no rows. Name a file of conversations.")
    if not num_kept:
        raise TaskError(
            f"stages.{context.name}.path: none of the {num_dropped} conversations of {stage.path} can be imitated. {first}."
            " Give the stage a prompt whose calls are those of its rows, or name another file."
        )
    told = f", {num_dropped} dropped; the first is {first}" if num_dropped else ""
    return kept_path(context.directory), f"{num_kept} conversations of {stage.path}{told}"


def as_written_demonstration(row: Mapping[str, Any], chat: ChatFormat, calls: CallFormat) -> Demonstration:
    """A row of `run_conversations_stage` in the ids of a model.

    Raises:
        TaskError: it is none, or the model's calls cannot tell it.
    """
    try:
        conversation = conversation_of(row, id=str(row.get("id")), source=str(row.get("source")))
        turns = turns_of(conversation, calls)
    except Unreadable as error:
        raise TaskError(f"conversation {row.get('id')!r}: {error}. Make the stage that read it anew (--from).") from error
    before = takewhile(lambda each: each.role != "assistant", conversation.messages)
    opening = [ChatMessage(role=each.role, spans=(Span(text=each.content, is_ours=each.role == "system"),)) for each in before]
    segments = [Segment(ids=chat.prompt_ids(opening), is_demonstrator=False)]
    for said, following in turns:
        goes_on = stops_at_call(said, calls)
        segments.append(Segment(ids=said_ids(said, chat, calls), is_demonstrator=True))
        if following:
            is_user = following[0].role == "user"
            answered = chat.observation_ids(
                [each.content for each in following],
                completion_ended=not goes_on,
                wrapper=("", "") if is_user else calls.wrapper,
                continues_turn=goes_on,
            )
            segments.append(Segment(ids=answered, is_demonstrator=False))
    return Demonstration(segments=tuple(segment for segment in segments if segment.ids))


def turns_of(conversation: Conversation, calls: CallFormat) -> list[tuple[str, Sequence[Message]]]:
    """What the demonstrator says turn by turn, with calls in the form of `calls`, and the messages that stand behind each turn.

    Raises:
        Unreadable: a call cannot be read or told, a result answers none, or a user interrupts.
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
