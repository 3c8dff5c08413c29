"""Converts published demonstrations to conversations: one small function for each data set."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from strop.errors import TaskError, did_you_mean
from strop.run_directory import parse_json
from strop.tasks.conversations import Conversation, call_text, calls_of, conversation_of, tools_text
from strop.tasks.readers import Row, Unreadable, as_text, find
from strop.tools.python import SIGNATURE, TOOL_NAME

ChatMessage: TypeAlias = Mapping[str, Any]
"""A message in the standard chat format."""

_JSON_WORDS = {"true": True, "false": False, "null": None}
_KEY = re.compile(r"\s*([A-Za-z_$][\w.$\[\]-]*)\s*=\s*")
_CALL = re.compile(r"\[[^\[\]()\n]+\(\s*[A-Za-z_$][\w.$-]*\s*=[^=]")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def parse_bracket_calls(text: str, names: Collection[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, arguments) of each call.

    Args:
        names: of the functions that may be called.

    Raises:
        Unreadable: `text` is no such list, or calls another function.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise Unreadable(f"no list of calls: {text[:80]!r}")
    calls = []
    for call in _split(text[1:-1]):
        name, opening, rest = _name_of(call.strip(), names)
        if not opening or not rest.rstrip().endswith(")") or not name:
            raise Unreadable(f"no call of the form name(key=value): {call.strip()[:80]!r}")
        if name not in names:
            raise not_offered(name)
        calls.append((name, _arguments(rest.rstrip()[:-1])))
    if not calls:
        raise Unreadable("an empty list of calls")
    return calls


def holds_bracket_call(text: str, names: Collection[str]) -> bool:
    """Return whether `text` holds a call of one of `names`, or of any function with an argument."""
    return bool(_CALL.search(text)) or any(re.search(rf"\[\s*{re.escape(name)}\s*\(", text) for name in names)


def not_offered(name: str) -> Unreadable:
    """Return the error for a call of a function that is not offered."""
    return Unreadable(f"a call of {name!r}, which is none of its functions")


def _name_of(call: str, names: Collection[str]) -> tuple[str, str, str]:
    """Return the name, its bracket and the rest; the longest name that is offered wins, because names may hold brackets."""
    for name in sorted(names, key=len, reverse=True):
        rest = call.removeprefix(name).lstrip()
        if call.startswith(name) and rest.startswith("("):
            return name, "(", rest[1:]
    name, opening, rest = call.partition("(")
    return name.strip(), opening, rest


def _arguments(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in _split(text):
        key = _KEY.match(part)
        if key is None:
            raise Unreadable(f"an argument without a name: {part.strip()[:80]!r}")
        if key[1] in found:
            raise Unreadable(f"the argument {key[1]!r} twice")
        found[key[1]] = _literal(part[key.end() :].strip())
    return found


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(_WithoutJson().visit(ast.parse(text, mode="eval").body))
        json.dumps(value, allow_nan=False)  # Python has literals that JSON lacks: sets, bytes, complex numbers, 1e999
        return value
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Unreadable(f"a value that is no literal of JSON: {text[:80]!r}") from error


class _WithoutJson(ast.NodeTransformer):
    """Replaces true, false and null by True, False and None."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _split(text: str) -> list[str]:
    """Split `text` at commas outside brackets and quotes; leave out blank pieces."""
    pieces, closing, start, quote = [], list[str](), 0, ""
    position = 0
    while position < len(text):
        sign = text[position]
        if quote:
            if sign == "\\":
                position += 1
            elif sign == quote:
                quote = ""
        elif sign in "\"'" and (closing or "=" in text[start:position]):  # an apostrophe in a name quotes nothing
            quote = sign
        elif sign in _CLOSING:
            closing.append(_CLOSING[sign])
        elif closing and sign == closing[-1]:
            closing.pop()
        elif sign == "," and not closing:
            pieces.append(text[start:position])
            start = position + 1
        position += 1
    if quote or closing:
        raise Unreadable(f"a quote or bracket that is not closed: {text[:80]!r}")
    return [piece for piece in (*pieces, text[start:]) if piece.strip()]


