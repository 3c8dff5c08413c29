"""`strop cs336`: helps with Stanford's CS336 assignment 5."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Help with Stanford's CS336 assignment 5.")


@app.command()
def check(
    module: Annotated[Path, typer.Argument(help="A Python file with your functions, or your tests/adapters.py.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random inputs.")] = 0,
) -> None:
    """Compare your functions with strop's on random and on edge inputs, and name the first difference of each."""
    from strop.cs336.check import check_module
    from strop.reports.scales import Table
    from strop.reports.terminal import print_table

    found = check_module(module, seed=seed)
    rows = tuple((each.name, str(each.num_cases), each.difference or "equal") for each in found)
    print_table(Table(columns=("function", "inputs", "result"), rows=rows), wrapped=("result",))
    different = [each for each in found if each.difference]
    if different:
        first = different[0]
        raise UserError(f"{len(different)} of {len(found)} functions differ. {first.name}, {first.difference}.")
    typer.echo(f"all {len(found)} functions are equal to strop's")
