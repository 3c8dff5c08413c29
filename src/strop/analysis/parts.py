"""Which part of a completion each of its tokens stands in: reasoning, a tool call, or the answer.

Read from the text as the two formats of calls write it: JSON in `<tool_call>` tags (rStar2-Agent, arXiv 2508.20722), and a tag
with the tool's name (ARPO, arXiv 2507.19849). A part begins with its opening tag and ends with its closing one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from enum import StrEnum

from strop.rollout.tool_calls import CLOSING, OPENING

Span = tuple[int, int]  # characters of a text: first, and one past the last

_DECODER = json.JSONDecoder()
_NOT_SPACE = re.compile(r"\S|\Z")
_ANSWER = re.compile(r"<answer>.*?(?:</answer>|\Z)", re.DOTALL)
_BOX = "\\boxed{"


class Part(StrEnum):
    """What a token is part of."""

    REASONING = "reasoning"  # whatever is neither of the others: tags of reasoning and the end of the turn, too
    TOOL_CALL = "tool_call"
    ANSWER = "answer"


def token_parts(texts: Sequence[str], *, called: Collection[str]) -> list[Part]:
    """The part of each token of one completion; `called` names the tools that it called, by whatever format.

    A token that reaches over the edge of a part belongs to it. A completion that called nothing has no tool call, whatever it
    looks like: its prompt may know of no tools. A call is a call also where an answer is written in it, and an answer that
    stands in no tag is its last `\\boxed{}`.
    """
    text = "".join(texts)
    calls = call_spans(text, called=called) if called else []
    calls_of = inside(texts, calls)
    answers_of = inside(texts, answer_spans(text))
    return [
        Part.TOOL_CALL if is_call else Part.ANSWER if is_answer else Part.REASONING
        for is_call, is_answer in zip(calls_of, answers_of, strict=True)
    ]


def inside(texts: Sequence[str], spans: Sequence[Span]) -> list[bool]:
    """Of each token, whether any character of it lies in one of `spans`, which are in order of their ends.

    An empty text is the rest of the character before it, and lies where that lies.
    """
    found: list[bool] = []
    start, at = 0, 0
    for text in texts:
        end = start + len(text)
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        is_inside = at < len(spans) and spans[at][0] < end and start < end
        found.append(is_inside if text else bool(found) and found[-1])
        start = end
    return found


def call_spans(text: str, *, called: Collection[str]) -> list[Span]:
    """Where calls stand in `text`: blocks of JSON, or else the last tag with the name of a tool in `called`."""
    if OPENING in text:
        return _json_spans(text)
    tag = re.compile(f"<({'|'.join(re.escape(name) for name in called if name) or '(?!)'})>")
    openings = list(tag.finditer(text))
    if not openings:
        return []
    last = openings[-1]
    closing = f"</{last.group(1)}>"
    end = text.rfind(closing, last.end())
    return [(last.start(), len(text) if end < 0 else end + len(closing))]


def _json_spans(text: str) -> list[Span]:
    """The JSON value itself says where a block ends, so tags inside its strings are text, as for the parser of calls."""
    spans: list[Span] = []
    start = text.find(OPENING)
    while start >= 0:
        value_end = _NOT_SPACE.search(text, start + len(OPENING)).start()  # type: ignore[union-attr]  # it matches the end, too
        with suppress(ValueError, RecursionError):  # no JSON: the block ends where its tag does
            _, value_end = _DECODER.raw_decode(text, value_end)
        closing, following = text.find(CLOSING, value_end), text.find(OPENING, value_end)
        is_closed = closing >= 0 and (following < 0 or closing < following)
        end = closing + len(CLOSING) if is_closed else len(text) if following < 0 else following
        spans.append((start, end))
        start = text.find(OPENING, end)
    return spans


def answer_spans(text: str) -> list[Span]:
    r"""Every answer tag of `text`; of a text without one its last `\boxed{}`, up to the brace that closes it."""
    tagged = [match.span() for match in _ANSWER.finditer(text)]
    start = text.rfind(_BOX)
    if tagged or start < 0:
        return tagged
    depth = 0
    for place in range(start + len(_BOX) - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return [(start, place + 1)]
    return [(start, len(text))]
