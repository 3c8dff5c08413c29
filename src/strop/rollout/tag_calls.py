"""Tool calls as ARPO (arXiv 2507.19849) writes them: a tag with the tool's name around one text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from strop.rollout.tool_calls import Call, FailedCall, ParsedCall
from strop.tools.protocol import ToolSpec
from strop.types import ToolOutcome

_ALWAYS = ("search", "python")  # what a policy taught by ARPO's prompt may call, be it offered or not


class TagCalls:
    """Implements `CallFormat` for the tools that are offered."""

    wrapper = (" <result>\n", "\n</result>")
    continues_turn = True

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._specs = {tool.name: tool for tool in tools}
        self._names = tuple(dict.fromkeys((*_ALWAYS, *self._specs)))
        self._tag = re.compile(f"<(/?)({'|'.join(map(re.escape, self._names))})>")
        self.stop_strings = tuple(f"</{name}>" for name in self._names)

    def parse(self, text: str, *, max_calls: int) -> list[Call]:
        """The tags that `text` leaves open, and the call that it ends with; empty where there is neither. `max_calls` is 1 at
        least: more than one call cannot be written, and a tag that is left open takes its place from none.

        A call begins at the last opening tag of its name, as in the released code.
        """
        tags = list(self._tag.finditer(text))
        if not tags:
            return []
        last = tags[-1]
        name = last.group(2)
        if not last.group(1):
            return [*_left_open(text, tags, len(text))]
        num_before = next((at for at in reversed(range(len(tags) - 1)) if tags[at].group() == f"<{name}>"), None)
        if num_before is None:
            return [_failed_tag(name, "", ToolOutcome.MALFORMED, f"</{name}> without <{name}>")]
        opening = tags[num_before]
        left_open = [call for call in _left_open(text, tags[:num_before], opening.start()) if call.name != name]
        content = text[opening.end() : last.start()].strip("\n")
        if not content.strip():
            return [*left_open, _failed_tag(name, content, ToolOutcome.MALFORMED, f"nothing between <{name}> and </{name}>")]
        arguments = self._arguments(name, content)
        arguments_text = json.dumps(arguments, ensure_ascii=False)
        return [*left_open, ParsedCall(name=name, arguments=arguments, arguments_text=arguments_text)]

    def has_closed_call(self, text: str) -> bool:
        return any(tag.group(1) for tag in self._tag.finditer(text))

    def write(self, name: str, arguments: Mapping[str, object]) -> str:
        """The tag's text is the tool's first argument; others must be empty texts, as `parse` makes them."""
        written = "".join(str(value) for value in arguments.values() if isinstance(value, str))
        is_one_text = sum(value != "" for value in arguments.values()) == 1 and bool(written.strip())
        is_first = name not in self._specs or arguments.get(next(iter(self._arguments(name, "")))) == written
        if name not in self._names or not is_one_text or not is_first or self._tag.search(written):
            raise ValueError(
                f"a call of {name!r} cannot be written as a tag, which holds one text and no tag of a tool: {dict(arguments)}"
            )
        return f"<{name}>{written}</{name}>"

    def empty_text(self, name: str) -> str:
        return f"Tool({name}) returned empty output."  # the released code's words

    def _arguments(self, name: str, content: str) -> Mapping[str, object]:
        """The tag's text as the tool's first argument. Others that it cannot do without are empty, if they are texts."""
        schema = self._specs[name].parameters if name in self._specs else {}
        properties: Mapping[str, object] = schema.get("properties", {})
        first = next(iter(properties), next(iter(schema.get("required", ())), "text"))
        others = [each for each in schema.get("required", ()) if each != first and _is_text(properties.get(each))]
        return {first: content} | dict.fromkeys(others, "")


def _left_open(text: str, tags: Sequence[re.Match[str]], end: int) -> list[FailedCall]:
    """Of the opening tags behind the last closing one, the last of each name, in order, with the text up to what follows it."""
    found: dict[str, FailedCall] = {}
    for tag in reversed(tags):
        if tag.group(1):
            break
        name = tag.group(2)
        if name not in found:
            problem = f"<{name}> without </{name}>"
            found[name] = _failed_tag(name, text[tag.end() : end], ToolOutcome.UNCLOSED, problem)
        end = tag.start()
    return list(reversed(found.values()))


def _is_text(schema: object) -> bool:
    """Of an argument's schema, which may be a bare true."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _failed_tag(name: str, block: str, outcome: ToolOutcome, problem: str) -> FailedCall:
    return FailedCall(
        name=name,
        arguments_text=block,
        outcome=outcome,
        text=f"Error: the call could not be read: {problem}. Write <{name}>...</{name}>.",
    )
