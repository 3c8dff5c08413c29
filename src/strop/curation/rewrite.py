r"""Lets a language model rewrite responses or requests, row by row, and lists the rows that failed.

DeepSeek-R1 (arXiv 2501.12948) has a model rewrite its cold-start data and its non-reasoning data (section 2.3), rStar2-Agent
(arXiv 2508.20722) the users' turns of conversations (section 4.1). Those prompts are not published; the prompts here are ours.
Replies are cached on disk, so a second call asks only for what is missing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from strop.answer_text import boxed
from strop.chat_client import ChatClient, ChatServiceConfig
from strop.config import Config
from strop.errors import TaskError
from strop.http import Failures, ServiceRefused
from strop.rewards.judge import builtin_prompt, checked_prompt
from strop.tasks.files import read_rows, writing_rows
from strop.tasks.readers import Unreadable, as_text, find

PROMPT = builtin_prompt("rewrite")

USER_PROMPT = builtin_prompt("rewrite_user")

_THOUGHTS = ("<think>", "</think>")
_PARTS = 8  # rows that are in memory at once, for each that the service takes at once
_IDS = ("trajectory", "tokenizer")  # tokens of the old text, in rows that a stage sampled
Row: TypeAlias = Mapping[str, Any]


class RewriteConfig(Config):
    """The model that rewrites, its prompt, and the text that is rewritten."""

    service: ChatServiceConfig = Field(description="The model. Without `cache`, replies are cached next to the output.")
    turns: Literal["answer", "user"] = Field(
        "answer", description="What of `messages` is rewritten: the last message of the assistant, or each of the user."
    )
    prompt: str | None = Field(
        None, description="Prompt with $response (the text to rewrite) and, if needed, $question. Unset: the built-in one."
    )
    column: str | None = Field(None, description="Column of text. Default: the last message of `messages`.")
    into: str | None = Field(
        None,
        description="Column that gets the reply, next to `column`. Default: the reply replaces the text, and is rejected with"
        " another last \\boxed{} or another number of <think> and </think> tags.",
    )
    question: str = Field("question", description="Column of $question if `column` is set; else it is the last user message.")
    tries: int = Field(2, ge=1, le=1000, description="Replies to ask for until one is accepted.")

    @field_validator("prompt")
    @classmethod
    def _shows_the_response(cls, prompt: str | None) -> str | None:
        return prompt and checked_prompt(prompt, {"question", "response"}, needed={"response"})

    @model_validator(mode="after")
    def _has_turns(self) -> Self:
        if self.turns == "user" and self.column is not None:
            raise ValueError(f"turns is 'user', but column is {self.column!r}, which has no turns. Leave one of them out.")
        if self.into is not None and self.column is None:
            raise ValueError(f"into is {self.into!r}, but column is not set. Set column to the text that is shown.")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """Counts of rewritten and failed rows."""

    num_rewritten: int
    failures: Mapping[str, int]  # by reason
    failed_path: Path  # every failed row, with the reason

    @property
    def summary(self) -> str:
        why = ", ".join(f"{num:,} {reason}" for reason, num in self.failures.items())
        failed = sum(self.failures.values())
        return f"{self.num_rewritten:,} rewritten, {failed:,} not" + (f" ({why}), in {self.failed_path}" if failed else "")


async def rewrite_file(config: RewriteConfig, source: Path, out: Path) -> Rewriting:
    """Rewrite the rows of `source` into `out`, in order. Failed rows go to `<out>.failed.jsonl` with the reason.

    Rows are streamed, and both files are written atomically. The same call resumes from the cached replies.

    Raises:
        TaskError: the rows cannot be read, or lack the text; or every row failed.
        ServiceRefused: the service failed.
    """
    failed_path = out.with_name(f"{out.name}.failed.jsonl")
    service = config.service
    if service.cache is None:
        service = service.model_copy(update={"cache": str(out.with_name(f"{out.name}.replies"))})
    client = ChatClient(service, is_kept=lambda text: bool(text.strip()))
    failures: Counter[str] = Counter()
    num_rewritten, first_failure = 0, ""
    try:
        with writing_rows(out) as add_done, writing_rows(failed_path) as add_failed:
            in_a_row, rows = Failures(what="not rewritten"), read_rows(source)
            while part := list(islice(rows, _PARTS * service.max_running)):
                texts = [_texts(config, row, place) for place, row in part]
                try:
                    async with asyncio.TaskGroup() as group:
                        asking = [
                            group.create_task(_rewrite(config, client, in_a_row, row, of_row))
                            for (_, row), of_row in zip(part, texts, strict=True)
                        ]
                except ExceptionGroup as errors:
                    raise errors.exceptions[0] from None
                for (place, _), (row, reason) in zip(part, (task.result() for task in asking), strict=True):
                    if reason:
                        failures[reason.partition(":")[0]] += 1
                        first_failure = first_failure or f"{place}: {reason}"
                        add_failed({"place": place, "reason": reason, "row": row})
                    else:
                        num_rewritten += 1
                        add_done(row)
            if not num_rewritten:
                raise TaskError(f"{source}: no row could be rewritten. {first_failure or 'It has no rows'}.")
    finally:
        await client.close()
    return Rewriting(num_rewritten=num_rewritten, failures=dict(failures.most_common()), failed_path=failed_path)


async def _rewrite(
    config: RewriteConfig, client: ChatClient, failures: Failures, row: Row, texts: Sequence[_Text]
) -> tuple[Row, str]:
    written = []
    for text in texts:
        after, reason = await _rewrite_text(config, client, failures, text)
        if reason:
            return row, reason
        written.append(after)
    return _with_texts(config, row, texts, written), ""


async def _rewrite_text(config: RewriteConfig, client: ChatClient, failures: Failures, text: _Text) -> tuple[str, str]:
    """The new text, and why there is none."""
    prompt = Template(config.prompt or (USER_PROMPT if config.turns == "user" else PROMPT))
    asked = [{"role": "user", "content": prompt.substitute(question=text.question, response=text.before)}]
    reason = ""
    for draw in range(config.tries):
        try:
            reply = await client.reply(asked, draw=draw)
        except ServiceRefused as refused:
            failures.refused(refused)
            return "", f"refused: {refused}"
        failures.success()
        after = reply.text.strip()
        reason = _fault(config, text.before, after, reply.finish_reason)
        if not reason:
            return after, ""
    return "", reason


def _fault(config: RewriteConfig, before: str, after: str, finish_reason: str) -> str:
    """Return why `after` is not a valid rewrite of `before`, or ""."""
    if finish_reason == "length":
        return f"cut off: the reply has more than service.max_tokens = {config.service.max_tokens} tokens"
    if not after:
        return "empty: the reply has no text"
    if config.into is not None:  # an answer to the text, not other words for it
        return ""
    thoughts = [[text.count(tag) for tag in _THOUGHTS] for text in (before, after)]
    if thoughts[0] != thoughts[1]:
        what = "that the original does not have" if thoughts[1] > thoughts[0] else "of the original are gone"
        return (
            f"thoughts {what}: the reply has {_tags(thoughts[1])} instead of {_tags(thoughts[0])}. Configure a reasoning"
            " parser in the service and remove the cached replies, or set `into` if the prompt asks for other thoughts"
        )
    answers = [boxed(text)[-1:] for text in (before, after)]
    if answers[0] != answers[1]:
        return f"answer changed: from {_shown(answers[0])} to {_shown(answers[1])}"
    return ""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text to rewrite, and where the new one goes: a column, or the position of a message."""

    place: str | int
    question: str
    before: str


