"""How a policy writes its tool calls, as JSON or as tags, and how they are read, checked and answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import UnknownType
from jsonschema.validators import extend

from strop.rollout.chat_template import WRAPPER
from strop.tools.protocol import ToolSpec
from strop.types import ToolOutcome

_MAX_CHARS = 200  # of a message by jsonschema, which may repeat a value


def _anything(*_: Any) -> Iterator[ValidationError]:
    return iter(())


# Patterns are not enforced: matching a policy's text with a regular expression of a server may take forever.
_Validator = extend(Draft202012Validator, {"pattern": _anything, "patternProperties": _anything})


def argument_problem(schema: Mapping[str, Any], arguments: Mapping[str, object]) -> str | None:
    """Return what is wrong with `arguments` under `schema`, of type object, naming the argument; None if nothing is."""
    validator = _Validator(_closed({"properties": {}, **schema}))
    try:
        errors = sorted(validator.iter_errors(arguments), key=lambda each: each.validator != "required" or bool(each.path))
    except UnknownType:  # in a signature that a server wrote: the tool itself has to check
        return None
    return _problem(errors[0]) if errors else None


def _closed(schema: Any) -> Any:
    """Return `schema` with objects that list their properties closed to others, and with a `not` for a schema that is false."""
    if not isinstance(schema, Mapping):
        return {"not": {}} if schema is False else schema
    closed = dict(schema)
    if "properties" in schema:
        properties = dict.fromkeys(schema.get("required", ()), True) | dict(schema["properties"])
        closed["properties"] = {name: _closed(each) for name, each in properties.items()}
        closed.setdefault("additionalProperties", False)
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    if "anyOf" in schema:
        closed["anyOf"] = [_closed(each) for each in schema["anyOf"]]
    return closed


def _problem(error: ValidationError) -> str:
    while error.validator == "anyOf" and error.context:
        error = error.context[0]
    path = error.json_path.removeprefix("$").removeprefix(".")
    inside = f"{path}." if path else ""
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        return f"missing required argument {inside + missing!r}"
    if error.validator == "additionalProperties":
        known = [name for name, each in error.schema["properties"].items() if each != {"not": {}}]
        unknown = next(name for name in error.instance if name not in error.schema["properties"])
        return f"unknown argument {inside + unknown!r} (known: {', '.join(known) or 'none'})"
    if error.validator == "type":
        kinds = [error.validator_value] if isinstance(error.validator_value, str) else error.validator_value
        return f"argument {path!r} must be of type {' or '.join(kinds)}, not {_type_name(error.instance)}"
    if error.validator == "enum":
        return f"argument {path!r} must be one of {', '.join(map(repr, error.validator_value))}"
    if error.validator == "not":
        return f"argument {path!r} must be left out"
    return f"argument {path!r}: {error.message[:_MAX_CHARS]}"


def _type_name(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {dict: "object", list: "array", str: "string", int: "integer", float: "number"}
    return kinds.get(type(value), "null")


OPENING, CLOSING = "<tool_call>", "</tool_call>"

_NOT_SPACE = re.compile(r"\S|\Z")
_VALUE_STARTS = frozenset('{["-0123456789tfnNI')  # with which JSON values begin, and what Python reads as one
_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_MAX_DEPTH = 64
_TOO_DEEP = f"its JSON is nested more than {_MAX_DEPTH} levels deep"
_FAILED = (
    "Error: the tool call could not be read: {problem}. Write "
    + OPENING
    + '{{"name": ..., "arguments": {{...}}}}'
    + CLOSING
    + "."
)
_UNCLOSED = _FAILED.format(problem=f"{OPENING} without {CLOSING}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A call that can be tried."""

    name: str
    arguments: Mapping[str, object]
    arguments_text: str  # the same arguments as one line of JSON


class FailedCall(NamedTuple):
    """A call that cannot be tried, and the text that the policy reads. A tuple is quick to make; a turn may hold thousands."""

    name: str  # empty when it could not be read
    arguments_text: str  # the whole block when its arguments could not be read
    outcome: ToolOutcome
    text: str


