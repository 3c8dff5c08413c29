"""Keeps tasks on disk: in the JSONL file that they are rows of, or, of other sources, in a temporary file."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from strop.runs import writing_to
from strop.tasks.line_file import LineFile
from strop.types import Task


class Tasks(Protocol):
    """Tasks by number, from 0: a list of them, or a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Task: ...


class LineTasks:
    """Tasks that are lines of a file; 24 bytes of memory a task. One is made anew of its line whenever it is asked for."""

    def __init__(self, lines: LineFile, numbers: array[int], make: Callable[[bytes, int], Task]) -> None:
        """`numbers` are those of the lines that are tasks; `make` is (line, its number) -> the task."""
        self._lines, self._numbers, self._make = lines, numbers, make

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int, /) -> Task:
        """Raises `IndexError` where there is no such task, and `TaskError` where its line has changed."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        line = self._numbers[number]
        return self._make(self._lines[line], line)


def spooled(tasks: Iterable[Task]) -> LineTasks:
    """`tasks`, written as they come to a file without a name, which is gone with them or when the process ends.

    It lies where temporary files do (TMPDIR), and is as large as the tasks' texts.
    """
    place = Path(tempfile.gettempdir())
    with writing_to(place):
        opened = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    with opened as file:
        for task in tasks:
            line = json.dumps(asdict(task)).encode() + b"\n"
            with writing_to(place):
                file.write(line)
        with writing_to(place):
            file.flush()
        lines = LineFile(file, name=f"a temporary file of tasks in {place}")
    return LineTasks(lines, array("Q", range(len(lines))), lambda line, _: Task(**json.loads(line)))
