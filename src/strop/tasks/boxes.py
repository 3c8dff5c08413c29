r"""Finds what stands in the `\boxed{}` of a text: the one scanner of data sets' solutions and of policies' answers."""

from __future__ import annotations

import re

# A box, an escaped character that begins none, or a brace. A regex cannot balance braces, but it can skip all else.
_BOXED, _FRAMED = (
    re.compile(rf"(?P<box>\\(?:{names})\s*\{{)|\\(?!\\(?:{names})\s*\{{)[\s\S]|[{{}}]") for names in ("boxed", "boxed|fbox")
)


def boxed(text: str, *, is_fbox_one: bool = False) -> list[str]:
    r"""What stands inside each `\boxed{...}` whose braces balance, in order of their opening. Escaped braces do not count.

    One pass over the text, however deep its braces go. `is_fbox_one`: a `\fbox{...}` is one too, as some data sets write.
    """
    openings: list[int | None] = []  # of the braces that are open: where a box begins, None where a brace is just a brace
    closed: list[tuple[int, int]] = []
    for token in (_FRAMED if is_fbox_one else _BOXED).finditer(text):
        if token["box"]:
            openings.append(token.end())
        elif token[0] == "{":
            openings.append(None)
        elif token[0] == "}" and openings and (opening := openings.pop()) is not None:
            closed.append((opening, token.start()))
    return [text[opening:end] for opening, end in sorted(closed)]
