"""Reads texts and choices out of a row, whatever its columns are called; those of published data sets are in published.toml.

An entry says where a data set is on the hub, and what in its columns makes a task; it reads local files of that schema, too.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import math
import pickle
import random
import re
import tomllib
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from strop.answer_text import boxed
from strop.run_directory import parse_json

Row = Mapping[str, Any]

_END_CHARS = 500  # of a solution, which ends with its answer; of 22 hostile texts as long none took 0.3 s to parse
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s${}\\]+)")  # TeX accepts it, and some published solutions use it


class Unreadable(ValueError):  # noqa: N818 - named for what it says of the row
    """A row without an expected value. The message has no place, which the caller knows."""


Reader: TypeAlias = Callable[[Row], str]
"""Returns a text of a row. Raises `Unreadable`."""


@dataclass(frozen=True, slots=True)
class Read:
    """Reads the text or number of a column, which may be a path into objects: reward_model.ground_truth.

    The steps apply in this order: the message, the text after and before the marks, the box or what is parsed.
    """

    column: str
    role: str = field(default="", kw_only=True)  # the column holds messages; the text of the last one of this role
    after: str = field(default="", kw_only=True)  # what follows the last of these marks
    before: str = field(default="", kw_only=True)  # what precedes the last of these marks
    is_boxed: bool = field(default=False, kw_only=True)  # the content of the last \boxed{}
    is_parsed: bool = field(default=False, kw_only=True)  # the same, or without a box what math-verify finds at the end
    is_list: bool = field(default=False, kw_only=True)  # a list is a text, its elements separated by commas
    is_first: bool = field(default=False, kw_only=True)  # the first of a list of right answers
    has_underscores: bool = field(default=False, kw_only=True)  # instead of spaces

    def __call__(self, row: Row) -> str:
        value = find(row, self.column)
        if self.role:
            value = self._message(value)
        if isinstance(value, list) and self.is_first:
            if not value:
                raise Unreadable(f"its {self.column!r} is an empty list")
            value = value[0]
        text = _joined(value, self.column) if self.is_list else as_text(value, self.column)
        if self.has_underscores:
            text = text.replace("_", " ")
        if self.after:
            _, mark, text = text.rpartition(self.after)
            if not mark:
                raise Unreadable(f"its {self.column!r} holds no {self.after!r}, after which the text is expected")
        if self.before:
            head, mark, _ = text.rpartition(self.before)
            if not mark:
                raise Unreadable(f"its {self.column!r} holds no {self.before!r}, before which the text is expected")
            text = head
        if self.is_parsed and not re.search(r"\\(?:boxed|fbox)", text):
            return self._parsed(text)
        return self._unboxed(text) if self.is_boxed or self.is_parsed else text

    def _message(self, value: Any) -> Any:
        messages = value if isinstance(value, list) else []
        said = [each.get("content") for each in messages if isinstance(each, Mapping) and each.get("role") == self.role]
        if not said:
            raise Unreadable(f"its {self.column!r} holds no message of the role {self.role!r}")
        return said[-1]

    def _parsed(self, text: str) -> str:
        from math_verify import parse

        logging.getLogger("math_verify.parser").setLevel(logging.ERROR)  # it warns that there is no time limit
        found = parse(text[-_END_CHARS:], parsing_timeout=None)  # the limit is a signal, which only the main thread receives
        if not found:
            raise Unreadable(f"math-verify finds no answer in the last {_END_CHARS} characters of its {self.column!r}")
        return str(found[-1]).rstrip(" *.")  # the second is the text of the first, with the end of bold type

    def _unboxed(self, text: str) -> str:
        bare = next(iter(deque(_BARE_BOX.finditer(text), maxlen=1)), None)
        boxes = boxed(text if bare is None else text[bare.end() :], is_fbox_one=True)
        if not boxes and bare is None:
            raise Unreadable(f"its {self.column!r} holds no \\boxed{{}} with the answer")
        return boxes[-1] if boxes or bare is None else bare[1].rstrip(".,;")


def as_texts(row: Row, *, column: str) -> str:
    """Read a column of right answers, which may be one text or number, as a JSON list of texts."""
    value = find(row, column)
    values = value if isinstance(value, list) else [value]
    return json.dumps([as_text(each, column) for each in values], ensure_ascii=False)


def filled(row: Row, *, wording: str, numbers: Reader, target: Reader) -> str:
    """Fill {numbers} and {target} of a wording, for a data set that publishes the parts of a question separately."""
    return wording.replace("{numbers}", numbers(row)).replace("{target}", target(row))


def find(row: Row, column: str) -> Any:
    """Return the value at a path such as `reward_model.ground_truth`, or of the column with exactly this name."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise Unreadable(f"no column {column!r}. It has {', '.join(map(repr, row)) or 'none'}")
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
    """Return a value by which rows are selected, as text: None is empty, and booleans are as in JSON."""
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, bool) else as_text(value, column)


def _joined(value: Any, column: str) -> str:
    if not isinstance(value, list) or not value:
        raise Unreadable(f"its {column!r} is no list with elements")
    return ", ".join(as_text(each, column) for each in value)


_LETTERS = "ABCDEFGHIJ"


def choices(row: Row, *, question: str, right: str, wrong: Sequence[str]) -> str:
    """The question with its lettered answers below it, in an order that only the question decides.

    Every model and every attempt sees the same order, and the right answer is not always in the same place.
    """
    lines = [f"({letter}) {text}" for letter, text in zip(_LETTERS, _shuffled(row, question, right, wrong), strict=False)]
    return "\n".join([Read(question)(row).strip(), "", *lines, "", "Answer with the letter of the right choice."])


