"""Makes tasks from rows of a file or of a data set that the `datasets` package loads."""

from __future__ import annotations

import json
import logging
import os
import random
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

from strop.errors import TaskError
from strop.tasks.config import Columns, HubConfig, JsonlConfig, ParquetConfig
from strop.tasks.files import Found, IndexedRows, NoRow, RowFile, find_jsonl, find_rows, read_hub
from strop.tasks.protocol import Split, TaskSource
from strop.tasks.published import PUBLISHED, Published
from strop.tasks.readers import Read, Reader, Row, Unreadable, find, word_of
from strop.types import Task, derive_seed

logger = logging.getLogger(__name__)

RowsConfig: TypeAlias = JsonlConfig | ParquetConfig | HubConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that is not a task, and a sentence with its place and the reason. An unreadable line is the `text` of a row."""

    place: str
    source: str
    problem: str
    row: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A task that the config leaves out, with the key and the reason. For `where`, only its readable parts."""

    task: Task
    key: str
    reason: str


WHERE = "where"
LIMITS = ("max_question_chars", "max_solution_steps", "limit")
"""The keys of `Columns` that leave rows out: by a column, before the row is read as a task, and tasks by their size."""


class RowTasks(TaskSource):
    """A finite set of tasks, repeated in epochs, each in its own order that depends on `seed`.

    Tasks are read when needed, since their file may be larger than memory.

    Raises:
        TaskError: there are no tasks.
    """

    def __init__(self, tasks: IndexedRows[Task], *, seed: int, is_shuffled: bool = True) -> None:
        if not len(tasks):
            raise TaskError("a set of tasks is empty: there is nothing to roll out. Give it at least one row.")
        self._tasks = tasks
        self._is_shuffled = is_shuffled
        # Not a method: a reference cycle would keep the file of the tasks open.
        self._order = lru_cache(maxsize=2)(partial(_order_of_epoch, len(tasks), seed))

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        epoch, position = divmod(index, len(self._tasks))
        return self._tasks[self._order(epoch)[position] if self._is_shuffled else position]


def _order_of_epoch(num_tasks: int, seed: int, epoch: int) -> array[int]:
    order = array("Q", range(num_tasks))
    random.Random(derive_seed("epoch", seed, epoch)).shuffle(order)
    return order


def load_rows(config: RowsConfig, *, split: Split) -> list[Task]:
    """Return all tasks of `split`, in the order of the rows.

    Raises:
        TaskError: no such file, data set or split; a row that is no task; or no rows left.
    """
    return list(iterate_rows(config, split=split))


def open_rows(config: RowsConfig, *, split: Split) -> RowFile[Task]:
    """Return the tasks of `load_rows`, copied to a temporary file. Raises as `load_rows` does."""
    return RowFile(iterate_rows(config, split=split))


def iterate_rows(config: RowsConfig, *, split: Split) -> Iterator[Task]:
    """Yield the tasks of `split`, up to the limit, as their rows are read. Raises as `load_rows` does."""
    num_tasks = 0
    skipped: list[str] = []
    elsewhere: list[LeftOut] = []
    for each in read_tasks(config, split=split):
        if isinstance(each, Task):
            yield each
            num_tasks += 1
            if num_tasks == config.limit:
                break
        elif isinstance(each, BadRow):
            if config.bad_rows == "error":
                expected = f" dataset = {config.dataset!r} is {PUBLISHED[config.dataset].source}." if config.dataset else ""
                raise TaskError(
                    f"{each.problem}{expected} Correct or remove the row, name other columns in tasks (question, answer, facts,"
                    ' where), or leave such rows out with tasks.bad_rows = "skip".'
                )
            skipped.append(each.problem)
        elif each.key == WHERE:
            elsewhere.append(each)
    if elsewhere:
        first = elsewhere[0]
        logger.warning(
            "%s: %d rows were left out under %s; the first: %s: %s. tasks.where = {} reads all.",
            *(first.task.source, len(elsewhere), _where_in_words(config), first.task.id, first.reason),
        )
    if skipped:
        logger.warning("%d rows are not tasks and were left out; the first: %s", len(skipped), skipped[0])


def read_tasks(config: RowsConfig, *, split: Split) -> Iterator[Task | LeftOut | BadRow]:
    """Yield each row of `split` as a task, as a task that the config leaves out, or as a bad row.

    Raises:
        TaskError: no such file, data set or split, or no rows left.
    """
    source = source_of(config, split)
    num_rows = num_tasks = 0
    first_bad = ""
    for place, row in _open(config, split):
        num_rows += 1
        judged = _judge(row, config, place=place, source=source)
        if isinstance(judged, BadRow):
            first_bad = first_bad or f" The first that is no task: {judged.problem}"
        elif isinstance(judged, Task):
            left_out = _left_out(judged, config, num_tasks)
            num_tasks += left_out is None
            judged = left_out or judged
        yield judged
    if not num_rows:
        raise TaskError(f"{source}: it has no rows. Give it at least one.")
    if not num_tasks:
        limits = [f"{key} = {most}" for key in LIMITS if (most := getattr(config, key)) is not None]
        limits += [_where_in_words(config)] if config.rows_where else []
        raise TaskError(
            f"{source}: none of its {num_rows} rows is left under {' and '.join(limits)}. Loosen that.{first_bad}"
            if limits
            else f"{source}: none of its {num_rows} rows is a task. Give it rows with a question and an answer.{first_bad}"
        )


