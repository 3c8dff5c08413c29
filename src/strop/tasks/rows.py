"""Makes tasks of rows: of a file, or of a data set that the `datasets` package loads."""

from __future__ import annotations

import json
import logging
import os
import random
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

from strop.errors import TaskError
from strop.seeds import derive_seed
from strop.tasks.config import Columns, HubConfig, JsonlConfig, ParquetConfig, Split
from strop.tasks.files import Found, NoRow, find_jsonl, find_rows, read_hub, row_of_line, unreadable
from strop.tasks.line_file import LineFile
from strop.tasks.published import PUBLISHED, Published
from strop.tasks.readers import MissingColumn, Read, Reader, Row, Unreadable, find, word_of
from strop.tasks.task_files import LineTasks, Tasks, spooled
from strop.types import Task

logger = logging.getLogger(__name__)

RowsConfig: TypeAlias = JsonlConfig | ParquetConfig | HubConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that is no task, and why, in a sentence that names its place. What is no row at all is the `text` of one."""

    place: str
    source: str
    problem: str
    row: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A task that the config leaves out: by which key, and why. Of a row that `where` leaves out, what can be read of it."""

    task: Task
    key: str
    reason: str


WHERE = "where"
LIMITS = ("max_question_chars", "max_solution_steps", "limit")
"""The keys of `Columns` that leave rows out: by a column, before the row is read as a task, and tasks by their size."""


class RowTasks:
    """A finite set of tasks, epoch after epoch, each in an order of its own that `seed` decides.

    Of `tasks` none is held: a file of them may be larger than memory.

    Raises:
        TaskError: there are no tasks.
    """

    def __init__(self, tasks: Tasks, *, seed: int, is_shuffled: bool = True) -> None:
        if not len(tasks):
            raise TaskError("a set of tasks is empty: there is nothing to roll out. Give it at least one row.")
        self._tasks = tasks
        self._is_shuffled = is_shuffled
        # Of a function of its own, not of this: a circle would keep the file of the tasks open.
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
    """All tasks of `split`, in the order of the rows.

    Raises:
        TaskError: no such file, data set or split; a row that is no task; or no rows left.
    """
    return list(iterate_rows(config, split=split))


def open_rows(config: RowsConfig, *, split: Split) -> Tasks:
    """What `load_rows` gives, left on disk: rows of a JSONL file where they are, others in a temporary file.

    All rows are read once, so that each mistake is met now. Raises as `load_rows` does.
    """
    if not isinstance(config, JsonlConfig):
        return spooled(iterate_rows(config, split=split))
    path, source = _path(config, split), source_of(config, split)
    try:
        lines = LineFile(path)
    except OSError as error:
        raise unreadable(path, error) from error
    of_rows = array("Q")  # the lines that are not blank

    def rows() -> Found:
        for number in range(len(lines)):
            row = row_of_line(lines[number], number)
            if row is not None:
                of_rows.append(number)
                yield f"{path}:{number + 1}", row

    def make(line: bytes, number: int) -> Task:
        row = row_of_line(line, number)
        assert isinstance(row, Mapping)
        return _task_of(row, config, place=f"{path}:{number + 1}", source=source)

    numbers = array("Q", (of_rows[at] for at, _ in _kept(_judged(rows(), config, source), config)))
    return LineTasks(lines, numbers, make)


def iterate_rows(config: RowsConfig, *, split: Split) -> Iterator[Task]:
    """The tasks of `split` as their rows are read. Raises as `load_rows` does, each mistake where it is met."""
    return (task for _, task in _kept(read_tasks(config, split=split), config))


def _kept(judged: Iterable[Task | LeftOut | BadRow], config: RowsConfig) -> Iterator[tuple[int, Task]]:
    """The tasks among `judged`, up to the limit, with their places there."""
    num_tasks = num_skipped = num_elsewhere = 0
    first_skipped = ""
    first_elsewhere: LeftOut | None = None
    for at, each in enumerate(judged):
        if isinstance(each, Task):
            yield at, each
            num_tasks += 1
            if num_tasks == config.limit:
                break
        elif isinstance(each, LeftOut):
            if each.key == WHERE:
                num_elsewhere += 1
                first_elsewhere = first_elsewhere or each
        elif config.bad_rows == "error":
            raise TaskError(f'{each.problem} Mend or remove the row, or leave such rows out with tasks.bad_rows = "skip".')
        else:
            num_skipped += 1
            first_skipped = first_skipped or each.problem
    if first_elsewhere is not None:
        logger.warning(
            "%s: %d rows were left out under %s; the first: %s: %s. tasks.where = {} reads all.",
            *(first_elsewhere.task.source, num_elsewhere, _where_in_words(config)),
            *(first_elsewhere.task.id, first_elsewhere.reason),
        )
    if num_skipped:
        logger.warning("%d rows were left out that are no tasks; the first: %s", num_skipped, first_skipped)


def read_tasks(config: RowsConfig, *, split: Split) -> Iterator[Task | LeftOut | BadRow]:
    """Each row of `split`: as a task, as one that the config leaves out, or as one that is none.

    Raises:
        TaskError: no such file, data set, split or column, or no rows left.
    """
    yield from _judged(_open(config, split), config, source_of(config, split))


