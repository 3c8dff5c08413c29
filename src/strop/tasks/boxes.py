r"""Finds the content of `\boxed{}` in data sets' solutions and policies' answers."""

from __future__ import annotations

import re

# The start of a box, another escaped character, or a brace. A regex cannot balance braces, but it can skip other text.
_BOXED, _FRAMED = (
    re.compile(rf"(?P<box>\\(?:{names})\s*\{{)|\\(?!\\(?:{names})\s*\{{)[\s\S]|[{{}}]") for names in ("boxed", "boxed|fbox")
)


def boxed(text: str, *, is_fbox_one: bool = False) -> list[str]:
    r"""Return the content of each `\boxed{...}` whose braces balance, in order of their opening. Escaped braces do not count.

    Takes one pass over the text. `is_fbox_one`: `\fbox{...}` counts too, since some data sets use it.
    """
    openings: list[int | None] = []  # of open braces: the start of a box, or None for another brace
    closed: list[tuple[int, int]] = []
    for token in (_FRAMED if is_fbox_one else _BOXED).finditer(text):
        if token["box"]:
            openings.append(token.end())
        elif token[0] == "{":
            openings.append(None)
        elif token[0] == "}" and openings and (opening := openings.pop()) is not None:
            closed.append((opening, token.start()))
    return [text[opening:end] for opening, end in sorted(closed)]
