"""Tasks from the rows of a file or of a data set that the `datasets` package loads."""

from __future__ import annotations

import logging
import random
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from strop.errors import TaskError
from strop.tasks.columns import LIMITS, UNREADABLE, WHERE, Columns, Verdict, judge, where_in_words, within_limits
from strop.tasks.files import Found, IndexedRows, RowFile, find_jsonl, find_rows, read_hub
from strop.tasks.protocol import Split, TaskSource
from strop.tasks.published import PUBLISHED, Published
from strop.types import Task, derive_seed

logger = logging.getLogger(__name__)

_SHARED_COLUMNS = frozenset(("arpo-eval", "arpo-mix", "flashrag", "strop", "tulu3-math"))
"""Data sets that are a form of rows, in which files of many benchmarks are written: the file says which."""


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
