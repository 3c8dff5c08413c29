"""Checks the nodes of a cluster for a recipe: what one of them lacks is named before anything is spent."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from strop.cluster.connection import Connection, connected, nodes_that_do_not_see, unlike_nodes, versions
from strop.cluster.placement import Node
from strop.doctor.finding import Diagnosis, Finding
from strop.engine.config import ServerConfig
from strop.engine.opening import check_interpreter
from strop.errors import StropError, UserError
from strop.pipeline.plan import roles_of
from strop.recipe.recipe import Recipe

_CLOCK_S = 1.0
_TRANSFER_BYTES = 64 << 20
_SANDBOX_S = 120.0
_CONNECT_S = 5.0


def examine_cluster(recipe: Recipe, directory: Path, progress: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Check the recipe's cluster.

    Args:
        directory: of the runs, which all nodes must see.
        progress: called with the name of each thing that is begun.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    directory.mkdir(parents=True, exist_ok=True)
    findings: list[Finding] = []
    with connected(recipe.cluster, None) as connection:
        assert connection is not None
        nodes = connection.nodes()
        for name, check in _CHECKS.items():
            progress(f"checking: {name}")
            try:
                problems = list(check(connection, nodes, recipe, directory))
            except StropError as error:
                findings.append(Finding.from_message(name, str(error)))
                continue
            findings += [finding for finding in problems if finding.is_problem] or problems[:1]
    return Diagnosis(subject=f"{recipe.name} on {len(nodes)} nodes", findings=tuple(findings))


def _check_placement(connection: Connection, nodes: Sequence[Node], recipe: Recipe, directory: Path) -> Iterator[Finding]:
    del directory
    lines = []
    for name, stage in recipe.stages.items():
        if stage.opens_engines or hasattr(stage.config, "trainer"):
            lines += [f"{name}: {line}" for line in connection.place(roles_of(recipe, name, nodes)).lines()]
    yield Finding(check="placement", detail="\n".join(lines) or "no stage needs a node")


def _check_versions(connection: Connection, nodes: Sequence[Node], recipe: Recipe, directory: Path) -> Iterator[Finding]:
    del nodes, recipe, directory
    for detail, remedy in unlike_nodes(connection):
        yield Finding(check="versions", detail=detail, remedy=remedy)
    yield Finding(check="versions", detail=", ".join(f"{name} {number}" for name, number in versions().items()))


def _check_directory(connection: Connection, nodes: Sequence[Node], recipe: Recipe, directory: Path) -> Iterator[Finding]:
    del nodes, recipe
    for detail, remedy in nodes_that_do_not_see(connection, directory.absolute()):
        yield Finding(check="shared directory", detail=detail, remedy=remedy)
    yield Finding(check="shared directory", detail=f"all nodes see {directory.absolute()}")


def _check_clocks(connection: Connection, nodes: Sequence[Node], recipe: Recipe, directory: Path) -> Iterator[Finding]:
    del recipe, directory
    largest = 0.0
    for node in nodes:
        before = time.time()
        there = connection.run(node, time.time)
        offset = there - (before + time.time()) / 2
        largest = max(largest, abs(offset))
        if abs(offset) > _CLOCK_S:
            yield Finding(
                check="clocks",
                detail=f"the clock of node {node} is off by {offset:+.1f} s.",
                remedy=f"Synchronise the clock of {node} (chrony, or systemd-timesyncd).",
            )
    yield Finding(check="clocks", detail=f"within {1000 * largest:.0f} ms")


def _check_gpus(connection: Connection, nodes: Sequence[Node], recipe: Recipe, directory: Path) -> Iterator[Finding]:
    del recipe, directory
    for node in nodes:
        if (found := connection.run(node, _num_gpus)) != int(node.all_gpus):
            yield Finding(
                check="GPUs",
                detail=f"node {node} gave Ray {int(node.all_gpus)} GPUs, but torch finds {found} there.",
                remedy=f"Mend the driver or the torch build of {node}, or start its Ray with --num-gpus {found}.",
            )
    yield Finding(check="GPUs", detail=", ".join(f"{node}: {int(node.gpus)} of {int(node.all_gpus)} free" for node in nodes))


def _check_engines(connection: Connection, nodes: Sequence[Node], recipe: Recipe, directory: Path) -> Iterator[Finding]:
    del directory
    for name, stage in recipe.stages.items():
        engine = recipe.for_stage(name).engine
        if not stage.opens_engines or not isinstance(engine, ServerConfig) or engine.python is None:
            continue
        for node in dict.fromkeys(connection.place(roles_of(recipe, name, nodes)).engines):
            try:
                connection.run(node, check_interpreter, engine)
            except UserError as error:
                yield Finding.from_message("engine", f"node {node}: {error}")
    yield Finding(check="engine", detail="each node of an engine has its environment")


def _check_sandbox(connection: Connection, nodes: Sequence[Node], recipe: Recipe, directory: Path) -> Iterator[Finding]:
    del directory
    levels = []
    assert recipe.cluster is not None
    for node in nodes if recipe.cluster.sandbox_nodes else nodes[:1]:
        level, why = connection.run(node, _level, recipe.sandbox.min_level.value, timeout_s=_SANDBOX_S)
        levels.append(f"{node}: {level}")
        if why:
            yield Finding(
                check="sandbox",
                detail=f"node {node}: {why}",
                remedy=f"Run `strop sandbox check` on {node}, and mend what it names or lower sandbox.min_level.",
            )
    yield Finding(check="sandbox", detail=", ".join(levels))


def _check_transfer(connection: Connection, nodes: Sequence[Node], recipe: Recipe, directory: Path) -> Iterator[Finding]:
    """The first node listens and sends; the others connect and receive."""
    del recipe, directory
    shown = []
    for node in nodes[1:]:
        if why := connection.run(node, _connect, nodes[0].address, _listening_port(connection, nodes[0])):
            yield Finding(
                check="ports",
                detail=f"node {node} does not reach {nodes[0]}: {why}.",
                remedy="Open all TCP ports between the nodes; ranks and Ray choose theirs when they start.",
            )
            continue
        content = connection.start(nodes[0], bytes, _TRANSFER_BYTES)
        connection.ray.wait([content])
        started = time.perf_counter()
        connection.wait(node, connection.start(node, len, values=[content]))
        shown.append(f"to {node} {_TRANSFER_BYTES / (time.perf_counter() - started) / 1e6:,.0f} MB/s")
    yield Finding(check="ports", detail="; ".join(shown) or "one node")


_CHECKS = {
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