PYTHON_TOOL: Mapping[str, Any] = {"name": TOOL_NAME, **{key: SIGNATURE[key] for key in ("description", "parameters")}}

_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
_GLAIVE_CALL = re.compile(r"<functioncall>(.*)", re.DOTALL)
_GLAIVE_ARGUMENTS = re.compile(r"(\"arguments\"\s*:\s*)'(.*)'(\s*\}\s*)$", re.DOTALL)
_BLOCK = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```[ \t\r]*$", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_TAG_RESULT = re.compile(r"<result>(.*?)</result>", re.DOTALL)
_TAG = re.compile(r"</?(?:search|python)>")
_TAG_CALL = re.compile(r"<(?P<name>search|python)>(?P<content>(?:(?!<(?:search|python)>).)*)</(?P=name)>$", re.DOTALL)
_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converter:
    """One data set: its place, the source of its schema, and the function here that reads the messages of a row.

    The function returns them in the standard chat format (role, content, tool_calls), and raises `Unreadable` for a row that
    has none.
    """

    hub: str
    source: str
    read: str
    subset: str | None = None
    split: str = "train"

    def __call__(self, row: Row, *, id: str, source: str) -> Conversation:
        return conversation_of({"messages": globals()[self.read](row)}, id=id, source=source)


def bracket_calls(row: Row) -> list[ChatMessage]:
    """Calls have the form `[Name(a="x", n=1), Other()]`; the system message holds the functions as a JSON list."""
    tools = _list_within(as_text(find(row, "system"), "system"))
    names = _names(tools)
    said = _system(tools_text(map(_as_object, tools)))
    for role, value in _turns(row, {**_SHAREGPT, "tool": "tool"}):
        if role == "assistant" and value.lstrip().startswith("["):
            said.append(_calling(parse_bracket_calls(value, names)))
        elif role == "assistant" and holds_bracket_call(value, names):
            raise Unreadable(f"a call is inside other text: {value[:80]!r}")
        else:
            said.append({"role": role, "content": value})
    return said


def sharegpt(row: Row) -> list[ChatMessage]:
    """Turns from human, gpt, function_call and observation; `tools` is a JSON list, or its text."""
    tools = _tools(row.get("tools"))
    said = _system("\n\n".join(filter(None, (str(row.get("system") or "").strip(), tools_text(tools)))))
    for role, value in _turns(row, {**_SHAREGPT, "function_call": "call", "observation": "tool"}):
        said.append(_calling(_json_calls(value, _names(tools))) if role == "call" else {"role": role, "content": value})
    return said


def glaive(row: Row) -> list[ChatMessage]:
    """`system` lists functions as JSON objects, `chat` is one text with USER:, ASSISTANT: and FUNCTION RESPONSE:."""
    system = as_text(find(row, "system"), "system").removeprefix("SYSTEM:").strip()
    tools = _objects_within(system)
    said: list[ChatMessage] = [{"role": "system", "content": tools_text(tools) if tools else system}]
    pieces = _GLAIVE_TURN.split(as_text(find(row, "chat"), "chat"))
    for speaker, text in zip(pieces[1::2], pieces[2::2], strict=True):
        text = text.replace("<|endoftext|>", "").strip()
        if speaker == "ASSISTANT" and (call := _GLAIVE_CALL.search(text)):
            # The arguments are JSON within single quotes, which JSON itself does not know.
            plain = _GLAIVE_ARGUMENTS.sub(lambda found: found[1] + found[2].replace("\\'", "'") + found[3], call[1])
            said.append(_calling(_json_calls(plain, _names(tools)), after=text[: call.start()].strip()))
        else:
            said.append({"role": _GLAIVE_ROLES[speaker], "content": text})
    return said


def magicoder(row: Row) -> list[ChatMessage]:
    """A problem and a solution with one block of code, which becomes the code of a call. Only Python, which the tool can run.

    Rows with several blocks are refused, because any may be the solution, and programs that read an input that the row lacks.
    """
    problem, solution = ("problem", "solution") if "problem" in row else ("instruction", "response")
    question, answer = as_text(find(row, problem), problem), as_text(find(row, solution), solution)
    language = str(row.get("lang", "python")).lower()
    if language != "python":
        raise Unreadable(f"its solution is in {language}, which the Python tool cannot run")
    block = _only_python(answer)
    code = block[2].strip()
    if _reads_input(ast.parse(code)):
        raise Unreadable("its solution reads a standard input that the row does not have")
    call = _calling([(TOOL_NAME, {"code": code, "input": ""})], after=answer[: block.start()].strip())
    return [*_system(tools_text([PYTHON_TOOL])), {"role": "user", "content": question}, call]


def _only_python(text: str) -> re.Match[str]:
    """Return the only block of Python in `text`. Raises `Unreadable` if there is none, or more than one."""
    if "```" in _BLOCK.sub("", text):
        raise Unreadable("its solution has a block of code that does not open and close on lines of its own")
    blocks = []
    for each in _BLOCK.finditer(text):
        language = each[1].strip().lower()
        if language in _PYTHON or (not language and _is_python(each[2])):
            blocks.append(each)
    if len(blocks) > 1:
        raise Unreadable(f"its solution holds {len(blocks)} blocks of Python, of which any may be the one to run")
    if not blocks or not _is_python(blocks[0][2]):
        raise Unreadable("its solution holds no block of Python that parses")
    return blocks[0]


