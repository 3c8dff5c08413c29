"""Reads the JSON function calls in the text that a policy sampled in one turn.

The format is rStar2-Agent's (arXiv 2508.20722, section 2.1), that of Hermes and Qwen:
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A call that cannot be read is a failure with a text for the
policy, never silence: an opening tag without its closing one is one too, where the released code ends the rollout.
The JSON value itself says where a block ends, so tags inside its strings are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from strop.types import ToolOutcome

OPENING, CLOSING = "<tool_call>", "</tool_call>"

_NOT_SPACE = re.compile(r"\S|\Z")
_DECODER = json.JSONDecoder()
_MAX_DEPTH = 64
_TOO_DEEP = f"its JSON is nested more than {_MAX_DEPTH} levels deep"
_FORM = '{"name": ..., "arguments": {...}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A call that can be tried."""

    name: str
    arguments: Mapping[str, object]
    arguments_text: str  # the same arguments as one line of JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A call that cannot, and what the policy is told."""

    name: str  # empty when it could not be read
    arguments_text: str  # the whole block when its arguments could not be read
    outcome: ToolOutcome
    text: str


Call: TypeAlias = ParsedCall | FailedCall


def parse_tool_calls(text: str, *, max_calls: int) -> list[Call]:
    """Every block of `text` that an opening tag begins, in order; those after the first `max_calls` are TOO_MANY_CALLS."""
    calls: list[Call] = []
    start = text.find(OPENING)
    while start >= 0:
        call, end = _parse_block(text, start + len(OPENING))
        if len(calls) >= max_calls:
            limit = "1 call" if max_calls == 1 else f"{max_calls} calls"
            call = FailedCall(
                name=call.name,
                arguments_text=call.arguments_text,
                outcome=ToolOutcome.TOO_MANY_CALLS,
                text=f"Error: at most {limit} in one turn. This call was not run; make it in your next turn.",
            )
        calls.append(call)
        start = text.find(OPENING, end)
    return calls


def has_closed_call(text: str) -> bool:
    """Whether `text` holds a block that is closed, be it right or wrong."""
    start = text.find(OPENING)
    return start >= 0 and text.find(CLOSING, start) >= 0


def _parse_block(text: str, start: int) -> tuple[Call, int]:
    """The call whose block has its inside at `start`, and where to look for the next one."""
    value_start = _NOT_SPACE.search(text, start).start()  # type: ignore[union-attr]  # it matches the end, too
    value: Any = None
    value_end = value_start
    problem: str | None = None
    try:
        value, value_end = _DECODER.raw_decode(text, value_start)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # else no log, pipe or tokenizer could take it
        if _is_deeper(value, _MAX_DEPTH):
            problem = _TOO_DEEP
    except RecursionError:
        problem = _TOO_DEEP
    except json.JSONDecodeError as error:
        problem = f"invalid JSON: {error.msg} at character {error.pos - value_start}"
    except UnicodeEncodeError:
        problem = "a string holds half of a surrogate pair"
    except ValueError:  # NaN, infinity, or an integer of thousands of digits
        problem = "it holds a number that JSON cannot"
    closing = text.find(CLOSING, value_end)
    next_opening = text.find(OPENING, value_end)
    if closing < 0 or 0 <= next_opening < closing:
        end = len(text) if next_opening < 0 else next_opening
        return _failed(text[start:end], ToolOutcome.UNCLOSED, f"{OPENING} without {CLOSING}"), end
    block, end = text[start:closing], closing + len(CLOSING)
    if problem is None and text[value_end:closing].strip():
        problem = f"text after the JSON object; each call has {OPENING} tags of its own"
    if problem is not None:
        return _failed(block, ToolOutcome.MALFORMED, problem), end
    return _read_call(value, block), end


def _read_call(value: Any, block: str) -> Call:
    if not isinstance(value, dict):
        return _failed(block, ToolOutcome.MALFORMED, "not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _failed(block, ToolOutcome.MALFORMED, '"name" is missing or not a string')
    if "arguments" not in value:
        return _failed(block, ToolOutcome.MALFORMED, '"arguments" is missing', name=name)
    arguments = value["arguments"]
    arguments_text = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, dict):
        return FailedCall(
            name=name,
            arguments_text=arguments_text,
            outcome=ToolOutcome.WRONG_ARGUMENTS,
            text='Error: "arguments" must be a JSON object.',
        )
    return ParsedCall(name=name, arguments=arguments, arguments_text=arguments_text)


def _is_deeper(value: Any, max_depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (max_depth == 0 or any(_is_deeper(each, max_depth - 1) for each in inner))


def _failed(block: str, outcome: ToolOutcome, problem: str, *, name: str = "") -> FailedCall:
    return FailedCall(
        name=name,
        arguments_text=block,
        outcome=outcome,
        text=f"Error: the tool call could not be read: {problem}. Write {OPENING}{_FORM}{CLOSING}.",
    )
