"""`strop analyze`: words typed by a person -> one stage's rollouts, read token by token -> a table, a page, a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def analyze(
    run: Annotated[Path, typer.Argument(help="A run directory, as in runs/demo.", metavar="RUN", show_default=False)],
    stage: Annotated[
        str | None,
        typer.Option("--stage", help="Which stage's rollouts; the last that learned from some by default.", show_default=False),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", help="Which steps, as in 1-10,25; all by default.", show_default=False)
    ] = None,
) -> None:
    """Where a policy was uncertain: entropy after tool results, in calls and in reasoning; forking and reflection tokens."""
    from rich.console import Console

    from strop.analysis.document import parts_table, positions_table, size
    from strop.analysis.page import write_analysis
    from strop.analysis.read import parse_steps, read_analysis
    from strop.reports.terminal import print_table
    from strop.run_directory import RunDirectory

    directory = RunDirectory(run)
    found = read_analysis(directory, stage=stage, steps=None if steps is None else parse_steps(steps))
    page, document = write_analysis(directory, found)
    console = Console()
    console.print(f"{found.stage} · {size(found)}", style="bold", markup=False, highlight=False, soft_wrap=True)
    for table in (parts_table(found.total), positions_table(found.total)):
        console.print()
        print_table(table, console=console)
    console.print()
    typer.echo(f"page: {page}")
    typer.echo(f"json: {document}")