def _reads_input(tree: ast.AST) -> bool:
    """Whether the program reads its standard input anywhere: input(), sys.stdin, open(0)."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="input")) | ast.Call(func=ast.Name(id="open"), args=[ast.Constant(value=0), *_]):
                return True
            case ast.Attribute(value=ast.Name(id="sys"), attr="stdin"):
                return True
            case ast.ImportFrom(module="sys", names=names) if any(each.name == "stdin" for each in names):
                return True
    return False


def chat(row: Row) -> Any:
    """A list of messages with role and content, as chat templates take it."""
    return row.get("messages")


def nemotron(row: Row) -> list[ChatMessage]:
    """`input` is the conversation, as messages or one text, and `output` the answer to it."""
    if row.get("reasoning") == "on":
        raise Unreadable("its answer reasons in <think> tags, which the cold start without reasoning does not teach")
    given, system = find(row, "input"), str(row.get("system_prompt") or "").strip()
    before = given if isinstance(given, list) else [{"role": "user", "content": as_text(given, "input")}]
    opens_with_system = bool(before) and isinstance(before[0], Mapping) and before[0].get("role") == "system"
    if system and not opens_with_system:
        before = [{"role": "system", "content": system}, *before]
    return [*before, {"role": "assistant", "content": as_text(find(row, "output"), "output").strip()}]


def tool_star(row: Row) -> list[ChatMessage]:
    """`output` is one text with calls in tags, each followed by its result in <result> tags.

    `instruction` is the system message where `input` holds the question, as in the prompts of the same authors' RL data.
    """
    instruction, question = str(row.get("instruction") or "").strip(), str(row.get("input") or "").strip()
    said = _system(instruction if question else "")
    said.append({"role": "user", "content": question or instruction})
    *played, last = _TAG_RESULT.split(as_text(find(row, "output"), "output").strip())
    for call, result in zip(played[::2], played[1::2], strict=True):
        said += [{"role": "assistant", "content": _tag_call(call)}, {"role": "tool", "content": result.strip()}]
    return said + ([{"role": "assistant", "content": _without_calls(last.strip())}] if last.strip() else [])


def _tag_call(text: str) -> str:
    """Thoughts with a call in a tag at their end, which becomes JSON. Raises `Unreadable` where there is none."""
    called = _TAG_CALL.search(text.rstrip())
    if called is None:
        raise Unreadable(f"a result answers no call: {text[-80:]!r}")
    name, content = called["name"], called["content"]
    arguments = {"query": content} if name == "search" else {"code": content, "input": ""}
    return _without_calls(text[: called.start()].lstrip()) + call_text(name, arguments)


def _without_calls(text: str) -> str:
    """`text`, if it holds no call in tags. Raises `Unreadable`: no result answers that one."""
    if tag := _TAG.search(text):
        raise Unreadable(f"a call that no result answers: {text[tag.start() :][:80]!r}")
    return text


_TABLES = tomllib.loads(Path(__file__).with_name("converters.toml").read_text(encoding="utf-8"))
CONVERTERS: Mapping[str, Converter] = {name: Converter(**table) for name, table in _TABLES.items()}
"""By the name that `strop data convert` takes."""


def converter_of(name: str) -> Converter:
    """Raises `TaskError` naming the nearest."""
    if name not in CONVERTERS:
        hint = did_you_mean(name, CONVERTERS)
        raise TaskError(f"{name!r} is no data set of demonstrations; those known are {', '.join(CONVERTERS)}.{hint}")
    return CONVERTERS[name]


def _turns(row: Row, roles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The role and the text of each turn; `roles` by sender."""
    turns = find(row, "conversations")
    if not isinstance(turns, list) or not turns:
        raise Unreadable("its 'conversations' is no list of turns")
    for turn in turns:
        sender, value = (turn.get("from"), turn.get("value")) if isinstance(turn, Mapping) else (None, None)
        if not isinstance(sender, str) or not isinstance(value, str):
            raise Unreadable(f"a turn must have from and value, both texts, not {str(turn)[:80]}")
        if sender not in roles:
            raise Unreadable(f"a turn is from {sender!r}, which is none of {', '.join(roles)}")
        yield roles[sender], value.strip()