def _judge(row: Row | NoRow, config: RowsConfig, *, place: str, source: str) -> Task | LeftOut | BadRow:
    """Judge `row` without the limits."""
    if isinstance(row, NoRow):
        return BadRow(place=place, source=source, problem=f"{place}: {row.problem}.", row={"text": row.text})
    try:
        if reason := _why_elsewhere(row, config):
            return LeftOut(task=_as_far_as_read(row, config, place, source), key=WHERE, reason=reason)
        return _task_of(row, config, place=place, source=source)
    except Unreadable as error:
        return BadRow(place=place, source=source, problem=f"{place}: {error}.", row=row)


def source_of(config: RowsConfig, split: Split) -> str:
    """Return the `source` of tasks of these rows, except for `dataset = "strop"`, whose rows have their own."""
    if isinstance(config, HubConfig):
        return f"{_hub_name(config)}[{_hub_split(config, split)}]"
    return str(_path(config, split))


def _open(config: RowsConfig, split: Split) -> Found:
    if isinstance(config, HubConfig):
        known = PUBLISHED[config.dataset] if config.dataset else None
        subset = config.subset or (known.subset if known else None)
        chosen, key = _hub_split(config, split), f"{split}_split"
        return read_hub(_hub_name(config), subset=subset, split=chosen, revision=config.revision, split_key=key)
    path = _path(config, split)
    return find_jsonl(path) if isinstance(config, JsonlConfig) else find_rows(path)


def _hub_name(config: HubConfig) -> str:
    name = config.name or (PUBLISHED[config.dataset].hub if config.dataset else "")
    if not name:
        raise TaskError(f'tasks.dataset = {config.dataset!r} is not on the hub: read its file with kind = "jsonl".')
    return name


def has_test_rows(config: RowsConfig) -> bool:
    """Return whether the config has separate test rows."""
    if not isinstance(config, HubConfig):
        return config.test_path is not None
    return config.test_split is not None or config.dataset is None or PUBLISHED[config.dataset].test_split is not None


def _hub_split(config: HubConfig, split: Split) -> str:
    known = PUBLISHED[config.dataset] if config.dataset else None
    chosen = config.train_split if split == "train" else config.test_split
    published = (known.train_split if split == "train" else known.test_split) if known else split
    if found := chosen or published:
        return found
    one = config.train_split or (known.train_split if known else "train")
    raise TaskError(
        f"tasks.dataset = {config.dataset!r} is published without a test split, and what is trained on ({one!r}) tests nothing."
        " Evaluate on another set (`tasks` of the evaluation's own), or hold rows back:"
        f' tasks.train_split = "{one}[500:]" and tasks.test_split = "{one}[:500]".'
    )


def _path(config: JsonlConfig | ParquetConfig, split: Split) -> Path:
    path = config.path if split == "train" else config.test_path
    if path is None:
        raise TaskError(
            f"{config.path}: there are no test rows. Set tasks.test_path to a file of rows that are not trained on."
        )
    return path.expanduser()


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
    return Task(id=name, question=question, answer=answer, source=_source(row, shape, source), facts=facts)


def _why_elsewhere(row: Row, columns: Columns) -> str:
    """Return why `where` leaves the row out, or "". Raises as `_task_of` does."""
    for column, values in columns.rows_where.items():
        value = word_of(find(row, column), column)
        if value not in values:
            return f"its {column} is {value!r}, not {' or '.join(map(repr, values))}"
    return ""


def _as_far_as_read(row: Row, columns: Columns, place: str, source: str) -> Task:
    """Return a row that is left out as a task; if it is none, the whole row is its question."""
    try:
        return _task_of(row, columns, place=place, source=source)
    except Unreadable:
        shown = json.dumps(row, ensure_ascii=False, default=str)
        return Task(id=os.path.basename(place), question=shown, answer="", source=source)


def _where_in_words(columns: Columns) -> str:
    """As a recipe has it."""
    wanted = ", ".join(f"{column} = {json.dumps(values)}" for column, values in columns.rows_where.items())
    return f"where = {{ {wanted} }}"


def _shape_of(columns: Columns) -> Published:
    """Return the schema that the keys of the config describe."""
    facts: dict[str, Reader] = {}
    if columns.answer_after:
        facts["solution"] = Read(columns.answer, before=columns.answer_after)
    answer = Read(columns.answer, after=columns.answer_after)
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


def _left_out(task: Task, columns: Columns, num_before: int) -> LeftOut | None:
    """Return `task` with the limit that leaves it out, after `num_before` kept ones; None if it stays."""
    for key, found, what in (
        ("max_question_chars", len(task.question), "characters"),
        ("max_solution_steps", task.facts.get("solution", "").count("<<"), "steps of its solution"),
        ("limit", num_before + 1, "rows"),
    ):
        most = getattr(columns, key)
        if most is not None and found > most:
            return LeftOut(task=task, key=key, reason=f"{found} {what}, more than {most}")
    return None
