"""Where problems come from."""

from __future__ import annotations

from typing import assert_never

from strop.config import import_object
from strop.tasks.arithmetic import ArithmeticTasks
from strop.tasks.config import (
    ArithmeticConfig,
    CountdownConfig,
    HubConfig,
    JsonlConfig,
    LookupConfig,
    ParquetConfig,
    PythonTasksConfig,
    Split,
    TaskConfig,
)
from strop.tasks.countdown import CountdownTasks
from strop.tasks.lookup import LookupTasks
from strop.tasks.protocol import TaskSource
from strop.tasks.rows import RowTasks, iterate_rows, load_rows, open_rows
from strop.tasks.task_files import Tasks

__all__ = [
    "ArithmeticTasks",
    "CountdownTasks",
    "LookupTasks",
    "RowTasks",
    "Split",
    "TaskConfig",
    "TaskSource",
    "Tasks",
    "iterate_rows",
    "load_rows",
    "make_tasks",
    "open_rows",
]


def make_tasks(config: TaskConfig, *, seed: int, split: Split) -> TaskSource:
    """The source that `config` describes. Training tasks come in an order that `seed` decides, test rows in file order.

    Raises:
        TaskError: the rows cannot be found, or are not tasks.
    """
    match config:
        case ArithmeticConfig():
            return ArithmeticTasks(config, seed=seed, split=split)
        case CountdownConfig():
            return CountdownTasks(config, seed=seed, split=split)
        case LookupConfig():
            return LookupTasks(config, seed=seed, split=split)
        case JsonlConfig() | ParquetConfig() | HubConfig():
            return RowTasks(open_rows(config, split=split), seed=seed, is_shuffled=split == "train")
        case PythonTasksConfig():
            source: TaskSource = import_object(config.source, key="tasks.source")(seed=seed, split=split)
            return source
        case _:
            assert_never(config)
