"""What a source of tasks owes: the same task at the same position, whoever asks and however often."""

from __future__ import annotations

from typing import Protocol

from strop.types import Task


class TaskSource(Protocol):
    """Problems in a fixed, endless order: a finite set starts its next epoch, reshuffled, where the last one ended."""

    @property
    def num_tasks(self) -> int | None:
        """How many different tasks there are; None when they are generated without end."""

    def task(self, index: int) -> Task:
        """The task at `index` (0 <= index) of the stream."""
