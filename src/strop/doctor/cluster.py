"""Checks the nodes of a cluster for a recipe: what one of them lacks is named before anything is spent."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from strop.cluster.connection import Connection, connected
from strop.cluster.node_checks import nodes_that_do_not_see, unlike_nodes, versions
from strop.cluster.placement import Node
from strop.doctor.finding import Diagnosis, Finding
from strop.errors import StropError, UserError
from strop.pipeline.plan import missing_environments, roles_of
from strop.recipe.recipe import Recipe

_CLOCK_S = 1.0
_MADE_S = 30.0  # until what is sent is there
_TRANSFER_BYTES = 64 << 20
_SANDBOX_S = 120.0
_CONNECT_S = 5.0


Found: TypeAlias = Iterator[tuple[str, str]]
"""What was found, and the remedy; a problem has one, and without a problem the first says what is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cluster:
    """What is checked."""

    connection: Connection
    nodes: Sequence[Node]
    recipe: Recipe
    directory: Path


def examine_cluster(recipe: Recipe, directory: Path, progress: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Check the recipe's cluster.

    Args:
        directory: of the runs, which all nodes must see.
        progress: called with the name of each thing that is begun.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    findings: list[Finding] = []
    with connected(recipe.cluster, None) as connection:
        assert connection is not None
        cluster = _Cluster(connection=connection, nodes=connection.nodes(), recipe=recipe, directory=directory.absolute())
        for name, check in _CHECKS.items():
            progress(f"checking: {name}")
            try:
                found = [Finding(check=name, detail=detail, remedy=remedy) for detail, remedy in check(cluster)]
            except StropError as error:
                found = [Finding.from_message(name, str(error))]
            findings += [finding for finding in found if finding.is_problem] or found[:1]
    return Diagnosis(subject=f"{recipe.name} on {len(cluster.nodes)} nodes", findings=tuple(findings))


def _check_placement(cluster: _Cluster) -> Found:
    lines = []
    for name, stage in cluster.recipe.stages.items():
        if stage.opens_engines or hasattr(stage.config, "trainer"):
            placed = cluster.connection.placement_of(roles_of(cluster.recipe, name, cluster.nodes))
            lines += [f"{name}: {line}" for line in placed.lines()]
    yield "\n".join(lines) or "no stage needs a node", ""


def _check_versions(cluster: _Cluster) -> Found:
    yield from unlike_nodes(cluster.connection)
    yield ", ".join(f"{name} {number}" for name, number in versions().items()), ""


def _check_directory(cluster: _Cluster) -> Found:
    yield from nodes_that_do_not_see(cluster.connection, cluster.directory)
    yield f"all nodes see {cluster.directory}", ""


def _check_clocks(cluster: _Cluster) -> Found:
    largest = 0.0
    for node in cluster.nodes:
        before = time.time()
        there = cluster.connection.run(node, time.time)
        offset = there - (before + time.time()) / 2
        largest = max(largest, abs(offset))
        if abs(offset) > _CLOCK_S:
            remedy = f"Synchronise the clock of {node} (chrony, or systemd-timesyncd)."
            yield f"the clock of node {node} is off by {offset:+.1f} s.", remedy
    yield f"within {1000 * largest:.0f} ms", ""


def _check_gpus(cluster: _Cluster) -> Found:
    for node in cluster.nodes:
        if (found := cluster.connection.run(node, _num_gpus)) != int(node.all_gpus):
            detail = f"node {node} gave Ray {int(node.all_gpus)} GPUs, but torch finds {found} there."
            yield detail, f"Mend the driver or the torch build of {node}, or start its Ray with --num-gpus {found}."
    yield ", ".join(f"{node}: {int(node.gpus)} of {int(node.all_gpus)} free" for node in cluster.nodes), ""


def _check_engines(cluster: _Cluster) -> Found:
    num_placed = 0
    for name in cluster.recipe.stages:
        try:
            placed = cluster.connection.placement_of(roles_of(cluster.recipe, name, cluster.nodes))
        except UserError:  # the check of placement says so
            continue
        num_placed += 1
        for error in missing_environments(cluster.connection, cluster.recipe.for_stage(name).engine, placed):
            found = Finding.from_message("engine", str(error))
            yield found.detail, found.remedy
    yield "each node of an engine has its environment" if num_placed else "no stage can be placed", ""


def _check_sandbox(cluster: _Cluster) -> Found:
    recipe, levels = cluster.recipe, []
    assert recipe.cluster is not None
    for node in cluster.nodes if recipe.cluster.sandbox_nodes else cluster.nodes[:1]:
        level, why = cluster.connection.run(node, _level, recipe.sandbox.min_level.value, timeout_s=_SANDBOX_S)
        levels.append(f"{node}: {level}")
        if why:
            remedy = f"Run `strop sandbox check` on {node}, and mend what it names or lower sandbox.min_level."
            yield f"node {node}: {why}", remedy
    yield ", ".join(levels), ""


def _check_transfer(cluster: _Cluster) -> Found:
    """Between the first node and each other one, in both directions: one listens and sends, the other connects and receives."""
    connection, shown = cluster.connection, []
    first, *others = cluster.nodes
    for source, target in [pair for node in others for pair in ((first, node), (node, first))]:
        if why := connection.run(target, _connect, source.address, _listening_port(connection, source)):
            remedy = "Open all TCP ports between the nodes; ranks and Ray choose theirs when they start."
            yield f"node {target} does not reach {source}: {why}.", remedy
            continue
        content = connection.start(source, bytes, _TRANSFER_BYTES)
        connection.ray.wait([content], timeout=_MADE_S, fetch_local=False)
        started = time.perf_counter()
        connection.wait(target, connection.start(target, len, values=[content]))
        shown.append(f"{source} to {target} {_TRANSFER_BYTES / (time.perf_counter() - started) / 1e6:,.0f} MB/s")
    yield "; ".join(shown) or "one node", ""


_CHECKS: Mapping[str, Callable[[_Cluster], Found]] = {
    "placement": _check_placement,
    "versions": _check_versions,
    "shared directory": _check_directory,
    "clocks": _check_clocks,
    "GPUs": _check_gpus,
    "engine": _check_engines,
    "sandbox": _check_sandbox,
    "ports": _check_transfer,
}


def _num_gpus() -> int:
    """Return how many GPUs the driver shows; what Ray shows an actor is another number."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return said.stdout.count("GPU ")


def _level(min_level: str) -> tuple[str, str]:
    """Return the level of isolation that this machine gives, and why it is too low if it is."""
    command = [sys.executable, "-m", "strop.cli", "sandbox", "check", "--json", "--min-level", min_level]
    said = subprocess.run(command, capture_output=True, text=True, timeout=_SANDBOX_S, check=False)
    with contextlib.suppress(ValueError):
        if level := json.loads(said.stdout)["level"]:
            return level, ""
    return "none", said.stderr.strip().partition("\n")[0] or "the sandbox does not start."


_listener: socket.socket | None = None  # of this node; the last one


def _listening_port(connection: Connection, node: Node) -> int:
    port: int = connection.wait(node, connection.start(node, _listen))  # in its agent, also where the node is this one
    return port


def _listen() -> int:
    global _listener
    _listener = socket.create_server(("", 0))
    port: int = _listener.getsockname()[1]
    return port


def _connect(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return str(error)
    return ""
