"""Where problems come from."""

from __future__ import annotations

from collections.abc import Mapping

from strop.config import Config
from strop.tasks.arithmetic import ArithmeticTasks
from strop.tasks.config import ArithmeticConfig, Columns, CountdownConfig, LookupConfig, TaskConfig
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

_GENERATED: Mapping[type[Config], type[TaskSource]] = {
    ArithmeticConfig: ArithmeticTasks,
    CountdownConfig: CountdownTasks,
    LookupConfig: LookupTasks,
}


def make_tasks(config: TaskConfig, *, seed: int, split: Split) -> TaskSource:
    """Return the source that `config` describes. `seed` decides the order of training tasks; test rows keep theirs.

    Raises:
        TaskError: the rows cannot be found or are no tasks.
        ConfigError: the user's source is wrong.
    """
    if isinstance(config, TaskSource):  # a class of the user's
        return OwnTasks(config, seed=seed, split=split)
    if isinstance(config, Columns):
        return RowTasks(open_rows(config, split=split), seed=seed, is_shuffled=split == "train")
    source = _GENERATED[type(config)](config)
    source.open(seed=seed, split=split)
    return source