def _tools(value: Any) -> list[Mapping[str, Any]]:
    if value is None or value == "":
        return []
    try:
        tools = parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise Unreadable(f"its 'tools' is not JSON: {error}") from error
    if isinstance(tools, list):
        tools = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Unreadable("its 'tools' is no list of objects")
    return tools


def _names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(tool.get("name")) for tool in tools]


def _system(text: str) -> list[ChatMessage]:
    return [{"role": "system", "content": text}] if text else []


def _calling(calls: Iterable[tuple[str, Mapping[str, Any]]], *, after: str = "") -> ChatMessage:
    called = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {"role": "assistant", "content": after, "tool_calls": called}


def _json_calls(text: str, names: Collection[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """One call, or a list of calls, as JSON; arguments that are JSON in a text are taken out of it.

    Args:
        names: of the functions that are offered; a call of another is refused.
    """
    try:
        calls = calls_of(parse_json(text))
    except ValueError as error:
        raise Unreadable(f"a call is no JSON object of name and arguments: {error}: {text[:80]!r}") from error
    for name, _ in calls:
        if name not in names:
            raise not_offered(name)
    return calls


def _objects_within(text: str) -> list[Mapping[str, Any]]:
    """Return the JSON objects in `text`, in order."""
    found: list[Mapping[str, Any]] = []
    end = 0
    while (start := text.find("{", end)) >= 0:
        value, end = _decoded(text, start)
        found.append(value)
    return found


def _list_within(text: str) -> list[Mapping[str, Any]]:
    """Return the first JSON list of objects in `text`; empty if there is none."""
    opening = re.search(r"\[\s*\{\s*\"", text)
    if opening is None:
        return []
    value, _ = _decoded(text, opening.start())
    if not all(isinstance(each, Mapping) for each in value):
        raise Unreadable("the functions of its system message are not all objects")
    return list(value)


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"a function of its system message is not JSON: {error}") from error


def _as_object(tool: Mapping[str, Any]) -> dict[str, Any]:
    """ToolACE says "dict" where JSON Schema says "object"."""

    def renamed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: "object" if (key, each) == ("type", "dict") else renamed(each) for key, each in value.items()}
        return [renamed(each) for each in value] if isinstance(value, list) else value

    return {key: renamed(value) for key, value in tool.items() if key in ("name", "description", "parameters")}


def _is_python(code: str) -> bool:
    try:
        return bool(ast.parse(code).body)
    except (SyntaxError, ValueError):
        return False
