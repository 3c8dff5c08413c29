"""Text, tables and plans for a terminal. Control characters in names and descriptions are shown as escapes, never sent."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from strop.reports.number_format import Table, duration

# Control characters other than newline and tab, marks that reverse the direction of text, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return `text` with each control character as an escape such as \x1b."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def print_table(
    table: Table, *, console: Console | None = None, without: Collection[str] = (), wrapped: Collection[str] = ()
) -> None:
    """Print `table` within the width of the terminal.

    Args:
        without: columns that are left out.
        wrapped: columns that may be broken into lines; numbers never are.
    """
    shown = [index for index, column in enumerate(table.columns) if column not in without]
    rich = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for index in shown:
        column, is_text = table.columns[index], index == 0 or table.columns[index] in wrapped
        side: Literal["left", "right"] = "left" if is_text else "right"
        rich.add_column(Text(printable(column)), overflow="fold", justify=side, no_wrap=column not in wrapped)
    for row in table.rows:
        rich.add_row(*(Text(printable(row[index])) for index in shown))
    (console or Console()).print(rich)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage in words and in estimates.

    Tokens are upper bounds, with every rollout at its limit; times take a third of that.
    """

    name: str
    kind: str
    init: str
    arithmetic: str
    tokens: int
    memory_mib: float  # 0, like the time, if the size of the model is unknown
    time_s: float
    schedule: tuple[str, ...] = ()  # changes on the way, roles on other hardware, and missing files, a line each
    problem: str = ""  # why the hardware cannot run it


def print_plan(
    name: str,
    description: str,
    stages: Sequence[PlannedStage],
    *,
    basis: str = "a rough estimate, measured on this machine",
    needs_basis: bool = False,
    state: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Print what a recipe would do, with its estimates.

    Args:
        basis: what the estimates rest on.
        needs_basis: show it also where no time can be given for all stages.
        state: of the run, if it has begun, in lines.
    """
    console = Console() if console is None else console
    console.print(printable(f"{name}: {description}" if description else name), style="bold", markup=False, highlight=False)
    for stage in stages:
        _print_planned(stage, console)
    total_s = 0.0 if any(stage.problem for stage in stages) else sum(stage.time_s for stage in stages)
    if total_s or needs_basis:
        console.print((f"about {duration(total_s)} in all: " if total_s else "") + basis, highlight=False)
    for line in state:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    console.print("Nothing was run.", highlight=False)


def _print_planned(stage: PlannedStage, console: Console) -> None:
    """Print the stage's name and origin, and indented below them what it does and needs."""
    origin = f" · from {stage.init}" if stage.init else ""
    estimates = (
        f"≤ {stage.tokens:,} tokens" if stage.tokens else "",
        f"{stage.memory_mib:,.0f} MiB" if stage.memory_mib else "",
        duration(stage.time_s) if stage.time_s else "",
    )
    takes = ", ".join(filter(None, estimates))
    heading = textwrap.wrap(
        f"{stage.name} · {stage.kind}{origin}", console.width, subsequent_indent="    ", break_on_hyphens=False
    )
    console.print(printable("\n".join(heading)), style="bold", markup=False, highlight=False)
    for text in filter(None, (stage.arithmetic, *stage.schedule, takes, stage.problem)):
        lines = textwrap.wrap(text, console.width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        console.print(printable("\n".join(lines)), markup=False, highlight=False)
