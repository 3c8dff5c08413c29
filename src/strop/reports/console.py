"""Shows a run in a terminal, or as plain lines where there is none: stages, one line a step, the end result."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from strop.reports.log import STEPPED, why_stale
from strop.reports.scales import Unit, duration, figure
from strop.runs import RunDirectory

_SHOWN = {  # metric -> how it is called in a line, and its unit
    "rollout/reward_mean": ("reward {}", Unit.PLAIN),
    "validation/accuracy": ("validated {}", Unit.PERCENT),
    "rollout/kept_fraction": ("kept {}", Unit.PERCENT),
    "rollout/tool_error_rate": ("tool errors {}", Unit.PERCENT),
    "rollout/length_tokens_mean": ("length {}", Unit.PLAIN),
    "sft/loss": ("loss {}", Unit.PLAIN),
    "dpo/loss": ("loss {}", Unit.PLAIN),
    "dpo/accuracy": ("accuracy {}", Unit.PERCENT),
    "validation/pair_accuracy": ("held out {}", Unit.PERCENT),
    "rollout/tokens_per_s": ("{} tokens/s", Unit.PLAIN),
    "sft/tokens_per_s": ("{} tokens/s", Unit.PLAIN),
}
_PLAN_TABLE_WIDTH = 120  # where a terminal has less, columns would leave what a stage does too little of it
_FIGURES_WIDTH = 64  # of all columns of the final table but the first, with what stands between them
_LINES_PER_STAGE = 20  # of a stage whose steps are too quick to be read one by one


@dataclass(slots=True, kw_only=True)
class _Stage:
    """The stage that is running now."""

    name: str
    kind: str
    total: int
    done_before: int
    done: int
    started: float
    bar: TaskID | None


class ConsoleProgress:
    """Implements `Progress`. In a terminal a bar with the time left stays below the lines; `close`, or `with`, removes it."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away. Safe to call twice."""
        self._bars.stop()

    @property
    def place(self) -> str:
        """How far the stage that is running has come, in words; empty where none is."""
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
            bar = self._bars.add_task(name, total=total_steps, completed=done_steps, left="")
            self._bars.start()
            self._console.show_cursor(True)  # a process that is killed here must not leave a terminal without one
        self._stage = _Stage(
            name=name,
            kind=kind,
            total=total_steps,
            done_before=done_steps,
            done=done_steps,
            started=self._clock(),
            bar=bar,
        )

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        stage = self._stage
        assert stage is not None, "a step of no stage: stage_started comes first"
        stage.done = step
        left = self._time_left(stage, step)
        if stage.bar is not None:
            self._bars.update(stage.bar, completed=step, left=left)
        if not self._is_worth_a_line(stage, step, metrics):
            return
        parts = [text.format(figure(metrics[key], unit)) for key, (text, unit) in _SHOWN.items() if key in metrics]
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
            self._console.print(_result_table(results, stale, width=self._console.width), markup=False)
        self._say(f"report: {report}", style="bold")

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _time_left(self, stage: _Stage, step: int) -> str:
        num_done, num_left = step - stage.done_before, stage.total - step
        if num_done < 1 or num_left < 1:
            return ""
        return f"{duration((self._clock() - stage.started) / num_done * num_left)} left"

    def _is_worth_a_line(self, stage: _Stage, step: int, metrics: Mapping[str, float]) -> bool:
        """Every step with rollouts of its own; of quicker stages a few, and none where a bar already says it all."""
        if stage.kind in STEPPED or step == stage.total:
            return bool(metrics) or stage.bar is None
        if not metrics and stage.bar is not None:
            return False
        return step % math.ceil(stage.total / (_LINES_PER_STAGE if metrics else 4)) == 0


def _unit(kind: str) -> str:
    """What the steps of a stage of this kind are called."""
    return "tasks" if kind == "eval" else "steps"


class PlannedStage(Protocol):
    """What `print_plan` shows of one stage."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def init(self) -> str: ...
    @property
    def arithmetic(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def memory_mib(self) -> float: ...
    @property
    def time_s(self) -> float: ...
    @property
    def schedule(self) -> Sequence[str]: ...


def print_plan(name: str, description: str, stages: Sequence[PlannedStage], *, console: Console | None = None) -> None:
    """Show what a recipe would do, with its estimates."""
    console = Console() if console is None else console
    console.print(f"{name}: {description}" if description else name, style="bold", markup=False, highlight=False)
    if console.width >= _PLAN_TABLE_WIDTH:
        console.print(_plan_table(stages), markup=False)
    else:
        for stage in stages:
            _print_planned(stage, console)
    total_s = sum(stage.time_s for stage in stages)
    if total_s:
        console.print(f"about {duration(total_s)} in all: rough, measured on this machine just now", highlight=False)
    console.print("Nothing was run.", highlight=False)


def _plan_table(stages: Sequence[PlannedStage]) -> Table:
    table = _table("stage", "kind", "from", "what", "tokens", "memory", "time")
    for column in table.columns[4:]:
        column.justify = "right"
    for stage in stages:
        what = "\n".join((stage.arithmetic, *stage.schedule))
        table.add_row(stage.name, stage.kind, stage.init or "–", what, *(each or "–" for each in _estimates(stage)))
    return table


def _print_planned(stage: PlannedStage, console: Console) -> None:
    """The stage's name and where it starts from, and below them, indented, what it does and takes."""
    origin = f" · from {stage.init}" if stage.init else ""
    tokens, *others = _estimates(stage)
    takes = ", ".join(each for each in (tokens and f"{tokens} tokens", *others) if each)
    heading = textwrap.wrap(
        f"{stage.name} · {stage.kind}{origin}", console.width, subsequent_indent="    ", break_on_hyphens=False
    )
    console.print("\n".join(heading), style="bold", markup=False, highlight=False)
    for text in filter(None, (stage.arithmetic, *stage.schedule, takes)):
        lines = textwrap.wrap(text, console.width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        console.print("\n".join(lines), markup=False, highlight=False)


def _estimates(stage: PlannedStage) -> tuple[str, str, str]:
    """Tokens, memory and time; empty where nothing is known, or nothing is to be told."""
    return (
        f"≤ {stage.tokens:,}" if stage.tokens else "",
        f"{stage.memory_mib:,.0f} MiB" if stage.memory_mib else "",
        duration(stage.time_s) if stage.time_s else "",
    )


def _result_table(results: Sequence[Mapping[str, Any]], stale: Set[str], *, width: int) -> Table:
    """Results of `stale` stages say that they are.

    Figures are never broken; a name too long for what they leave of `width` is, behind a hyphen where it has one.
    """
    table = _table("stage", "accuracy", "95% interval", "tool\nerrors", "when\nright", "tokens", "truncated")
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    room = max(12, width - _FIGURES_WIDTH)
    for result in results:
        name = str(result.get("stage", ""))
        table.add_row(
            "\n".join(textwrap.wrap(f"{name} (stale)" if name in stale else name, room)),
            _shown(result, "accuracy"),
            f"{_shown(result, 'accuracy_low')} – {_shown(result, 'accuracy_high')}",
            _shown(result, "tool_error_rate"),
            _shown(result, "tool_error_rate_correct"),
            _shown(result, "length_tokens_mean", Unit.PLAIN),
            _shown(result, "truncated_fraction"),
        )
    return table


def _shown(result: Mapping[str, Any], key: str, unit: Unit = Unit.PERCENT) -> str:
    return figure(result[key], unit) if key in result else "missing"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