def _judged(rows: Found, config: RowsConfig, source: str) -> Iterator[Task | LeftOut | BadRow]:
    num_rows = num_tasks = 0
    columns = set[str]()  # that rows have had so far
    first_bad = ""
    for place, row in rows:
        num_rows += 1
        judged = _judge(row, config, place=place, source=source, known=columns)
        if isinstance(row, Mapping):
            columns.update(row)
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


def _judge(row: Row | NoRow, config: RowsConfig, *, place: str, source: str, known: Collection[str]) -> Task | LeftOut | BadRow:
    """`row` before any limit is looked at; `known` are the columns of the rows before it.

    Raises:
        TaskError: what is wrong with it may be of the whole file: no row before it was one, or had the column.
    """
    if isinstance(row, NoRow):
        if not known:
            raise TaskError(f"{place}: {row.problem}.")
        return BadRow(place=place, source=source, problem=f"{place}: {row.problem}.", row={"text": row.text})
    try:
        if reason := _why_elsewhere(row, config):
            return LeftOut(task=_as_far_as_read(row, config, place, source), key=WHERE, reason=reason)
        return _task_of(row, config, place=place, source=source)
    except MissingColumn as error:
        if error.column not in known and error.column.partition(".")[0] not in known:
            raise TaskError(f"{place}: {error}. {_remedy(config, error.column)}.") from error
        problem = f"{place}: {error}."
    except Unreadable as error:
        problem = f"{place}: {error}."
    return BadRow(place=place, source=source, problem=problem, row=row)


def source_of(config: RowsConfig, split: Split) -> str:
    """What tasks of these rows have as their `source`, save those of `dataset = "strop"`, whose rows say it themselves."""
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
    """Whether the config tells rows to test on apart from those to train on."""
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
    """Raises `Unreadable` for a row that is no task, `MissingColumn` for one that may be of another kind of file."""
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
    """Why the config's `where` leaves the row out; empty where it does not. Raises as `_task_of` does."""
    for column, values in columns.rows_where.items():
        value = word_of(find(row, column), column)
        if value not in values:
            return f"its {column} is {value!r}, not {' or '.join(map(repr, values))}"
    return ""


def _as_far_as_read(row: Row, columns: Columns, place: str, source: str) -> Task:
    """A row that is left out, as a task: its question and its answer, where it has them."""
    shape = PUBLISHED[columns.dataset] if columns.dataset else _shape_of(columns)

    def text(read: Reader | None, otherwise: str) -> str:
        try:
            return otherwise if read is None else read(row).strip()
        except Unreadable:
            return otherwise

    return Task(
        id=text(shape.id, os.path.basename(place)),
        question=text(shape.question, ""),
        answer=text(shape.answer, ""),
        source=_source(row, shape, source),
    )


def _where_in_words(columns: Columns) -> str:
    """As a recipe has it."""
    told = ", ".join(f"{column} = {json.dumps(values)}" for column, values in columns.rows_where.items())
    return f"where = {{ {told} }}"


def _remedy(columns: Columns, column: str) -> str:
    """What to do about rows that do not have `column`, which the config reads."""
    published = (
        f"tasks.dataset = {columns.dataset!r} expects the columns of {PUBLISHED[columns.dataset].source}; where yours differ,"
        " leave dataset out and name them with tasks.question and tasks.answer"
        if columns.dataset
        else ""
    )
    if column in columns.rows_where:
        kind = f"{published}; w" if published else "W"
        return f"{kind}here rows have no such column since they were chosen before, set tasks.where = {{}}"
    named = () if columns.dataset else (columns.question, columns.answer)
    if column in columns.facts and column not in named:
        return "Set tasks.facts to columns that it has"
    return published or f"Set tasks.{'question' if column == columns.question else 'answer'} to the one meant"


def _shape_of(columns: Columns) -> Published:
    """The reading that a config spells out itself."""
    facts: dict[str, Reader] = {}
    if columns.answer_after:
        facts["solution"] = Read(columns.answer, before=columns.answer_after)
    answer = Read(columns.answer, after=columns.answer_after)
    return Published(hub="", question=Read(columns.question), answer=answer, facts=facts, source="the config")


def _known_facts(row: Row, shape: Published) -> dict[str, str]:
    """What a published data set says beside question and answer, where this row says it."""
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
    """Why the config's limits leave `task` out, of which `num_before` are kept before it; None where they do not."""
    for key, found in (
        ("max_question_chars", len(task.question)),
        ("max_solution_steps", task.facts.get("solution", "").count("<<")),
        ("limit", num_before + 1),
    ):
        most = getattr(columns, key)
        if most is not None and found > most:
            what = {"max_question_chars": "characters", "max_solution_steps": "steps of its solution"}.get(key)
            reason = f"{found} {what}" if what else f"behind the first {most} that are wanted"
            return LeftOut(task=task, key=key, reason=reason if key == "limit" else f"{reason}, more than {most}")
    return None
