"""What all nodes of a cluster must have in common: the versions of this package and others, and the directory of runs."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from strop.run_directory import file_digests, writing_to

if TYPE_CHECKING:
    from strop.cluster.connection import Connection

_START_S = 60.0


def versions() -> dict[str, str]:
    """Return what must be the same on all nodes."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"Python": platform.python_version()}
    for name in ("strop", "torch", "transformers", "ray"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    digest = hashlib.sha256("".join(file_digests(sorted(Path(__file__).parents[1].rglob("*.py"))).values()).encode())
    return {**found, "strop": f"{found.get('strop')} ({digest.hexdigest()[:8]})"}  # one version covers many commits


def unlike_nodes(connection: Connection) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with each node that has other versions than this one, and the remedy."""
    here = versions()
    for node in connection.nodes():
        try:
            there = connection.run(node, versions, timeout_s=_START_S)
        except ImportError:  # its strop has no such function
            yield f"node {node} has another strop.", f"Install the same versions on {node}."
            continue
        other = [
            f"{name} {there[name]} instead of {version}" if name in there else f"no {name}"
            for name, version in here.items()
            if there.get(name) != version
        ]
        if other:
            yield f"node {node} has {', '.join(other)}.", f"Install the same versions on {node}."


def nodes_that_do_not_see(connection: Connection, directory: Path) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with each node that does not share the absolute `directory`, and the remedy. It need not exist."""
    token, above = secrets.token_hex(8), next(each for each in (directory, *directory.parents) if each.is_dir())
    mark = above / f".seen-{token}"
    with writing_to(directory):
        mark.write_text(token)
    try:
        for node in connection.nodes():
            if connection.run(node, _read_or_none, mark) != token:
                remedy = f"Mount it on {node} at the same path, or name one that all nodes share with --runs."
                yield f"node {node} does not see {directory}.", remedy
    finally:
        mark.unlink()


def _read_or_none(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
