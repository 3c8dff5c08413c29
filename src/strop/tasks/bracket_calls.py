"""Reads calls written as `[Get Weather(city="Rome", days=3), Other()]`, ToolACE's form (arXiv:2409.00920).

Names may hold spaces, dots and slashes. Values are literals as Python or JSON writes them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from strop.tasks.readers import Unreadable

_JSON_WORDS = {"true": True, "false": False, "null": None}
_KEY = re.compile(r"\s*([A-Za-z_$][\w.$\[\]-]*)\s*=\s*")
_CALL = re.compile(r"\[[^\[\]()\n]+\(\s*[A-Za-z_$][\w.$-]*\s*=[^=]")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def parse_bracket_calls(text: str, names: Collection[str] | None = None) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of each call.

    Args:
        names: of the functions that may be called; any by default.

    Raises:
        Unreadable: `text` is no such list, or calls what it may not.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise Unreadable(f"no list of calls: {text[:80]!r}")
    calls = []
    for call in _split(text[1:-1]):
        name, opening, rest = _name_of(call.strip(), names or ())
        if not opening or not rest.rstrip().endswith(")") or not name:
            raise Unreadable(f"no call of the form name(key=value): {call.strip()[:80]!r}")
        if names is not None and name not in names:
            raise not_offered(name)
        calls.append((name, _arguments(rest.rstrip()[:-1])))
    if not calls:
        raise Unreadable("an empty list of calls")
    return calls


def holds_bracket_call(text: str, names: Collection[str]) -> bool:
    """Whether a call stands anywhere in `text`: of one of `names`, or of any function with an argument."""
    return bool(_CALL.search(text)) or any(re.search(rf"\[\s*{re.escape(name)}\s*\(", text) for name in names)


def not_offered(name: str) -> Unreadable:
    """What is told of a call of a function that is none of those offered."""
    return Unreadable(f"a call of {name!r}, which is none of its functions")


def _name_of(call: str, names: Collection[str]) -> tuple[str, str, str]:
    """The name, its bracket and what follows: by the longest name that is offered, for names may hold brackets."""
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
        json.dumps(value, allow_nan=False)  # Python has literals that JSON has not: sets, bytes, complex numbers, 1e999
        return value
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Unreadable(f"a value that is no literal of JSON: {text[:80]!r}") from error


class _WithoutJson(ast.NodeTransformer):
    """true, false and null for True, False and None."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _split(text: str) -> list[str]:
    """`text` at the commas that stand in no bracket and no quotes; blank pieces are left out."""
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
