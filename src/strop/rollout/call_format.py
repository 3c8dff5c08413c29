"""How a policy writes its tool calls, and how they are answered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from strop.rollout.tag_calls import TagCalls
from strop.rollout.tool_calls import CLOSING, OPENING, Call, has_closed_call, parse_tool_calls
from strop.tools.protocol import ToolSpec


class Calls(StrEnum):
    """What a prompt asks for."""

    JSON = "json"  # rStar2-Agent, Hermes, Qwen: JSON objects in <tool_call> tags
    TAGS = "tags"  # ARPO: a tag with the tool's name
    NONE = "none"  # the policy is told of no tools


class CallFormat(Protocol):
    """One way to write calls."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Where sampling stops, beside the end of a turn."""

    @property
    def wrapper(self) -> tuple[str, str]:
        """What stands before and behind each response."""

    @property
    def continues_turn(self) -> bool:
        """Whether a response stands in the middle of the policy's turn; else it is the user's turn, and the policy's begins
        anew behind it."""

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
        """What the policy is shown of a call without output."""


class JsonCalls:
    """Implements `CallFormat` for JSON objects."""

    stop_strings: tuple[str, ...] = ()
    wrapper = ("<tool_response>\n", "\n</tool_response>")  # rStar2-Agent (arXiv 2508.20722), section 2.1
    continues_turn = False

    def parse(self, text: str, *, max_calls: int) -> list[Call]:
        return parse_tool_calls(text, max_calls=max_calls)

    def has_closed_call(self, text: str) -> bool:
        return has_closed_call(text)

    def write(self, name: str, arguments: Mapping[str, object]) -> str:
        call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"{OPENING}\n{call}\n{CLOSING}"

    def empty_text(self, name: str) -> str:
        return ""


class NoCalls(JsonCalls):
    """Implements `CallFormat` for a prompt without tools: whatever the policy writes is its answer."""

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
            return TagCalls(tools)
        case Calls.NONE:
            return NoCalls()
