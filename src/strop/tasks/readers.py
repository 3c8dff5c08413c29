"""Reads one text out of a row, whatever the row's publishers called the column and wrapped around the text."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from strop.tasks.boxes import boxed

Row = Mapping[str, Any]

_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s${}\\]+)")  # as TeX takes it; some published solutions write so


class Unreadable(ValueError):  # noqa: N818 - named for what it says of the row
    """A row that does not hold what was expected of it: what is wrong, without the place, which the caller knows."""


class MissingColumn(Unreadable):
    """The row has no such column at all: where no row before it had it, the whole file is likely of another kind."""

    def __init__(self, column: str, row: Row) -> None:
        super().__init__(f"no column {column!r}. It has {', '.join(map(repr, row)) or 'none'}")
        self.column = column


class Reader(Protocol):
    def __call__(self, row: Row) -> str:
        """The text. Raises `Unreadable`."""


@dataclass(frozen=True, slots=True)
class Read:
    """What stands in a column: a text, or a number as text. `column` may be a path into objects: reward_model.ground_truth.

    What is left after each step goes on to the next: the message, what is behind and before the marks, the box.
    """

    column: str
    role: str = field(default="", kw_only=True)  # the column holds messages; the text of the last one of this role
    after: str = field(default="", kw_only=True)  # what follows the last of these marks
    before: str = field(default="", kw_only=True)  # what precedes the last of these marks
    is_boxed: bool = field(default=False, kw_only=True)  # what stands in the last \boxed{}
    is_list: bool = field(default=False, kw_only=True)  # a list is a text, its elements separated by commas
    is_first: bool = field(default=False, kw_only=True)  # the first of a list of texts that are all right

    def __call__(self, row: Row) -> str:
        value = find(row, self.column)
        if self.role:
            value = self._message(value)
        if isinstance(value, list) and self.is_first:
            if not value:
                raise Unreadable(f"its {self.column!r} is an empty list")
            value = value[0]
        text = _joined(value, self.column) if self.is_list else as_text(value, self.column)
        if self.after:
            _, mark, text = text.rpartition(self.after)
            if not mark:
                raise Unreadable(f"its {self.column!r} holds no {self.after!r}, after which the text should stand")
        if self.before:
            head, mark, _ = text.rpartition(self.before)
            if not mark:
                raise Unreadable(f"its {self.column!r} holds no {self.before!r}, before which the text should stand")
            text = head
        return self._unboxed(text) if self.is_boxed else text

    def _message(self, value: Any) -> Any:
        messages = value if isinstance(value, list) else []
        said = [each.get("content") for each in messages if isinstance(each, Mapping) and each.get("role") == self.role]
        if not said:
            raise Unreadable(f"its {self.column!r} holds no message of the role {self.role!r}")
        return said[-1]

    def _unboxed(self, text: str) -> str:
        bare = next(iter(deque(_BARE_BOX.finditer(text), maxlen=1)), None)
        boxes = boxed(text if bare is None else text[bare.end() :], is_fbox_one=True)
        if not boxes and bare is None:
            raise Unreadable(f"its {self.column!r} holds no \\boxed{{}} with the answer")
        return boxes[-1] if boxes or bare is None else bare[1].rstrip(".,;")


@dataclass(frozen=True, slots=True)
class AsJson:
    """A column as JSON text, for facts that are no texts: the list of all right answers, test cases."""

    column: str

    def __call__(self, row: Row) -> str:
        return json.dumps(find(row, self.column), ensure_ascii=False)


class Fill:
    """A wording with places, each filled by a reader: for data sets that publish the parts of a question alone."""

    def __init__(self, wording: str, **parts: Reader) -> None:
        self.wording = wording
        self.parts = parts

    def __call__(self, row: Row) -> str:
        text = self.wording
        for name, read in self.parts.items():
            text = text.replace(f"{{{name}}}", read(row))
        return text


def find(row: Row, column: str) -> Any:
    """The value at a path such as `reward_model.ground_truth`; a column whose name has a dot is found as it is."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise MissingColumn(column, row)
        value = value[name]
    return value


def as_text(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        what = "is empty" if value is None else f"is a {type(value).__name__}"
        raise Unreadable(f"its {column!r} {what}; a text or a number was expected")
    if isinstance(value, float) and not math.isfinite(value):
        raise Unreadable(f"its {column!r} is {value}, which is no number")
    return str(value)


def word_of(value: Any, column: str) -> str:
    """A value that rows are told apart by: none is empty, and truth is as JSON writes it."""
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, bool) else as_text(value, column)


def _joined(value: Any, column: str) -> str:
    if not isinstance(value, list) or not value:
        raise Unreadable(f"its {column!r} is no list with elements")
    return ", ".join(as_text(each, column) for each in value)
