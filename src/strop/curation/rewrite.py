r"""Lets a language model rewrite what an assistant said, one row after another, and tells which rows it could not.

DeepSeek-R1 (arXiv 2501.12948) has a model rewrite its cold-start data and its non-reasoning data (section 2.3). Its prompts for
that are not published; `PROMPT` is ours. Every reply is kept on disk, so a call that was killed asks for nothing twice.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter, deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, TextIO, TypeAlias

from pydantic import Field, field_validator

from strop.config import Config
from strop.errors import TaskError
from strop.rewards.scorers.chat_client import ChatClient, ChatServiceConfig
from strop.rewards.scorers.refusals import Refusals
from strop.runs import writing_to
from strop.tasks.boxes import boxed
from strop.tasks.files import read_rows
from strop.web import ServiceRefused

PROMPT = """\
Rewrite the response below so that it reads well: one language, that of the request; plain and connected sentences in the first
person; no repetition and no abandoned attempts, but every step that the result needs. Change nothing of what it concludes: a
result in \\boxed{} and everything between tags stay as they are. Answer with the rewritten response alone.

<request>
$question
</request>

<response>
$response
</response>"""

_THOUGHTS = ("<think>", "</think>")
_IDS = ("trajectory", "tokenizer")  # of a row that a stage sampled: the tokens of what it said before
Row: TypeAlias = Mapping[str, Any]


class RewriteConfig(Config):
    """Who rewrites, what it is told, and which text of a row is rewritten."""

    service: ChatServiceConfig  # without `cache`, replies are kept beside what is written
    prompt: str = PROMPT  # with $response, and $question where it is to be seen
    column: str | None = None  # a column of text; unset: the last message of `messages`, which has to be an assistant's
    question: str = "question"  # the column that $question is, where `column` is set; else it is the last user's message
    keeps_answer: bool = True  # a rewrite whose last \boxed{} is another than before is none
    keeps_thoughts: bool = True  # nor is one with more or fewer <think> and </think>: a rewriter's own thoughts
    tries: int = Field(default=2, ge=1)  # replies asked for until one is a rewrite

    @field_validator("prompt")
    @classmethod
    def _shows_the_response(cls, prompt: str) -> str:
        template = Template(prompt)
        names = set(template.get_identifiers()) if template.is_valid() else {"?"}
        if unknown := names - {"question", "response"}:
            raise ValueError(
                f"${sorted(unknown)[0]} is nothing that it could be filled with. There are $question and $response; write $$"
                " for a dollar."
            )
        if "response" not in names:
            raise ValueError("the prompt nowhere says $response, so there would be nothing to rewrite. Put it in.")
        return prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """What came of it; the numbers add up to those of the rows."""

    num_rewritten: int
    failures: Mapping[str, int]  # by reason
    failed_path: Path  # every row that was not rewritten, with its reason

    @property
    def summary(self) -> str:
        why = ", ".join(f"{num:,} {reason}" for reason, num in self.failures.items())
        failed = sum(self.failures.values())
        return f"{self.num_rewritten:,} rewritten, {failed:,} not" + (f" ({why}), in {self.failed_path}" if failed else "")


async def rewrite_file(config: RewriteConfig, source: Path, out: Path) -> Rewriting:
    """Rewrite the rows of `source` into `out`, in their order; those that fail go to `<out>.failed.jsonl`, with the reason.

    Rows stream: no more of them are held than may be asked for at once. Both files are there whole, or not at all; the same
    call after a kill goes on from the replies that are kept.

    Raises:
        TaskError: the rows cannot be read, or have no such text; or none could be rewritten.
        ServiceRefused: the service failed, or refused all of its first requests, or several different ones in a row.
    """
    failed_path = out.with_name(f"{out.name}.failed.jsonl")
    temporary = [path.with_name(f".{path.name}.tmp") for path in (out, failed_path)]
    service = config.service
    if service.cache is None:
        service = service.model_copy(update={"cache": str(out.with_name(f"{out.name}.replies"))})
    client = ChatClient(service, is_kept=lambda text: bool(text.strip()))  # silence would be the answer for ever
    failures: Counter[str] = Counter()
    num_rewritten, first_failure = 0, ""
    try:
        with writing_to(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            with temporary[0].open("w", encoding="utf-8") as done, temporary[1].open("w", encoding="utf-8") as failed:
                async with aclosing(_rewritten(config, client, source)) as rows:
                    async for place, row, reason in rows:
                        if reason:
                            failures[reason.partition(":")[0]] += 1
                            first_failure = first_failure or f"{place}: {reason}"
                            _write(failed, {"place": place, "reason": reason, "row": row})
                        else:
                            num_rewritten += 1
                            _write(done, row)
                for file in (done, failed):
                    file.flush()
                    os.fsync(file.fileno())
            if not num_rewritten:
                raise TaskError(f"{source}: none of its rows could be rewritten. {first_failure or 'It has no rows'}.")
            temporary[0].replace(out)
            temporary[1].replace(failed_path)
    finally:
        await client.close()
        for path in temporary:
            path.unlink(missing_ok=True)
    return Rewriting(num_rewritten=num_rewritten, failures=dict(failures.most_common()), failed_path=failed_path)


async def _rewritten(config: RewriteConfig, client: ChatClient, source: Path) -> AsyncGenerator[tuple[str, Row, str]]:
    """(place, row, why it is not rewritten; "" where it is), in order; so many are asked for at once as the service takes."""
    refusals = Refusals(what="not rewritten")
    waiting: deque[tuple[str, asyncio.Task[tuple[Row, str]]]] = deque()
    try:
        for place, row in read_rows(source):
            asking = asyncio.create_task(_rewrite(config, client, refusals, row, _texts(config, row, place)))
            waiting.append((place, asking))
            if len(waiting) >= 2 * config.service.max_running:
                place, asking = waiting.popleft()
                yield (place, *await asking)
        while waiting:
            place, asking = waiting.popleft()
            yield (place, *await asking)
    finally:
        for _, asking in waiting:
            asking.cancel()
        await asyncio.gather(*(asking for _, asking in waiting), return_exceptions=True)


async def _rewrite(
    config: RewriteConfig, client: ChatClient, refusals: Refusals, row: Row, texts: tuple[str, str]
) -> tuple[Row, str]:
    question, response = texts
    asked = [{"role": "user", "content": Template(config.prompt).substitute(question=question, response=response)}]
    reason = ""
    with refusals.asking((question, response) if question else (response,)) as asking:
        for draw in range(config.tries):
            try:
                reply = await client.reply(asked, draw=draw)
            except ServiceRefused as refused:
                refusals.add(refused, *asking)
                return row, f"refused: {refused}"
            refusals.judged(asking)
            text = reply.text.strip()
            reason = _fault(config, response, text, reply.finish_reason)
            if not reason:
                return _with_text(config, row, text, response), ""
    return row, reason


def _fault(config: RewriteConfig, before: str, after: str, finish_reason: str) -> str:
    """Why `after` is no rewrite of `before`; empty where it is one."""
    if finish_reason == "length":
        return f"cut off: the reply has more than service.max_tokens = {config.service.max_tokens} tokens"
    if not after:
        return "empty: the reply says nothing"
    thoughts = [[text.count(tag) for tag in _THOUGHTS] for text in (before, after)]
    if config.keeps_thoughts and thoughts[0] != thoughts[1]:
        what = "that the original does not have" if thoughts[1] > thoughts[0] else "of the original are gone"
        return (
            f"thoughts {what}: the reply has {_tags(thoughts[1])} instead of {_tags(thoughts[0])}. Let the service keep what"
            " the model thinks apart (a reasoning parser) and remove the replies that are kept, or set keeps_thoughts = false"
            " where the prompt asks for other thoughts"
        )
    answers = [boxed(text)[-1:] for text in (before, after)]
    if config.keeps_answer and answers[0] != answers[1]:
        return f"answer changed: from {_shown(answers[0])} to {_shown(answers[1])}"
    return ""


def _texts(config: RewriteConfig, row: Row, place: str) -> tuple[str, str]:
    """Question and response of a row. Raises `TaskError` where there is no response."""
    if config.column is not None:
        text, question = row.get(config.column), row.get(config.question)
        if not isinstance(text, str):
            raise TaskError(f"{place}: its column {config.column!r} is no text. It has {', '.join(map(str, row)) or 'none'}.")
        return str(question or ""), text
    messages = row.get("messages")
    known = [each for each in messages if isinstance(each, Mapping)] if isinstance(messages, list) else []
    if not known or known[-1].get("role") != "assistant" or not isinstance(known[-1].get("content"), str):
        raise TaskError(f"{place}: no messages that end with an assistant's. Name a column of text with `column`, or mend it.")
    asked = [str(each.get("content")) for each in known if each.get("role") == "user"]
    return (asked[-1] if asked else ""), known[-1]["content"]


def _with_text(config: RewriteConfig, row: Row, text: str, before: str) -> Row:
    """The row with the new text, without the ids of the old one, and with what it was."""
    told = {key: value for key, value in row.items() if key not in _IDS}
    if config.column is not None:
        told[config.column] = text
    else:
        told["messages"] = [*row["messages"][:-1], {**row["messages"][-1], "content": text}]
    return told | {"rewritten_by": config.service.model, "rewritten_from": before}


def _write(file: TextIO, row: Row) -> None:
    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def _tags(counts: list[int]) -> str:
    return " and ".join(f"{count} {tag}" for count, tag in zip(counts, _THOUGHTS, strict=True))


def _shown(answer: list[str]) -> str:
    return repr(answer[0][:80]) if answer else "none"
