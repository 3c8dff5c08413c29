"""The clock of a stage: how long it has trained, over all tries, and whether its budget lasts for another step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class StageClock:
    """Runs from the first step on, through updates, validations and waits for checkpoints, and stands while no process runs.

    A step is begun where one as long as the last still ends within the budget, with the validation before it. What a try that
    fell did after its last checkpoint is done again, and counts once.
    """

    def __init__(
        self, budget_s: float | None, last: Mapping[str, float], *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """`last` are the metrics of the last step of an earlier try; empty where there is none."""
        self._budget_s, self._now = budget_s, now
        self._started = now() - last.get("time/elapsed_s", 0.0) - last.get("time/validation_s", 0.0)
        self._step_started = now()
        self._validation_s = 0.0  # of the last one
        self._elapsed_s = last.get("time/elapsed_s", 0.0)
        self.is_spent = last.get("budget/is_spent", 0.0) == 1.0

    def step_finished(self, *, is_validated: bool) -> None:
        """The step's policy is published. `is_validated` where it is measured before the next step begins."""
        self._elapsed_s = self._now() - self._started
        if self._budget_s is not None:
            next_step_s = self._now() - self._step_started + (self._validation_s if is_validated else 0.0)
            self.is_spent = self._elapsed_s + next_step_s > self._budget_s

    def validated(self, metrics: Mapping[str, float]) -> None:
        """What measuring the step's policy gave; {} where it was not measured."""
        self._validation_s = metrics.get("time/validation_s", self._validation_s)
        self._step_started = self._now()

    @property
    def metrics(self) -> dict[str, float]:
        """Of the step that finished last: the time at which its policy was there, and what is left of the budget."""
        figures = {"time/elapsed_s": self._elapsed_s}
        if self._budget_s is not None:
            figures |= {"budget/left_s": self._budget_s - self._elapsed_s, "budget/is_spent": float(self.is_spent)}
        return figures