def _texts(config: RewriteConfig, row: Row, place: str) -> Sequence[_Text]:
    """Return what is rewritten of a row. Raises `TaskError` if there is nothing."""
    if config.column is not None:
        try:
            text = as_text(find(row, config.column), config.column)
        except Unreadable as error:
            raise TaskError(f"{place}: {error}.") from error
        return [_Text(config.into or config.column, str(row.get(config.question) or ""), text)]
    messages = row.get("messages")
    known = [each for each in messages if isinstance(each, Mapping)] if isinstance(messages, list) else []
    if config.turns == "user":
        said = [(number, each.get("content")) for number, each in enumerate(known) if each.get("role") == "user"]
        texts = [_Text(number, "", content) for number, content in said if isinstance(content, str)]
        if not texts or len(texts) < len(said) or len(known) < len(messages or []):
            raise TaskError(f"{place}: no messages with a user's text. Fix the row.")
        return texts
    if not known or known[-1].get("role") != "assistant" or not isinstance(known[-1].get("content"), str):
        raise TaskError(
            f"{place}: no messages that end with an assistant's. Name a column of text with `column`, or fix the row."
        )
    asked = [str(each.get("content")) for each in known if each.get("role") == "user"]
    return [_Text(len(row["messages"]) - 1, asked[-1] if asked else "", known[-1]["content"])]


def _with_texts(config: RewriteConfig, row: Row, texts: Sequence[_Text], written: Sequence[str]) -> Row:
    """Return the row with the new texts and the old ones, without the token ids of the old ones."""
    new = {key: value for key, value in row.items() if key not in _IDS}
    for text, after in zip(texts, written, strict=True):
        if isinstance(text.place, str):
            new[text.place] = after
        else:
            new["messages"] = [*new["messages"]]
            new["messages"][text.place] = {**new["messages"][text.place], "content": after}
    new["rewritten_by"] = config.service.model
    if config.into is not None:
        return new
    before = [text.before for text in texts]
    return new | {"rewritten_from": before if config.turns == "user" else before[0]}


def _tags(counts: list[int]) -> str:
    return " and ".join(f"{count} {tag}" for count, tag in zip(counts, _THOUGHTS, strict=True))


def _shown(answer: list[str]) -> str:
    return repr(answer[0][:80]) if answer else "none"
