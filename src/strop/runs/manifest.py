"""The manifest of a run: its recipe and versions; the lock of a run directory; and how two recipes differ."""

from __future__ import annotations

import fcntl
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, TypeAlias

import torch

import strop
from strop.errors import RunError
from strop.recipe.recipe import Recipe
from strop.run_directory import FORMAT_VERSION, RunDirectory, read_json, write_json

# Keys that change no result: they cost time or memory, say where something runs, or end a run early. Not here: what rounds
# a sum in another way (dtypes, threads, tensor_parallel, a server's kernels), and what decides an outcome (limits, isolation).
# `async_rollouts` is an exception: how old rollouts may be decides results, and may change at any step.
_FREE_KEYS = re.compile(
    r"description|hardware|trackers|cluster|cluster\.\w+|scheduler\.\w+|"
    r"(stages\.[^.]+\.)?engine\.(replicas|slots|stall_timeout_s|devices|own_process|python|addresses|start_timeout_s|"
    r"kv_mib|sleep)|"
    r"sandbox\.(max_running|max_alive|fork_servers|warm|url)|"
    r"stages\.[^.]+\.(async_rollouts\.(max_staleness|too_old)|size_of|give_up_after|checkpoint_every|keep_checkpoints|keep_rollouts|jobs|"
    r"trainer\.(worker_timeout_s|(critic\.)?optimizer\.moments)|"
    # How a service is reached, not what it is asked.
    r"reward\.parts\.[^.]+\.(scorer|judge\.service)\."
    r"(url|key_env|timeout_s|retries|max_running|cache|max_batch))"
)


@contextmanager
def locked(run: RunDirectory) -> Iterator[None]:
    """Keep other processes out of the run directory. The kernel releases the lock when this process ends.

    Raises:
        RunError: another process uses the directory.
    """
    # A file open for writing, not the directory: NFS passes only its locks on to other machines.
    descriptor = os.open(run.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunError(f"{run.path}: another strop is running there. Wait for it, end it, or choose another place.") from error
    try:
        yield
    finally:
        os.close(descriptor)


def write_manifest(run: RunDirectory, recipe: Recipe, command: str) -> None:
    """Write the manifest for `recipe`, unless there is one whose recipe differs only in keys that change no result."""
    resolved = recipe.model_dump(mode="json")
    if run.manifest.exists() and not differences(recorded_recipe(run), resolved):
        return
    content = {
        "format": FORMAT_VERSION,
        "name": recipe.name,
        "seed": recipe.seed,
        "command": command,
        "recipe": resolved,
        "versions": versions(),
        "stages": _graph(recipe),
    }
    write_json(run.manifest, content)


def check_directory(run: RunDirectory, recipe: Recipe) -> None:
    """Make sure that the directory is empty or holds a run, and that the recipe has every stage that has begun there.

    Raises:
        RunError: it holds something else, or a run in another format; or the recipe lacks a stage.
    """
    if run.manifest.exists():
        gone = [name for name in recorded_recipe(run)["stages"] if name not in recipe.stages and run.stage(name).path.exists()]
        if gone:
            raise RunError(
                f"{run.path}: the recipe lacks stages that have begun there: {', '.join(gone)}. Give this run another name with"
                " --name."
            )
    elif any(not entry.name.startswith(".") for entry in run.path.iterdir()):  # the lock; after a kill half a manifest
        raise RunError(
            f"{run.path}: not empty, and not a run directory (no manifest.json). Choose another with --runs or --name."
        )


def recorded_recipe(run: RunDirectory) -> Mapping[str, Any]:
    """Return the recipe in the manifest, as JSON. Raises `RunError` if the manifest has another format."""
    manifest = read_json(run.manifest)
    if manifest.get("format") != FORMAT_VERSION:
        raise RunError(
            f"{run.manifest}: run directory format {manifest.get('format')}, but this strop writes format {FORMAT_VERSION}."
            " Start a run under another name with --name."
        )
    recipe: Mapping[str, Any] = manifest["recipe"]
    return recipe


Difference: TypeAlias = tuple[str, Any, Any]
"""A key, its value there, its value here."""


def differences(there: Any, here: Any) -> list[Difference]:
    """Return where two recipes as JSON differ, without the keys that change no result."""
    return [each for each in _all_differences(there, here, "") if not _FREE_KEYS.fullmatch(each[0])]


def without_free_keys(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a recipe as JSON, or some of its tables, without the keys that change no result."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        place = f"{path}.{key}" if path else str(key)
        if not _FREE_KEYS.fullmatch(place):
            kept[key] = without_free_keys(value, place) if isinstance(value, Mapping) else value
    return kept


def shown(differing: Sequence[Difference]) -> str:
    """Return the first five of `differing`, one line each."""
    return "\n".join(f"  {key}: {there!r} there, {here!r} here" for key, there, here in differing[:5])


def versions() -> dict[str, str]:
    """Return what the run's numbers depend on, apart from the recipe."""
    return {
        "strop": strop.__version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }


def _all_differences(there: Any, here: Any, path: str) -> list[Difference]:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = sorted({*there, *here})
        return [
            found
            for key in keys
            for found in _all_differences(there.get(key), here.get(key), f"{path}.{key}" if path else str(key))
        ]
    return [] if there == here else [(path, there, here)]


def _graph(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the stages in the order in which they run, each with its inputs."""
    graph: dict[str, dict[str, Any]] = {}
    for name, stage in recipe.stages.items():
        inputs: dict[str, list[str]] = {}
        for each in stage.inputs():
            inputs.setdefault(each.key, []).append(each.stage)
        graph[name] = {"kind": stage.kind, **({"init": stage.init} if stage.init else {}), "inputs": inputs}
    return graph
