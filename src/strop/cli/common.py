"""What several commands share: options and the plan of a dry run, and how a signal stops a command in order."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from strop.recipe.recipe import Recipe
    from strop.reports.console import ConsoleProgress


class Stopped(Exception):  # noqa: N818 - named for what happened
    """Ctrl-C or SIGTERM ended a run in order; the text says where, and is empty where no stage had begun."""


def run_until_stopped(work: Coroutine[Any, Any, object], progress: ConsoleProgress) -> None:
    """As `asyncio.run`; closes `progress` at the end. Raises `Stopped` where Ctrl-C or SIGTERM ends it."""
    with progress:
        try:
            asyncio.run(work)
        except KeyboardInterrupt as error:
            raise Stopped(progress.place) from error


@contextmanager
def sigterm_as_interrupt() -> Iterator[list[int]]:
    """Let SIGTERM do what Ctrl-C does; the list has the signal once it has come."""
    come: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        come.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell without job control
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield come
    finally:
        signal.signal(signal.SIGTERM, before)


RecipePath = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", metavar="RECIPE")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key, as in stages.rl.steps=10. Repeatable.", metavar="A.B=C")
]
Runs = Annotated[Path, typer.Option(help="Where run directories lie.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and its estimates; run nothing.")]
OnHardware = Annotated[
    str | None,
    typer.Option(help="Plan for these devices, which need not be here, as in 8xH100; with --dry-run.", metavar="NxDEVICE"),
]

OnCluster = Annotated[
    str | None,
    typer.Option(help="Run on the Ray cluster at host:port, or on the one that this machine is in (auto).", metavar="ADDRESS"),
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
    from strop.pipeline.hardware import ASSUMPTIONS, NOT_COUNTED, Hardware
    from strop.pipeline.plan import plan
    from strop.reports.terminal import print_plan

    if hardware is not None:
        recipe = recipe.model_copy(update={"hardware": hardware})
    stages = plan(recipe, until=until, start=start, only=only)
    basis = f"measured on this machine; {NOT_COUNTED}"
    if recipe.hardware:
        on = Hardware.named(recipe.hardware)
        is_short = on.is_several_machines and recipe.cluster is None
        several = ", which is several machines: use them with --cluster" if is_short else ""
        basis = f"on {on}{several}. {ASSUMPTIONS}"
    is_assumed = bool(recipe.hardware)
    print_plan(recipe.name, recipe.description, stages, basis=f"a rough estimate, {basis}", needs_basis=is_assumed, state=state)
    if any(stage.problem for stage in stages):
        raise typer.Exit(2)
