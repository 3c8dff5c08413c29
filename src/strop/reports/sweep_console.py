"""Shows a sweep in a terminal, or as plain lines where there is none: its arms, each run as it ends, the table of results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.status import Status
from rich.table import Table as RichTable

from strop.reports.compare import Table
from strop.reports.scales import duration
from strop.reports.sweep import results_table
from strop.reports.sweep_log import State, SweepLog
from strop.runs import RunDirectory

_TAIL_BYTES = 65_536


class SweepProgress(Protocol):
    """Follows a sweep. Calls come from one thread, in order."""

    def started(self, *, num_runs: int, num_done: int, warning: str) -> None: ...

    def run_started(self, name: str, *, state: State, shared: str) -> None:
        """`shared` names the run whose first stages it takes over; empty where there is none."""

    def run_finished(self, name: str, summary: str, time_s: float) -> None: ...

    def run_failed(self, name: str, failure: str, log: Path) -> None: ...

    def under_way(self, runs: Mapping[str, RunDirectory]) -> None:
        """Once a second: the runs that are under way."""

    def finished(self, log: SweepLog, page: Path) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedArm:
    """One line of the plan."""

    name: str
    changes: Sequence[str]
    states: Mapping[int, State]  # by seed
    time_s: float  # of one run, without the stages that it takes over


class SweepConsole:
    """Implements `SweepProgress`. In a terminal a line with what is under way stays below the others."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console() if console is None else console
        self._status: Status | None = None
        self._num_runs = self._num_ended = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def started(self, *, num_runs: int, num_done: int, warning: str) -> None:
        self._num_runs, self._num_ended = num_runs, num_done
        done = f", {num_done} done before" if num_done else ""
        self._say(f"{num_runs} runs{done}")
        if warning:
            self._say(f"! {warning}", style="yellow")

    def run_started(self, name: str, *, state: State, shared: str) -> None:
        how = "goes on" if state is State.UNFINISHED and not shared else "starts"
        self._say(f"  · {name} {how}" + (f", from the first stages of {shared}" if shared else ""))

    def run_finished(self, name: str, summary: str, time_s: float) -> None:
        self._num_ended += 1
        self._say(f"  ✓ {name}: {summary} ({duration(time_s)}; {self._num_ended} of {self._num_runs})")

    def run_failed(self, name: str, failure: str, log: Path) -> None:
        self._num_ended += 1
        self._say(f"  ✗ {name}: {failure}. All that it said: {log}", style="red")

    def under_way(self, runs: Mapping[str, RunDirectory]) -> None:
        if not self._console.is_terminal:
            return
        text = "   ".join(f"{name}: {where(run)}" for name, run in runs.items())
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def finished(self, log: SweepLog, page: Path) -> None:
        self.close()
        self._console.print()
        self._console.print(as_rich(results_table(log)), markup=False)
        for run in log.failures:
            self._say(f"failed: {run.name}: {run.failure}", style="red")
        self._console.print(f"comparison: {page}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the line away that stays below. Safe to call twice."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def where(run: RunDirectory) -> str:
    """The last stage and step of a run that goes on."""
    try:
        with run.metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            line = json.loads(file.read().split(b"\n")[-2])
    except (OSError, ValueError, IndexError):
        return "begins"
    return f"{line['stage']} {line['step']}"


def print_arms(name: str, arms: Sequence[PlannedArm], *, common: str, console: Console | None = None) -> None:
    """Show what a sweep would do: each arm, what it changes, where its runs stand."""
    console = Console() if console is None else console
    console.print(name, style="bold", markup=False, highlight=False)
    table = _table("arm", "changes", "seeds", "a run")
    for arm in arms:
        seeds = ", ".join(f"{seed} {_MARKS.get(state, '')}".strip() for seed, state in arm.states.items())
        table.add_row(arm.name, "\n".join(arm.changes) or "none", seeds, duration(arm.time_s))
    console.print(table, markup=False)
    to_run = [arm.time_s for arm in arms for state in arm.states.values() if state is not State.DONE]
    total = f"{len(to_run)} runs to go, about {duration(sum(to_run))} in all{common}: rough. Nothing was run."
    console.print(total, markup=False, highlight=False, soft_wrap=True)


_MARKS = {State.DONE: "(done)", State.UNFINISHED: "(begun)"}


def as_rich(table: Table) -> RichTable:
    """The table of the page, less the columns that a terminal has no room for."""
    shown = [index for index, column in enumerate(table.columns) if column not in ("range", "tokens")]
    rich = _table(*(table.columns[index] for index in shown))
    for column in rich.columns[1:]:
        column.justify = "right"
    for row in table.rows:
        rich.add_row(*(row[index] for index in shown))
    return rich


def _table(*columns: str) -> RichTable:
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
