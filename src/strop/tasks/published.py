"""Published data sets, of published.toml: where each is on the hub, and what in its columns makes a task.

The same entry reads local files of that schema (JSONL, Parquet, a directory).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.tasks import readers
from strop.tasks.readers import Read, Reader


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
    keys = {key: _reader(value) if isinstance(value, Mapping) else value for key, value in spec.items() if key != "read"}
    kind: Any = getattr(readers, spec.get("read", "Read"))
    reader: Reader = kind(**keys) if isinstance(kind, type) else kind
    return reader


def _published(table: Mapping[str, Any]) -> Published:
    read = {key: _reader(table[key]) for key in ("question", "answer", "id") if key in table}
    return Published(**{**table, **read, "facts": {name: _reader(spec) for name, spec in table.get("facts", {}).items()}})


_TABLES = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
PUBLISHED: Mapping[str, Published] = {name: _published(table) for name, table in _TABLES.items()}
"""By the name that `tasks.dataset` takes."""
