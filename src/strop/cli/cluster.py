"""The commands `strop cluster up`, `slurm` and `kuberay`."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.common import RecipePath, Set, on_cluster, sigterm_as_interrupt
from strop.errors import UserError

if TYPE_CHECKING:
    from strop.cluster.placement import Roles

app = typer.Typer(no_args_is_help=True, help="Start a Ray cluster on this machine, or print what starts one elsewhere.")

_GPUS = 8  # of a node, unless the recipe or the user says otherwise
_Nodes = Annotated[
    int | None, typer.Option(min=1, help="Number of nodes. Default: the recipe's `hardware`, or the fewest that it fits on.")
]
_Gpus = Annotated[int | None, typer.Option(min=0, help="GPUs of each node. Default: 8, or 0 if the recipe uses none.")]


@app.command()
def up(
    local: Annotated[int, typer.Option(min=1, max=64, help="Number of nodes on this machine.")],
    cpus: Annotated[int, typer.Option(min=0, help="Processors of each node. 0: a share of this machine's.")] = 0,
) -> None:
    """Start a cluster of nodes on this machine, to try out what runs on several. Ctrl-C ends it."""
    from strop.cluster.start import LocalCluster, LocalNode

    share = cpus or max(1, (os.cpu_count() or 1) // local)
    with sigterm_as_interrupt(), LocalCluster([LocalNode()] * local, cpus=share) as cluster:
        typer.echo(f"{local} nodes with {share} processors each at {cluster.address}. Use them from another terminal:\n")
        typer.echo(f"    strop train recipes/demo.toml --cluster {cluster.address}\n\nCtrl-C ends them.")
        try:
            cluster.wait()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end is under way


@app.command()
def slurm(recipe: RecipePath, overrides: Set = None, nodes: _Nodes = None, gpus: _Gpus = None) -> None:
    """Print a script for sbatch that starts Ray on all nodes of a job and trains RECIPE."""
    from strop.cluster.start import slurm_script

    name, command, num_nodes, num_gpus = _job(recipe, overrides or [], nodes, gpus)
    typer.echo(slurm_script(name, command, num_nodes=num_nodes, num_gpus=num_gpus), nl=False)


@app.command()
def kuberay(
    recipe: RecipePath,
    image: Annotated[str, typer.Option(help="Container image with strop[cluster] and ray[default].")],
    claim: Annotated[str, typer.Option(help="Persistent volume claim with recipe, models and runs.")],
    overrides: Set = None,
    nodes: _Nodes = None,
    gpus: _Gpus = None,
) -> None:
    """Print the manifest of a RayJob that trains RECIPE, for `kubectl apply`."""
    from strop.cluster.start import kuberay_manifest

    name, command, num_nodes, num_gpus = _job(recipe, overrides or [], nodes, gpus)
    typer.echo(kuberay_manifest(name, command, num_nodes=num_nodes, num_gpus=num_gpus, image=image, claim=claim), nl=False)


def _job(path: Path, overrides: Sequence[str], num: int | None, gpus: int | None) -> tuple[str, str, int, int]:
    """Return the name of the recipe at `path`, the command that trains it, the number of nodes, and the GPUs of each.

    Raises:
        UserError: a stage does not fit on `num` nodes, or on any number of nodes with so many GPUs.
    """
    from strop.cluster.placement import planned_nodes
    from strop.pipeline.hardware import Hardware
    from strop.pipeline.plan import roles_of
    from strop.recipe.load import load_recipe

    recipe = load_recipe(path, [*overrides, *on_cluster("auto")])
    devices = Hardware.named(recipe.hardware).num if recipe.hardware else 0
    if gpus is None:
        uses_gpus = any(roles_of(recipe, name, planned_nodes([_GPUS])).gpus for name in recipe.stages)
        gpus = min(devices, _GPUS) or (_GPUS if uses_gpus else 0)
    if num is None and devices and gpus:
        num = -(-devices // gpus)
    roles = [roles_of(recipe, name, planned_nodes([gpus])) for name in recipe.stages]
    words = ["strop", "train", str(path), *(word for one in overrides for word in ("--set", one)), "--cluster", "auto"]
    return recipe.name, shlex.join(words), _fewest_nodes(gpus, roles, num), gpus


def _fewest_nodes(gpus: int, stages: Sequence[Roles], num: int | None) -> int:
    """Return on how many nodes of so many GPUs every stage fits; `num` if that is given. Raises as `place`."""
    from strop.cluster.placement import place, planned_nodes

    def place_on(num: int) -> int:
        for roles in stages:
            place(planned_nodes([gpus] * num, prefix="node "), roles)
        return num

    most = num or max(1, *(roles.ranks + roles.engines + roles.sandboxes for roles in stages))
    for fewer in range(num or 1, most):
        with contextlib.suppress(UserError):
            return place_on(fewer)
    return place_on(most)
