"""Demonstrations of conversations in one form: what supervised fine-tuning on published data reads.

A tool call is JSON between tags in the assistant's text, and a tool's answer stands between tags under the role `tool`: the
format of rStar2-Agent (arXiv 2508.20722, section 2.1), Hermes and Qwen. The tools stand in the system message, as there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

from strop.errors import TaskError
from strop.runs import writing_to
from strop.tasks.files import Found, NoRow, find_rows, half_of_a_character, read_hub, read_rows
from strop.tasks.readers import Unreadable

logger = logging.getLogger(__name__)

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. An assistant's is what is imitated; its calls stand in `content` between tags."""

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
        """Raises `Unreadable` for what cannot be trained on: nothing to imitate, an empty message, roles out of order."""
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
            raise Unreadable("it has an empty message")  # that a tool answers nothing is an answer: APIGen-MT's `think` does


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What came of converting a file."""

    num_converted: int
    num_dropped: int
    dropped_path: Path


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """One tool call as an assistant writes it."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def tools_text(tools: Iterable[Mapping[str, Any]]) -> str:
    """The part of a system message that offers tools; empty without any."""
    lines = [json.dumps({"type": "function", "function": dict(tool)}, ensure_ascii=False) for tool in tools]
    if not lines:
        return ""
    return "\n".join(
        [
            "# Tools",
            "You may call functions. Their signatures are within <tools> tags:",
            "<tools>",
            *lines,
            "</tools>",
            "For each call, return a JSON object with the function's name and arguments within <tool_call> tags:",
            '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>',
        ]
    )


def convert_file(dataset: str, source: str, out: Path, *, split: str | None = None) -> Conversion:
    """Convert every row of `source` into `out`; what cannot be goes to `<out>.dropped.jsonl`, with the reason.

    So does a line that is no JSON object, as the `text` of a row; how many there are is told in a warning, with the first.

    Raises:
        TaskError: an unknown data set, a source that cannot be read, or no row that could be converted.
    """
    from strop.tasks.converters import converter_of

    converter = converter_of(dataset)
    dropped_path = out.with_name(f"{out.name}.dropped.jsonl")
    temporary = [path.with_name(f".{path.name}.tmp") for path in (out, dropped_path)]
    num_converted = num_dropped = num_no_rows = 0
    first = first_no_row = ""
    with writing_to(out), ExitStack() as left:
        for path in temporary:
            left.callback(path.unlink, missing_ok=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary[0].open("w", encoding="utf-8") as kept, temporary[1].open("w", encoding="utf-8") as dropped:
            for place, row in _open(source, split=split or converter.split, subset=converter.subset):
                try:
                    if isinstance(row, NoRow):
                        num_no_rows += 1
                        first_no_row = first_no_row or f"{place}: {row.problem}"
                        raise Unreadable(row.problem)
                    line = _line(converter(row, id=Path(place).name, source=dataset))
                except Unreadable as error:
                    num_dropped += 1
                    first = first or f"{place}: {error}"
                    was = {"text": row.text} if isinstance(row, NoRow) else row
                    dropped.write(json.dumps({"place": place, "reason": str(error), "row": was}, default=str) + "\n")
                    continue
                num_converted += 1
                kept.write(line)
            for file in (kept, dropped):
                file.flush()
                os.fsync(file.fileno())
        if not num_converted:
            raise TaskError(
                f"{source}: none of its {num_dropped} rows is a conversation of {dataset}. {first or 'It has no rows'}. The"
                f" schema is that of {converter.source}; choose the data set that fits with `strop data list`."
            )
        temporary[0].replace(out)
        temporary[1].replace(dropped_path)
    if num_no_rows:
        logger.warning("%d of the dropped are no JSON objects; the first: %s.", num_no_rows, first_no_row)
    return Conversion(num_converted=num_converted, num_dropped=num_dropped, dropped_path=dropped_path)


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The conversations that `convert_file` wrote, or that somebody else wrote as rows of `messages` with role and content.

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
        if role not in _ROLES or not isinstance(content, str):
            raise Unreadable(f"a message must have a role ({', '.join(_ROLES)}) and a text as content, not {str(message)[:80]}")
        said.append(Message(role=role, content=content))
    own = row.get("facts") or {}
    facts = {str(name): str(value) for name, value in own.items()} if isinstance(own, Mapping) else {}
    conversation = Conversation(id=id, source=source, messages=tuple(said), facts=facts)
    conversation.check()
    return conversation


def as_row(conversation: Conversation) -> dict[str, Any]:
    messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
    return {"id": conversation.id, "source": conversation.source, "messages": messages, "facts": dict(conversation.facts)}


def _line(conversation: Conversation) -> str:
    """As a file holds it. Raises `Unreadable` where no file can: a part that was JSON within JSON may hold half a character."""
    line = json.dumps(as_row(conversation), ensure_ascii=False) + "\n"
    if (half := half_of_a_character(line)) is not None:
        raise Unreadable(half)
    return line


def _open(source: str, *, split: str, subset: str | None) -> Found:
    path = Path(source).expanduser()
    looks_local = path.exists() or path.suffix in (".jsonl", ".json", ".parquet")
    return find_rows(path) if looks_local else read_hub(source, subset=subset, split=split, revision=None)