Call: TypeAlias = ParsedCall | FailedCall


def parse_tool_calls(text: str, *, max_calls: int) -> list[Call]:
    """Return every block that an opening tag begins, in order; those after the first `max_calls` are TOO_MANY_CALLS.

    The time grows linearly with the text: each character is read a fixed number of times, also by the JSON decoder, which can
    pass over an opening tag only inside a string.
    """
    limit = "1 call" if max_calls == 1 else f"{max_calls} calls"
    too_many = f"Error: at most {limit} in one turn. This call was not run; make it in your next turn."
    document = _Document(text)
    calls: list[Call] = []
    unread: dict[str, FailedCall] = {}  # by their block; a text may hold thousands that are equal
    before, *blocks = text.split(OPENING)  # unless a tag lies in a JSON string of the block before it
    end, resume = len(before), 0  # of the block; tags before `resume` belong to an earlier block
    for block in blocks:
        start = end + len(OPENING)
        is_inside_earlier, end = end < resume, start + len(block)
        if is_inside_earlier:
            continue
        is_beyond = len(calls) >= max_calls
        if block.lstrip()[:1] in _VALUE_STARTS or CLOSING in block:
            call, resume = _parse_block(document, start)
            if is_beyond:
                call = FailedCall(call.name, call.arguments_text, ToolOutcome.TOO_MANY_CALLS, too_many)
            calls.append(call)
        elif is_beyond:
            call = unread.get(block) or FailedCall("", block, ToolOutcome.TOO_MANY_CALLS, too_many)
            calls.append(unread.setdefault(block, call))
        else:
            calls.append(FailedCall("", block, ToolOutcome.UNCLOSED, _UNCLOSED))
    return calls


def block_spans(text: str) -> list[tuple[int, int]]:
    """Return where the blocks of `parse_tool_calls` begin and end, with their tags."""
    document, spans = _Document(text), []
    start = document.find(OPENING)
    while start >= 0:
        _, end = _parse_block(document, start + len(OPENING))
        spans.append((start, end))
        start = document.find(OPENING, end)
    return spans


def _parse_block(document: _Document, start: int) -> tuple[Call, int]:
    """Return the call whose block has its inside at `start`, and where to look for the next one."""
    value_start = _NOT_SPACE.search(document, start).start()  # type: ignore[union-attr]  # it matches the end, too
    value, value_end, problem = _decode(document, value_start)
    closing, following = document.next_closing(value_end), document.find(OPENING, value_end)
    if closing < 0 or 0 <= following < closing:
        end = len(document) if following < 0 else following
        return FailedCall("", document[start:end], ToolOutcome.UNCLOSED, _UNCLOSED), end
    block, end = document[start:closing], closing + len(CLOSING)
    if not problem and document[value_end:closing].strip():
        problem = f"text after the JSON object; each call has {OPENING} tags of its own"
    return _failed(block, problem) if problem else _read_call(value, block), end


class _Document(str):
    """A text that is searched from its start to its end, in time that grows linearly with its length."""

    _closing = 0  # the last that `next_closing` found

    def next_closing(self, start: int) -> int:
        """Return where the next closing tag is, or -1; `start` never falls from call to call."""
        if 0 <= self._closing < start or self._closing == 0:
            self._closing = self.find(CLOSING, start)
        return self._closing

    def count(self, *_: object) -> int:
        """Zero: each error of the JSON decoder counts the lines before it, for text that is not used."""
        return 0

    def rfind(self, *_: object) -> int:
        """Likewise."""
        return -1


def _decode(document: _Document, start: int) -> tuple[Any, int, str]:
    """Return the JSON value at `start`, its end, and what is wrong with it; the end is `start` if no value could be read."""
    value, end = None, start
    if document[start : start + 1] not in _VALUE_STARTS:
        return value, end, "invalid JSON: Expecting value at character 0"
    try:
        value, end = _DECODER.raw_decode(document, start)
        _ENCODER.encode(value).encode()  # else no log, pipe or tokenizer could take it
        return value, end, _TOO_DEEP if _is_deeper(value, _MAX_DEPTH) else ""
    except RecursionError:
        return value, end, _TOO_DEEP
    except json.JSONDecodeError as error:
        return value, end, f"invalid JSON: {error.msg} at character {error.pos - start}"
    except UnicodeEncodeError:
        return value, end, "a string holds half of a surrogate pair"
    except ValueError:  # NaN, infinity, or an integer of thousands of digits
        return value, end, "it holds a number that JSON cannot"


