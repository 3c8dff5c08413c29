"""The commands `strop cluster up`, `slurm` and `kuberay`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from strop.cli.common import sigterm_as_interrupt

app = typer.Typer(no_args_is_help=True, help="Start a Ray cluster on this machine, or print what starts one elsewhere.")

_Recipe = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", metavar="RECIPE")]
_Nodes = Annotated[int, typer.Option(min=1, help="Number of nodes.")]
_Gpus = Annotated[int, typer.Option(min=0, help="GPUs of each node.")]


@app.command()
def up(
    local: Annotated[int, typer.Option(min=1, max=64, help="Number of nodes on this machine.")],
    cpus: Annotated[int, typer.Option(min=0, help="Processors of each node. 0: a share of this machine's.")] = 0,
) -> None:
    """Start a cluster of nodes on this machine, to try out what runs on several. Ctrl-C ends it."""
    from strop.cluster.local import LocalCluster, LocalNode

    share = cpus or max(1, (os.cpu_count() or 1) // local)
    with sigterm_as_interrupt(), LocalCluster([LocalNode()] * local, cpus=share) as cluster:
        typer.echo(f"{local} nodes with {share} processors each at {cluster.address}. Use them from another terminal:\n")
        typer.echo(f"    strop train recipes/demo.toml --cluster {cluster.address}\n\nCtrl-C ends them.")
        try:
            cluster.wait()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end is under way


@app.command()
def slurm(recipe: _Recipe, nodes: _Nodes, gpus: _Gpus = 8) -> None:
    """Print a script for sbatch that starts Ray on all nodes of a job and trains RECIPE."""
    from strop.cluster.rendering import slurm_script
    from strop.recipe.load import load_recipe

    typer.echo(slurm_script(load_recipe(recipe, []).name, recipe, num_nodes=nodes, num_gpus=gpus), nl=False)


@app.command()
def kuberay(
    recipe: _Recipe,
    nodes: _Nodes,
    image: Annotated[str, typer.Option(help="Container image with strop[cluster].")],
    claim: Annotated[str, typer.Option(help="Persistent volume claim with recipe, models and runs.")],
    gpus: _Gpus = 8,
) -> None:
    """Print the manifest of a RayJob that trains RECIPE, for `kubectl apply`."""
    from strop.cluster.rendering import kuberay_manifest
    from strop.recipe.load import load_recipe

    name = load_recipe(recipe, []).name
    typer.echo(kuberay_manifest(name, recipe, num_nodes=nodes, num_gpus=gpus, image=image, claim=claim), nl=False)
