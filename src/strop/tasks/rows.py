"""Rows of files and Hugging Face data sets as tasks: which columns make a task, which rows are left out, epochs."""

from __future__ import annotations

import json
import logging
import os
import random
import re
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strop.errors import TaskError, did_you_mean
from strop.tasks.files import Found, IndexedRows, NoRow, RowFile, find_jsonl, find_rows, read_hub
from strop.tasks.protocol import Split, TaskSource, check_wording
from strop.tasks.readers import PUBLISHED, Published, Read, Reader, Row, Unreadable, find, word_of
from strop.types import Task, derive_seed

logger = logging.getLogger(__name__)

_SHARED_COLUMNS = frozenset(("arpo-eval", "arpo-mix", "flashrag", "strop", "tulu3-math"))
"""Data sets that are a form of rows, in which files of many benchmarks are written: the file says which."""
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
    if shape is PUBLISHED["strop"]:
        source = str(row.get("source") or source)
    return Task(id=name, question=posed, answer=answer, source=source, facts=facts)


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
        with suppress(Unreadable):
            facts[name] = read(row).strip()
    if shape is PUBLISHED["strop"]:
        own = row.get("facts") or {}
        if not isinstance(own, Mapping):
            raise Unreadable(f"its 'facts' is a {type(own).__name__}; an object of texts was expected")
        facts |= {str(name): str(value) for name, value in own.items()}
    return facts


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


class RowTasks(TaskSource):
    """A finite set of tasks, repeated in epochs, each in its own order that depends on `seed`.

    Tasks are read when needed, since their file may be larger than memory.

    Raises:
        TaskError: there are no tasks.
    """

    def __init__(self, tasks: IndexedRows[Task], *, seed: int, is_shuffled: bool = True) -> None:
        if not len(tasks):
            raise TaskError("a set of tasks is empty: there is nothing to roll out. Give it at least one row.")
        self._tasks, self._is_shuffled = tasks, is_shuffled
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


class RowSource(TaskSource):
    """Base of the sources that read rows."""

    kinds = {kind: place for kind, place in TaskSource.kinds.items() if place.startswith(f"{__name__}:")}  # noqa: RUF012
    config: Columns

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """What a rule of a curation may call it."""

    @property
    @abstractmethod
    def has_test_rows(self) -> bool:
        """Whether there are separate test rows."""

    @abstractmethod
    def source(self, split: Split) -> str:
        """The `source` of its tasks, except for `dataset = "strop"`, whose rows have their own. Raises `TaskError`."""

    @abstractmethod
    def find(self, split: Split) -> Found:
        """The rows of `split`, each with its place. Raises `TaskError` if there are none."""

    def open(self, *, seed: int, split: str) -> None:
        """See `TaskSource.open`."""
        super().open(seed=seed, split=split)
        is_train = split == "train"
        self._tasks = RowTasks(open_rows(self, split="train" if is_train else "test"), seed=seed, is_shuffled=is_train)

    @property
    def num_tasks(self) -> int:
        return self._tasks.num_tasks

    def task(self, index: int) -> Task:
        return self._tasks.task(index)


class JsonlRows(RowSource):
    """Rows of a file, one JSON object a line."""

    class Config(Columns):
        """Files and columns."""

        path: Path = Field(description="The file; for Parquet also a directory.")
        test_path: Path | None = Field(default=None, description="A file of test rows, which are not trained on.")

    config: Config

    @property
    def files(self) -> Mapping[Split, Path]:
        paths: dict[Split, Path | None] = {"train": self.config.path, "test": self.config.test_path}
        return {split: path.expanduser() for split, path in paths.items() if path is not None}

    @property
    def names(self) -> tuple[str, ...]:
        return (*filter(None, [self.config.dataset]), str(self.config.path))

    @property
    def has_test_rows(self) -> bool:
        return "test" in self.files

    def source(self, split: Split) -> str:
        return str(self._path(split))

    def find(self, split: Split) -> Found:
        return find_jsonl(self._path(split))

    def benchmark(self, split: Split) -> str:
        """The published data set, or the file with its folder."""
        if self.config.dataset is not None and self.config.dataset not in _SHARED_COLUMNS:
            return self.config.dataset
        path = self.config.path if split == "train" else self.config.test_path or self.config.path
        return "/".join(path.with_suffix("").parts[-2:])

    def _path(self, split: Split) -> Path:
        if split not in self.files:
            raise TaskError(
                f"{self.config.path}: there are no test rows. Set tasks.test_path to a file of rows that are not trained on."
            )
        return self.files[split]


class ParquetRows(JsonlRows):
    """Rows of a Parquet file, or of all files of a directory in the order of their names; needs the extra `data`."""

    def find(self, split: Split) -> Found:
        return find_rows(self._path(split))


