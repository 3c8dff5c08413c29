"""Where problems come from."""

from __future__ import annotations

from typing import assert_never

from strop.tasks.arithmetic import ArithmeticTasks
from strop.tasks.config import (
    ArithmeticConfig,
    CountdownConfig,
    HubConfig,
    JsonlConfig,
    LookupConfig,
    ParquetConfig,
    TaskConfig,
)
from strop.tasks.countdown import CountdownTasks
from strop.tasks.lookup import LookupTasks
from strop.tasks.protocol import OwnTasks, Split, TaskSource
from strop.tasks.rows import RowTasks, iterate_rows, load_rows, open_rows

__all__ = [
    "ArithmeticTasks",
    "CountdownTasks",
    "LookupTasks",
    "RowTasks",
    "Split",
    "TaskConfig",
    "TaskSource",
    "iterate_rows",
    "load_rows",
    "make_tasks",
    "open_rows",
]


def make_tasks(config: TaskConfig, *, seed: int, split: Split) -> TaskSource:
    """Return the source that `config` describes. `seed` decides the order of training tasks; test rows keep theirs.

    Raises:
        TaskError: the rows cannot be found or are no tasks.
        ConfigError: the user's source is wrong.
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
        case TaskSource():  # a class of the user's
            return OwnTasks(config, seed=seed, split=split)
        case _:
            assert_never(config)