def _read_call(value: Any, block: str) -> Call:
    if not isinstance(value, dict):
        return _failed(block, "not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _failed(block, '"name" is missing or not a string')
    if "arguments" not in value:
        return _failed(block, '"arguments" is missing', name=name)
    arguments = value["arguments"]
    arguments_text = _ENCODER.encode(arguments)
    if not isinstance(arguments, dict):
        return FailedCall(name, arguments_text, ToolOutcome.WRONG_ARGUMENTS, 'Error: "arguments" must be a JSON object.')
    return ParsedCall(name=name, arguments=arguments, arguments_text=arguments_text)


def _failed(block: str, problem: str, *, name: str = "") -> FailedCall:
    return FailedCall(name, block, ToolOutcome.MALFORMED, _FAILED.format(problem=problem))


def _is_deeper(value: Any, max_depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (max_depth == 0 or any(_is_deeper(each, max_depth - 1) for each in inner))


class Calls(StrEnum):
    """What a prompt asks for."""

    JSON = "json"  # rStar2-Agent, Hermes, Qwen: JSON objects in <tool_call> tags
    TAGS = "tags"  # ARPO: a tag with the tool's name
    NONE = "none"  # the prompt lists no tools


class CallFormat(Protocol):
    """One way to write calls."""

    stop_strings: tuple[str, ...]
    """Strings at which sampling stops, next to the end of a turn."""

    wrapper: tuple[str, str]
    """Text before and after each response."""

    continues_turn: bool
    """Whether a response is in the middle of the policy's turn; else it is a turn of the user, and a new one follows."""

    def parse(self, text: str, *, max_calls: int) -> list[Call]:
        """Every call in what was sampled in one turn, in order; those after the first `max_calls` are TOO_MANY_CALLS."""

    def has_closed_call(self, text: str) -> bool:
        """Whether `text` holds a call that is closed, be it right or wrong."""

    def write(self, name: str, arguments: Mapping[str, object]) -> str:
        """A call as a policy writes it, from its opening tag to its closing one: `parse` reads the same call again.

        Raises:
            ValueError: this format cannot write it.
        """

    def empty_text(self, name: str) -> str:
        """Return what the policy sees of a call without output."""


class JsonCalls:
    """Implements `CallFormat` for JSON objects."""

    stop_strings: tuple[str, ...] = ()
    wrapper = WRAPPER
    continues_turn = False

    def parse(self, text: str, *, max_calls: int) -> list[Call]:
        return parse_tool_calls(text, max_calls=max_calls)

    def has_closed_call(self, text: str) -> bool:
        start = text.find(OPENING)
        return start >= 0 and text.find(CLOSING, start) >= 0

    def write(self, name: str, arguments: Mapping[str, object]) -> str:
        call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"{OPENING}\n{call}\n{CLOSING}"

    def empty_text(self, name: str) -> str:
        return ""


class NoCalls(JsonCalls):
    """Implements `CallFormat` for a prompt without tools: any text is an answer."""

    def parse(self, text: str, *, max_calls: int) -> list[Call]:
        return []

    def has_closed_call(self, text: str) -> bool:
        return False

    def write(self, name: str, arguments: Mapping[str, object]) -> str:
        raise ValueError(f"a call of {name!r} cannot be written: the prompt tells the policy of no tools")


def make_call_format(calls: Calls, tools: Sequence[ToolSpec]) -> CallFormat:
    match calls:
        case Calls.JSON:
            return JsonCalls()
        case Calls.TAGS:
            from strop.rollout.tag_calls import TagCalls  # only ARPO asks for tags

            return TagCalls(tools)
        case Calls.NONE:
            return NoCalls()
