"""Reads tasks from rows: a JSONL file, or a data set that the `datasets` package loads."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from strop.errors import TaskError
from strop.seeds import derive_seed
from strop.tasks.config import Columns, HubConfig, JsonlConfig, Split
from strop.types import Task


class RowTasks:
    """A finite set of tasks, epoch after epoch, each in an order of its own that `seed` decides.

    Raises:
        TaskError: there are no tasks.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, is_shuffled: bool = True) -> None:
        if not tasks:
            raise TaskError("a set of tasks is empty: there is nothing to roll out. Give it at least one row.")
        self._tasks = tuple(tasks)
        self._seed = seed
        self._is_shuffled = is_shuffled
        self._order = lru_cache(maxsize=2)(self._order_of_epoch)

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        epoch, position = divmod(index, len(self._tasks))
        return self._tasks[self._order(epoch)[position] if self._is_shuffled else position]

    def _order_of_epoch(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(derive_seed("epoch", self._seed, epoch)).shuffle(order)
        return order


def load_jsonl(config: JsonlConfig, *, split: Split) -> list[Task]:
    """The tasks of the file of `split`.

    Raises:
        TaskError: no such file, a line that is not a JSON object, a row without a question or an answer, or no rows left.
    """
    path = config.path if split == "train" else config.test_path
    if path is None:
        raise TaskError(
            f"{config.path}: there are no test rows. Set tasks.test_path to a file of rows that are not trained on."
        )
    return _tasks_of(_read_jsonl(path.expanduser()), config, source=str(path))


def load_hub(config: HubConfig, *, split: Split) -> list[Task]:
    """The tasks of one split of a data set.

    Raises:
        TaskError: the `datasets` package, the data set or its split is missing, or its rows are not tasks.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise TaskError(
            f"{config.name}: a hub data set is read with the `datasets` package, which is not installed. Install it with"
            " pip install 'strop[data]', or save the rows as JSONL and use kind = \"jsonl\"."
        ) from error
    name = config.train_split if split == "train" else config.test_split
    try:
        rows = load_dataset(config.name, config.subset, split=name, revision=config.revision)
    except (ValueError, OSError) as error:  # unknown split or subset; not found, offline
        raise TaskError(
            f"{config.name}: its split {name!r} cannot be loaded: {str(error).rstrip('.')}. Check name, subset and"
            " split; a machine without network needs a local directory as the name."
        ) from error
    source = f"{config.name}[{name}]"
    return _tasks_of(((f"{source} row {number}", row) for number, row in enumerate(rows)), config, source=source)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row with its place. Blank lines are skipped."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _row(line, place=f"{path}:{number}")
    except FileNotFoundError as error:
        raise TaskError(
            f"{path}: no such file.{_nearest_file(path)} Set tasks.path to a JSONL file, one object a line."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}. It must be a JSONL file in UTF-8.") from error


def _row(line: str, *, place: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TaskError(f"{place}: not JSON: {error}. Each line must be one JSON object.") from error
    if not isinstance(row, dict):
        raise TaskError(f"{place}: a JSON {type(row).__name__}, not an object. Each line must be one JSON object.")
    return row


def _nearest_file(path: Path) -> str:
    names = [entry.name for entry in path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / nearest[0]}?" if nearest else ""


def _tasks_of(rows: Iterable[tuple[str, Mapping[str, Any]]], columns: Columns, *, source: str) -> list[Task]:
    tasks: list[Task] = []
    num_rows = 0
    for place, row in rows:
        num_rows += 1
        task = _task_of(row, columns, place=place, source=source)
        if _is_wanted(task, columns):
            tasks.append(task)
        if len(tasks) == columns.limit:
            break
    if not tasks and num_rows:
        raise TaskError(
            f"{source}: none of its {num_rows} rows is left under max_question_chars = {columns.max_question_chars} and"
            f" max_solution_steps = {columns.max_solution_steps}. Raise them."
        )
    if not tasks:
        raise TaskError(f"{source}: it has no rows. Give it at least one.")
    return tasks


def _task_of(row: Mapping[str, Any], columns: Columns, *, place: str, source: str) -> Task:
    question = _text(row, columns.question, key="question", place=place)
    full = _text(row, columns.answer, key="answer", place=place)
    facts = {name: _text(row, name, key="facts", place=place) for name in columns.facts}
    answer = full
    if columns.answer_after:
        solution, mark, answer = full.rpartition(columns.answer_after)
        if not mark:
            raise TaskError(
                f"{place}: its {columns.answer!r} holds no {columns.answer_after!r}, after which the answer should stand."
                " Mend the row, or leave answer_after out where the whole column is the answer."
            )
        facts["solution"] = solution.strip()
    if not answer.strip():
        raise TaskError(f"{place}: a row without an answer. Fill in {columns.answer!r}, or remove the row.")
    return Task(id=Path(place).name, question=question, answer=answer.strip(), source=source, facts=facts)


def _text(row: Mapping[str, Any], column: str, *, key: str, place: str) -> str:
    if column not in row:
        raise TaskError(
            f"{place}: no column {column!r}. It has {', '.join(map(repr, row)) or 'none'}. Set tasks.{key} to the one meant."
        )
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        what = "is empty" if value is None else f"is a {type(value).__name__}"
        raise TaskError(f"{place}: its {column!r} {what}; a text or a number was expected. Mend or remove the row.")
    text = str(value)
    if key == "question" and not text.strip():
        raise TaskError(f"{place}: a row without a question. Fill in {column!r}, or remove the row.")
    return text


def _is_wanted(task: Task, columns: Columns) -> bool:
    if columns.max_question_chars is not None and len(task.question) > columns.max_question_chars:
        return False
    num_steps = task.facts.get("solution", "").count("<<")
    return columns.max_solution_steps is None or num_steps <= columns.max_solution_steps
