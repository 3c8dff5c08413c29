"""The options `--dry-run` and `--hardware`, and the plan that they print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from strop.recipe.recipe import Recipe

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and its estimates; run nothing.")]
OnHardware = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        help="Plan for these devices, which need not be here, as in 8xH100; with --dry-run.",
        metavar="NxDEVICE",
        show_default=False,
    ),
]

OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Run on the Ray cluster at host:port, or on the one that this machine is in (auto).",
        metavar="ADDRESS",
        show_default=False,
    ),
]


def on_cluster(address: str | None) -> list[str]:
    """The override of a recipe's key."""
    return [] if address is None else [f"cluster.address={json.dumps(address)}"]


def print_dry_run(
    recipe: Recipe,
    hardware: str | None,
    *,
    until: str | None = None,
    start: Sequence[str] = (),
    only: Sequence[str] = (),
    state: Sequence[str] = (),
) -> None:
    """Print the plan of `recipe`. Raises `Exit` with code 2 if the hardware cannot run a stage."""
    from strop.pipeline.hardware import ASSUMPTIONS, Hardware
    from strop.pipeline.plan import plan
    from strop.reports.terminal import print_plan

    if hardware is not None:
        recipe = recipe.model_copy(update={"hardware": hardware})
    stages = plan(recipe, until=until, start=start, only=only)
    basis = "measured on this machine"
    if recipe.hardware:
        on = Hardware.named(recipe.hardware)
        is_short = on.is_several_machines and recipe.cluster is None
        several = ", which is several machines: use them with --cluster" if is_short else ""
        basis = f"on {on}{several}. {ASSUMPTIONS}"
    print_plan(recipe.name, recipe.description, stages, basis=f"a rough estimate, {basis}", state=state)
    if any(stage.problem for stage in stages):
        raise typer.Exit(2)
