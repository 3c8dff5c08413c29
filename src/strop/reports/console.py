"""Shows a run in a terminal: stages, one line a step, the results."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from strop.reports import trackers
from strop.reports.evaluations import benchmark_table, interval, shown
from strop.reports.log import why_stale
from strop.reports.number_format import Table, Unit, duration, figure, unit_of
from strop.reports.panels import PANELS
from strop.reports.terminal import print_table, printable
from strop.run_directory import RunDirectory

_NUMBERS_WIDTH = 66  # of all columns of the final table but the first
_LINES_PER_STAGE = 20  # of a stage with quick steps


@dataclass(slots=True, kw_only=True)
class _Stage:
    """The stage that runs now."""

    name: str
    kind: str
    total: int
    done: int
    time_left: TimeLeft
    bar: TaskID | None


class TimeLeft:
    """Estimates the time that a stage has left from the mean time of its steps without the longest.

    The longest is often the first, which includes the start of the stage, or one that a busy machine delayed.
    """

    def __init__(self, *, total: int, done: int, now: float) -> None:
        self._total = total
        self._start = self._last = (done, now)
        self._longest = (0, 0.0)  # steps and seconds

    def after(self, step: int, now: float) -> float | None:
        """Return the seconds left after `step`, which is done `now`; None if they are unknown, or the stage is done."""
        gap = (step - self._last[0], now - self._last[1])
        self._last = (step, now)
        self._longest = max(self._longest, gap, key=lambda each: each[1])
        num_steps, time_s = step - self._start[0], now - self._start[1]
        if num_steps < 1 or step >= self._total:
            return None
        if num_steps > self._longest[0]:
            num_steps, time_s = num_steps - self._longest[0], time_s - self._longest[1]
        return time_s / num_steps * (self._total - step)


class ConsoleProgress(trackers.Progress, AbstractContextManager["ConsoleProgress", None]):
    """Shows lines. In a terminal a bar with the time left stays below the lines until `close`."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console() if console is None else console
        self._clock = clock
        self._stage: _Stage | None = None
        self._entered = ""
        self._bars = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar. Safe to call twice."""
        self._bars.stop()

    @property
    def place(self) -> str:
        """The progress of the current stage in words; "" if there is none."""
        stage = self._stage
        if stage is None:
            return f"in {self._entered}" if self._entered else ""
        done = f", with {stage.done} of {stage.total} {_unit(stage.kind)} done" if stage.total > 1 else ""
        return f"in {stage.name}{done}"

    def stage_entered(self, name: str) -> None:
        self._entered = name

    def stage_started(self, name: str, kind: str, total_steps: int, done_steps: int) -> None:
        resumed = f", {done_steps} done before" if done_steps else ""
        size = f" · {total_steps} {_unit(kind)}{resumed}" if total_steps > 1 else ""
        self._console.print()
        self._say(f"{name} · {kind}{size}" if name != kind else f"{name}{size}", style="bold")
        bar = None
        if total_steps > 1 and self._console.is_terminal:
            bar = self._bars.add_task(escape(printable(name)), total=total_steps, completed=done_steps, left="")
            self._bars.start()
            self._console.show_cursor(True)  # so that a kill does not leave the terminal without a cursor
        left = TimeLeft(total=total_steps, done=done_steps, now=self._clock())
        self._stage = _Stage(name=name, kind=kind, total=total_steps, done=done_steps, time_left=left, bar=bar)

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        stage = self._stage
        assert stage is not None, "stage_started comes before step"
        stage.done = step
        left_s = stage.time_left.after(step, self._clock())
        left = "" if left_s is None else f"{duration(left_s)} left"
        if stage.bar is not None:
            self._bars.update(stage.bar, completed=step, left=left)
        if not self._is_worth_a_line(stage, step, metrics):
            return
        shown = ((key, text) for key, text in PANELS.progress.items() if key in metrics)
        parts = [text.format(figure(metrics[key], unit_of(key))) for key, text in shown]
        width = len(str(stage.total))
        self._say("   ".join([f"  {step:>{width}}/{stage.total}", *parts, *([left] if left else [])]))

    def stage_finished(self, name: str, summary: str) -> None:
        if self._stage is not None and self._stage.bar is not None:
            self._bars.remove_task(self._stage.bar)
            self._bars.stop()
        self._stage, self._entered = None, ""
        self._say(f"  ✓ {name}: {summary}", style="green")

    def note(self, text: str) -> None:
        self._say(f"  → {text}", style="cyan")

    def warning(self, text: str, *, stage: str = "") -> None:
        self._say(f"  ! {stage}: {text}" if stage else f"  ! {text}", style="yellow")

    def finished(self, results: Sequence[Mapping[str, Any]], report: Path) -> None:
        self.close()
        self._console.print()
        if results:
            names = [str(result.get("stage", "")) for result in results]
            stale = {name for name in names if name and why_stale(RunDirectory(report.parent).stage(name))}
            print_table(_result_table(results, stale, width=self._console.width), console=self._console, wrapped=("stage",))
            current = [each for each in results if each.get("stage") not in stale and each.get("tools", "real") == "real"]
            comparable = [each for each in current if {"init", "benchmark", "accuracy"} <= each.keys()]
            if table := benchmark_table((each["init"], each["benchmark"], each) for each in comparable):
                self._console.print()
                print_table(table, console=self._console)
        self._say(f"report: {report}", style="bold")

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def _is_worth_a_line(self, stage: _Stage, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether a step gets a line: each step with rollouts, a few of a quick stage, and none that only moves the bar."""
        if "rollout/reward_mean" in metrics or step == stage.total:
            return bool(metrics) or stage.bar is None
        if not metrics and stage.bar is not None:
            return False
        return step % math.ceil(stage.total / (_LINES_PER_STAGE if metrics else 4)) == 0


def _unit(kind: str) -> str:
    """Return the name of the steps of a stage of this kind."""
    return "tasks" if kind == "eval" else "steps"


def _result_table(results: Sequence[Mapping[str, Any]], stale: Set[str], *, width: int) -> Table:
    """Return one row an evaluation. Without a verdict on what is right it shows the mean reward in place of the accuracy.

    Numbers are never broken; a name longer than the rest of `width` is, after a hyphen if it has one.
    """
    has_accuracy = any("accuracy" in result for result in results)
    room = max(12, width - _NUMBERS_WIDTH)
    rows = []
    for result in results:
        name = str(result.get("stage", ""))
        reward = shown(result, "reward_mean", Unit.PLAIN)
        score = shown(result, "accuracy") if "accuracy" in result else f"reward {reward}" if has_accuracy else reward
        rows.append(
            {
                "stage": "\n".join(textwrap.wrap(f"{name} (stale)" if name in stale else name, room)),
                "accuracy" if has_accuracy else "mean reward": score,
                "95% interval": interval(result),
                "tool\nerrors": "no tool\ncalls" if result.get("tool_calls_mean") == 0 else shown(result, "tool_error_rate"),
                "when\nright": shown(result, "tool_error_rate_correct"),
                "tokens": shown(result, "length_tokens_mean", Unit.PLAIN),
                "truncated": shown(result, "truncated_fraction"),
            }
        )
    return Table.of(rows)