def right_letter(row: Row, *, question: str, right: str, wrong: Sequence[str]) -> str:
    """The letter of the right answer among the `choices`."""
    return _LETTERS[_shuffled(row, question, right, wrong).index(Read(right)(row).strip())]


def _shuffled(row: Row, question: str, right: str, wrong: Sequence[str]) -> list[str]:
    texts = [Read(column)(row).strip() for column in (right, *wrong)]
    seed = hashlib.blake2b(Read(question)(row).strip().encode(), digest_size=8).digest()
    random.Random(int.from_bytes(seed)).shuffle(texts)
    return texts


def listed(row: Row, *, question: str, choices: str | Sequence[str]) -> str:
    """The question with the choices of a list, or of several columns, below it, lettered in their order."""
    texts = find(row, choices) if isinstance(choices, str) else [find(row, name) for name in choices]
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(_LETTERS):
        raise Unreadable(f"its {choices!r} is no list of 2 to {len(_LETTERS)} choices")
    lines = [f"{letter}. {as_text(text, str(choices))}" for letter, text in zip(_LETTERS, texts, strict=False)]
    return "\n".join([Read(question)(row), *lines])


def letter_at(row: Row, *, column: str) -> str:
    """The letter of a choice, of which the column holds the number, from 0."""
    number = find(row, column)
    if not isinstance(number, int) or not 0 <= number < len(_LETTERS):
        raise Unreadable(f"its {column!r} is {number!r}, not the number of a choice, from 0")
    return _LETTERS[number]


def contest_question(row: Row, *, column: str) -> str:
    """A programming problem in the words of LiveCodeBench's `lcb_runner/prompts/code_generation.py`.

    A row with `starter_code` asks for its function, another for a program that reads its input.
    """
    starter = row.get("starter_code")
    form = (
        "You will use the following starter code to write the solution to the problem and enclose your code within delimiters."
        if starter
        else "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample"
        " inputs). Enclose your code within delimiters as follows."
    )
    return (
        f"### Question:\n{Read(column)(row)}\n\n### Format: {form}\n```python\n{starter or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )


def apps_tests(row: Row) -> str:
    """The tests of a problem of APPS, as `kind = "code"` reads them. Inputs and outputs of a program may be lists of lines."""
    text = Read("input_output")(row)
    try:
        tests = parse_json(text)
        is_function, sides = bool(tests.get("fn_name")), {side: list(tests[side]) for side in ("inputs", "outputs")}
        if not is_function:
            sides = {side: ["\n".join(each) if isinstance(each, list) else each for each in sides[side]] for side in sides}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Unreadable(f"its tests cannot be read: {error}") from error
    num_inputs, num_outputs = map(len, sides.values())
    if not num_inputs or num_inputs != num_outputs:
        raise Unreadable(f"it has {num_inputs} inputs and {num_outputs} outputs of tests")
    if is_function and not row.get("starter_code"):  # the question would ask for a program
        raise Unreadable("its tests call a function, whose head it does not show")
    return json.dumps({**tests, **sides})


def contest_tests(row: Row) -> str:
    """All tests of a problem of LiveCodeBench, as `kind = "code"` reads them."""
    try:
        tests = [*parse_json(_unpacked(row, "public_test_cases")), *parse_json(_unpacked(row, "private_test_cases"))]
        names = {"fn_name": parse_json(Read("metadata")(row)).get("func_name")}
        return json.dumps({**names, **{f"{side}s": [test[side] for test in tests] for side in ("input", "output")}})
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise Unreadable(f"its tests cannot be read: {error}") from error


def _unpacked(row: Row, column: str) -> str:
    """The JSON of a column; `code_generation_lite` has the private tests as base64 of a compressed pickle of it."""
    text = Read(column)(row)
    if text.startswith("["):
        return text
    return as_text(_PlainUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load(), column)


class _PlainUnpickler(pickle.Unpickler):
    """Loads texts and numbers only: a class or function in a pickle could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, not a text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One data set. `facts` that a row leaves out or empty are left out of its task; question and answer must be there.

    Rows that are not as `where` says are no tasks to play, as their publishers put it, and are left out unless a recipe says
    otherwise.
    """

    hub: str
    question: Reader
    answer: Reader
    source: str  # who publishes the schema, and where
    facts: Mapping[str, Reader] = field(default_factory=dict)
    id: Reader | None = None  # by default the row's place
    subset: str | None = None
    train_split: str = "train"
    test_split: str = "test"  # empty: there is but one split, which is trained on
    num_train: int | None = None  # rows of the training split, for a plan before they are read
    where: Mapping[str, list[str]] = field(default_factory=dict)  # columns, and the values of rows that are tasks


def _reader(spec: str | Mapping[str, Any]) -> Reader:
    """The reader of a column, or of the keys of a reader."""
    if isinstance(spec, str):
        return Read(spec)
    keys: Any = {key: _reader(each) if isinstance(each, Mapping) else each for key, each in spec.items() if key != "read"}
    return partial(globals()[spec["read"]], **keys) if "read" in spec else Read(**keys)


def _published(table: Mapping[str, Any]) -> Published:
    read = {key: _reader(table[key]) for key in ("question", "answer", "id") if key in table}
    return Published(**{**table, **read, "facts": {name: _reader(spec) for name, spec in table.get("facts", {}).items()}})


_TABLES = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
PUBLISHED: Mapping[str, Published] = {name: _published(table) for name, table in _TABLES.items()}
"""By the name that `tasks.dataset` takes."""
