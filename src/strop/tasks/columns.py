"""Reads one row as a task: which columns make a task, and which rows are left out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strop.errors import did_you_mean
from strop.tasks.files import NoRow
from strop.tasks.protocol import TaskSource, check_wording
from strop.tasks.published import PUBLISHED, Published
from strop.tasks.readers import Read, Reader, Row, Unreadable, find, word_of
from strop.types import Task

_PLACE = re.compile(r"\{(\w+)\}")  # of a wording


class Columns(TaskSource.Config):
    """Which columns of a row make a task, and which rows are left out."""

    dataset: str | None = Field(
        default=None, description="A published data set whose columns are known: gsm8k, math500, dapo-math-17k, ..."
    )
    question: str = Field(default="question", description="Column of the question.")
    answer: str = Field(default="answer", description="Column of the answer.")
    answer_after: str = Field(
        default="", description='The answer is what follows the last of these marks in its column; "####" for GSM8K.'
    )
    wording: str = Field(
        default="{question}", description="How a question is posed, with {question} and facts of the task, such as {subject}."
    )
    truth: Literal["column", "parse"] = Field(
        default="column", description="parse: the column holds a solution; its box, or what math-verify finds, is the answer."
    )
    facts: tuple[str, ...] = Field(default=(), description="Further columns that tasks keep, for rewards and reports.")
    where: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] | None = Field(
        default=None,
        description="Columns with the values of rows that are read; others are counted in a warning. Unset: as published.",
    )
    max_question_chars: int | None = Field(default=None, ge=1, le=10**9, description="Leave out longer questions.")
    max_solution_steps: int | None = Field(
        default=None, ge=0, le=10**9, description="Leave out solutions with more calculations, which GSM8K writes <<48/2=24>>."
    )
    limit: int | None = Field(default=None, ge=1, le=10**9, description="Read only this many of the rows that are left.")
    bad_rows: Literal["error", "skip"] = Field(
        default="error", description="What a row without a question or an answer does; skipped rows are counted in a warning."
    )

    @property
    def rows_where(self) -> Mapping[str, Sequence[str]]:
        """Columns with the values of the rows that are read."""
        if self.where is not None:
            return self.where
        return PUBLISHED[self.dataset].where if self.dataset is not None else {}

    @model_validator(mode="after")
    def _names_columns_once(self) -> Self:
        if self.dataset is not None and self.dataset not in PUBLISHED:
            hint = did_you_mean(self.dataset, PUBLISHED)
            raise ValueError(f"dataset is {self.dataset!r}, which is not one of {', '.join(PUBLISHED)}.{hint}")
        # A recipe that was written by strop holds every default, so a set key is not enough.
        fields = type(self).model_fields
        named = [key for key in ("question", "answer", "answer_after", "truth") if getattr(self, key) != fields[key].default]
        if self.dataset is not None and named:
            raise ValueError(
                f"dataset is {self.dataset!r}, whose columns are known, but {named[0]} is set as well. Leave {named[0]} out, or"
                " leave dataset out and name the columns yourself."
            )
        return self

    @model_validator(mode="after")
    def _poses_the_question_and_counts_steps(self) -> Self:
        check_wording(self.wording, "{question}")
        if self.max_solution_steps is not None and not self.answer_after and self.dataset is None:
            raise ValueError(
                f"max_solution_steps is {self.max_solution_steps}, but without answer_after a row has no solution to count"
                ' steps in. Set answer_after (GSM8K: "####").'
            )
        return self


WHERE, UNREADABLE = "where", "unreadable"
"""The rules that drop a row before it is read as a task: by a column, and because it is no task."""
LIMITS = ("max_question_chars", "max_solution_steps", "limit")
"""The keys of `Columns` that drop tasks by their size or number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A task with the rule that dropped it and the reason, or with neither if it is kept.

    A row that is no task is dropped as one whose question is the row; an unreadable line is the `text` of a row.
    """

    task: Task
    rule: str = ""
    reason: str = ""

    @property
    def is_kept(self) -> bool:
        return not self.rule


def judge(row: Row | NoRow, columns: Columns, *, place: str, source: str) -> Verdict:
    """Return what `row` is, without the limits."""
    reason = ""
    try:
        if isinstance(row, NoRow):
            raise Unreadable(row.problem)
        reason = _why_elsewhere(row, columns)
        task = _task_of(row, columns, place=place, source=source)
    except Unreadable as error:
        shown = json.dumps({"text": row.text} if isinstance(row, NoRow) else row, ensure_ascii=False, default=str)
        task = Task(id=os.path.basename(place), question=shown, answer="", source=source)
        if not reason:
            return Verdict(task=task, rule=UNREADABLE, reason=f"{place}: {error}.")
    return Verdict(task=task, rule=WHERE if reason else "", reason=reason)


def _task_of(row: Row, columns: Columns, *, place: str, source: str) -> Task:
    """Return the task of a row. Raises `Unreadable`."""
    shape = PUBLISHED[columns.dataset] if columns.dataset else _shape_of(columns)
    question, answer = shape.question(row), shape.answer(row).strip()
    name = os.path.basename(place) if shape.id is None else shape.id(row)
    facts = {name: Read(name)(row) for name in columns.facts}
    if not question.strip():
        raise Unreadable("a row without a question")
    if not answer:
        raise Unreadable("a row without an answer")
    facts |= _known_facts(row, shape)
    known = {**facts, "question": question}
    unknown = [place for place in _PLACE.findall(columns.wording) if place not in known]
    if unknown:
        raise Unreadable(
            f"its wording has {{{unknown[0]}}}, which is no fact of the task; its facts: {', '.join(facts) or 'none'}"
        )
    posed = _PLACE.sub(lambda place: known[place[1]], columns.wording)
    return Task(id=name, question=posed, answer=answer, source=_source(row, shape, source), facts=facts)


def _why_elsewhere(row: Row, columns: Columns) -> str:
    """Return why `where` leaves the row out, or "". Raises as `_task_of` does."""
    for column, values in columns.rows_where.items():
        value = word_of(find(row, column), column)
        if value not in values:
            return f"its {column} is {value!r}, not {' or '.join(map(repr, values))}"
    return ""


def where_in_words(columns: Columns) -> str:
    """As a recipe has it."""
    wanted = ", ".join(f"{column} = {json.dumps(values)}" for column, values in columns.rows_where.items())
    return f"where = {{ {wanted} }}"


def _shape_of(columns: Columns) -> Published:
    """Return the schema that the keys of the config describe."""
    facts: dict[str, Reader] = {}
    if columns.answer_after:
        facts["solution"] = Read(columns.answer, before=columns.answer_after)
    answer = Read(columns.answer, after=columns.answer_after, is_parsed=columns.truth == "parse")
    return Published(hub="", question=Read(columns.question), answer=answer, facts=facts, source="the config")


def _known_facts(row: Row, shape: Published) -> dict[str, str]:
    """Return the further facts of a published data set that this row has."""
    facts = {}
    for name, read in shape.facts.items():
        try:
            facts[name] = read(row).strip()
        except Unreadable:
            continue
    if shape is PUBLISHED["strop"]:
        own = row.get("facts") or {}
        if not isinstance(own, Mapping):
            raise Unreadable(f"its 'facts' is a {type(own).__name__}; an object of texts was expected")
        facts |= {str(name): str(value) for name, value in own.items()}
    return facts


def _source(row: Row, shape: Published, source: str) -> str:
    return str(row.get("source") or source) if shape is PUBLISHED["strop"] else source


def within_limits(verdict: Verdict, columns: Columns, num_before: int) -> Verdict:
    """Return `verdict`, or if a limit drops its task, after `num_before` kept ones, that."""
    task = verdict.task
    for key, found, what in (
        ("max_question_chars", len(task.question), "characters"),
        ("max_solution_steps", task.facts.get("solution", "").count("<<"), "steps of its solution"),
        ("limit", num_before + 1, "rows"),
    ):
        most = getattr(columns, key)
        if verdict.is_kept and most is not None and found > most:
            return Verdict(task=task, rule=key, reason=f"{found} {what}, more than {most}")
    return verdict