class HubRows(RowSource):
    """A data set of the Hugging Face hub, or a directory that `datasets` loads; needs the extra `data`."""

    class Config(Columns):
        """Data set, splits and columns."""

        name: str | None = Field(default=None, description="The data set; by default the one of `dataset`.")
        subset: str | None = Field(default=None, description="Its configuration; by default the one of `dataset`.")
        revision: str | None = Field(
            default=None,
            description="A commit or tag, so that a run can be repeated; by default the newest when a stage starts.",
        )
        train_split: str | None = Field(default=None, description='By default "train", or as `dataset` is published.')
        test_split: str | None = Field(default=None, description='By default "test", or as `dataset` is published.')

        @model_validator(mode="after")
        def _is_somewhere(self) -> Self:
            if self.name is None and self.dataset is None:
                raise ValueError(
                    "neither name nor dataset is set: set name to a data set of the hub, or dataset to a known one."
                )
            return self

    config: Config

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.config.dataset, self.config.name) if name is not None)

    @property
    def has_test_rows(self) -> bool:
        known = self._published
        return self.config.test_split is not None or known is None or bool(known.test_split)

    def source(self, split: Split) -> str:
        return f"{self._name}[{self._split(split)}]"

    def find(self, split: Split) -> Found:
        subset = self.config.subset or (self._published.subset if self._published else None)
        chosen, key = self._split(split), f"{split}_split"
        return read_hub(self._name, subset=subset, split=chosen, revision=self.config.revision, split_key=key)

    def benchmark(self, split: Split) -> str:
        """The subset of a published data set, the data set, or its name on the hub."""
        config = self.config
        return (config.subset if config.dataset else None) or config.dataset or str(config.name)

    @property
    def num_published(self) -> int | None:
        config, known = self.config, self._published
        is_whole = not any((config.rows_where, config.limit, config.name, config.subset, config.train_split))
        return known.num_train if known and is_whole else None

    @property
    def _published(self) -> Published | None:
        return PUBLISHED[self.config.dataset] if self.config.dataset else None

    @property
    def _name(self) -> str:
        name = self.config.name or (self._published.hub if self._published else "")
        if not name:
            raise TaskError(f'tasks.dataset = {self.config.dataset!r} is not on the hub: read its file with kind = "jsonl".')
        return name

    def _split(self, split: Split) -> str:
        known = self._published
        chosen = self.config.train_split if split == "train" else self.config.test_split
        published = (known.train_split if split == "train" else known.test_split) if known else split
        if found := chosen or published:
            return found
        one = self.config.train_split or (known.train_split if known else "train")
        raise TaskError(
            f"tasks.dataset = {self.config.dataset!r} is published without a test split, and what is trained on ({one!r}) tests"
            " nothing. Evaluate on another set (`tasks` of the evaluation's own), or hold rows back:"
            f' tasks.train_split = "{one}[500:]" and tasks.test_split = "{one}[:500]".'
        )


def load_rows(source: RowSource, *, split: Split) -> list[Task]:
    """Return all tasks of `split`, in the order of the rows.

    Raises:
        TaskError: no such file, data set or split; a row that is no task; or no rows left.
    """
    return list(iterate_rows(source, split=split))


def open_rows(source: RowSource, *, split: Split) -> RowFile[Task]:
    """Return the tasks of `load_rows`, copied to a temporary file. Raises as `load_rows` does."""
    return RowFile(iterate_rows(source, split=split))


def iterate_rows(source: RowSource, *, split: Split) -> Iterator[Task]:
    """Yield the tasks of `split`, up to the limit, as their rows are read. Raises as `load_rows` does."""
    config, num_tasks = source.config, 0
    num_dropped: Counter[str] = Counter()
    first: dict[str, Verdict] = {}
    for each in read_tasks(source, split=split):
        if each.is_kept:
            yield each.task
            num_tasks += 1
            if num_tasks == config.limit:
                break
        elif each.rule == UNREADABLE and config.bad_rows == "error":
            expected = f" dataset = {config.dataset!r} is {PUBLISHED[config.dataset].source}." if config.dataset else ""
            raise TaskError(
                f"{each.reason}{expected} Correct or remove the row, name other columns in tasks (question, answer, facts,"
                ' where), or leave such rows out with tasks.bad_rows = "skip".'
            )
        else:
            num_dropped[each.rule] += 1
            first.setdefault(each.rule, each)
    if elsewhere := first.get(WHERE):
        logger.warning(
            "%s: %d rows were left out under %s; the first: %s: %s. tasks.where = {} reads all.",
            *(elsewhere.task.source, num_dropped[WHERE], where_in_words(config), elsewhere.task.id, elsewhere.reason),
        )
    if UNREADABLE in first:
        reason = first[UNREADABLE].reason
        logger.warning("%d rows are not tasks and were left out; the first: %s", num_dropped[UNREADABLE], reason)


def read_tasks(source: RowSource, *, split: Split) -> Iterator[Verdict]:
    """Yield each row of `split`, kept as a task or dropped.

    Raises:
        TaskError: no such file, data set or split, or no rows left.
    """
    config, name = source.config, source.source(split)
    num_rows = num_tasks = 0
    first_bad = ""
    for place, row in source.find(split):
        num_rows += 1
        verdict = within_limits(judge(row, config, place=place, source=name), config, num_tasks)
        num_tasks += verdict.is_kept
        if verdict.rule == UNREADABLE:
            first_bad = first_bad or f" The first that is no task: {verdict.reason}"
        yield verdict
    if not num_rows:
        raise TaskError(f"{name}: it has no rows. Give it at least one.")
    if not num_tasks:
        limits = [f"{key} = {most}" for key in LIMITS if (most := getattr(config, key)) is not None]
        limits += [where_in_words(config)] if config.rows_where else []
        raise TaskError(
            f"{name}: none of its {num_rows} rows is left under {' and '.join(limits)}. Loosen that.{first_bad}"
            if limits
            else f"{name}: none of its {num_rows} rows is a task. Give it rows with a question and an answer.{first_bad}"
        )
