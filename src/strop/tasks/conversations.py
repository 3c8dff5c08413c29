"""Conversations in one format, which supervised fine-tuning on published data reads.

A tool call is JSON between tags in the assistant's text, and a tool's answer has the role `tool`: the format of rStar2-Agent
(arXiv 2508.20722, section 2.1), Hermes and Qwen. The system message lists the tools.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

from strop.errors import TaskError
from strop.run_directory import parse_json
from strop.tasks.files import Found, NoRow, find_rows, read_hub, read_rows, writing_rows
from strop.tasks.readers import Unreadable

logger = logging.getLogger(__name__)

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. Those of the assistant are imitated; their calls are in `content`, between tags."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One demonstration, from the first message to an assistant's last."""

    id: str
    source: str
    messages: tuple[Message, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `Unreadable` if nothing can be imitated, a message is empty, or roles are out of order."""
        roles = [message.role for message in self.messages]
        body = roles[1:] if roles[:1] == ["system"] else roles
        if body[:1] != ["user"] or "system" in body:
            raise Unreadable(
                f"its roles are {', '.join(roles) or 'none'}; a user must speak first, after at most one system message"
            )
        if roles[-1] != "assistant":
            raise Unreadable(f"its last message is of the role {roles[-1]!r}, so nothing answers it")
        for before, after in pairwise(body):
            if after == "tool" and before not in ("assistant", "tool"):
                raise Unreadable(f"a tool answers a message of the role {before!r}")
            if before == after and before in ("user", "assistant"):
                raise Unreadable(f"two messages of the role {before!r} follow one another")
        if any(not message.content.strip() for message in self.messages if message.role != "tool"):
            raise Unreadable("it has an empty message")  # an empty answer of a tool is valid: APIGen-MT's `think` has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The result of converting a file."""

    num_converted: int
    num_dropped: int
    dropped_path: Path


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return one tool call as an assistant writes it."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def tools_text(tools: Iterable[Mapping[str, Any]]) -> str:
    """Return the part of a system message that offers tools; empty without tools."""
    lines = [json.dumps({"type": "function", "function": dict(tool)}, ensure_ascii=False) for tool in tools]
    if not lines:
        return ""
    return "\n".join(
        [
            "# Tools\nYou may call functions. Their signatures are within <tools> tags:\n<tools>",
            *lines,
            "</tools>\nFor each call, return a JSON object with the function's name and arguments within <tool_call> tags:",
            '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>',
        ]
    )


def convert_file(dataset: str, source: str, out: Path, *, split: str | None = None) -> Conversion:
    """Convert every row of `source` into `out`; others go to `<out>.dropped.jsonl`, each with the reason.

    A line that is no JSON object becomes the `text` of a row there; a warning counts such lines and names the first.

    Raises:
        TaskError: an unknown data set, a source that cannot be read, or no row that could be converted.
    """
    from strop.tasks.converters import converter_of

    converter = converter_of(dataset)
    dropped_path = out.with_name(f"{out.name}.dropped.jsonl")
    num_converted = num_dropped = num_no_rows = 0
    first = first_no_row = ""
    with writing_rows(out) as keep, writing_rows(dropped_path) as drop:
        for place, row in _open(source, split=split or converter.split, subset=converter.subset):
            try:
                if isinstance(row, NoRow):
                    num_no_rows += 1
                    first_no_row = first_no_row or f"{place}: {row.problem}"
                    raise Unreadable(row.problem)
                conversation = as_row(converter(row, id=Path(place).name, source=dataset))
                _check_characters(conversation)
            except Unreadable as error:
                num_dropped += 1
                first = first or f"{place}: {error}"
                was = {"text": row.text} if isinstance(row, NoRow) else row
                drop({"place": place, "reason": str(error), "row": was})
                continue
            num_converted += 1
            keep(conversation)
        if not num_converted:
            raise TaskError(
                f"{source}: none of its {num_dropped} rows is a conversation of {dataset}. {first or 'It has no rows'}. The"
                f" schema is that of {converter.source}; choose the data set that fits with `strop data list`."
            )
    if num_no_rows:
        logger.warning("%d of the dropped are no JSON objects; the first: %s.", num_no_rows, first_no_row)
    return Conversion(num_converted=num_converted, num_dropped=num_dropped, dropped_path=dropped_path)


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Yield the conversations of a file: rows of `messages` in the standard chat format (role, content, tool_calls).

    Raises:
        TaskError: naming the row that is none.
    """
    for place, row in read_rows(path):
        try:
            conversation = conversation_of(
                row, id=str(row.get("id") or Path(place).name), source=str(row.get("source") or path)
            )
        except Unreadable as error:
            raise TaskError(f"{place}: {error}. Mend or remove the row.") from error
        yield conversation


def conversation_of(row: Mapping[str, Any], *, id: str, source: str) -> Conversation:
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise Unreadable("it has no list of messages")
    said = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role == "assistant" and message.get("tool_calls"):
            calls = calls_of(message["tool_calls"])
            content = "\n".join([*([content] if content else []), *(call_text(*call) for call in calls)])
        if role not in _ROLES or not isinstance(content, str):
            raise Unreadable(f"a message must have a role ({', '.join(_ROLES)}) and a text as content, not {str(message)[:80]}")
        said.append(Message(role=role, content=content))
    own = row.get("facts") or {}
    facts = {str(name): str(value) for name, value in own.items()} if isinstance(own, Mapping) else {}
    conversation = Conversation(id=id, source=source, messages=tuple(said), facts=facts)
    conversation.check()
    return conversation


def calls_of(value: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return name and arguments of a call or a list of calls, as in the standard chat format or as objects of the two.

    Arguments are an object, or JSON in a text. Raises `Unreadable`.
    """
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (None, None)
        try:
            arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
        except ValueError as error:
            raise Unreadable(f"the arguments of a tool call are {error}") from error
        if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
            raise Unreadable(f"a tool call must have a name and an object of arguments, not {str(call)[:80]}")
        calls.append((name, arguments))
    return calls


def as_row(conversation: Conversation) -> dict[str, Any]:
    messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
    return {"id": conversation.id, "source": conversation.source, "messages": messages, "facts": dict(conversation.facts)}


def _check_characters(row: Mapping[str, Any]) -> None:
    """Raise `Unreadable` for half of a character, which JSON within JSON may hold."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Unreadable(f"holds half of a character, \\u{ord(error.object[error.start]):04x}") from error


def _open(source: str, *, split: str, subset: str | None) -> Found:
    path = Path(source).expanduser()
    looks_local = path.exists() or path.suffix in (".jsonl", ".json", ".parquet")
    return find_rows(path) if looks_local else read_hub(source, subset=subset, split=split, revision=None)
