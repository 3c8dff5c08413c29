"""Takes a run directory for one recipe and one process, and says how another recipe differs from the one that is there."""

from __future__ import annotations

import fcntl
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, TypeAlias

import torch

import strop
from strop.errors import RunError
from strop.pipelines.recipe import Recipe, init_of
from strop.runs import FORMAT_VERSION, RunDirectory, read_json, write_json

# What costs time or memory, says where something runs, or ends a run early; not what rounds a sum another way (dtypes, threads,
# tensor_parallel, kernels of a server), and not what decides over an outcome (limits of a tool, lengths, isolation).
_FREE_KEYS = re.compile(
    r"description|trackers|scheduler\.\w+|"
    r"engine\.(replicas|slots|deadline_s|devices|cached_prompts|own_process|python|addresses|start_timeout_s|publish_timeout_s|"
    r"kv_mib|memory_fraction)|"
    r"sandbox\.(max_running|max_alive|zygotes|warm|recycle_after|url|token_env)|"
    r"stages\.[^.]+\.(give_up_after|checkpoint_every|keep_checkpoints|jobs|"
    r"trainer\.(background_checkpoints|worker_timeout_s|max_skipped_updates|(critic\.)?optimizer\.moments)|"
    # How a service is reached, and how patiently: not what it says. Another model or prompt of it is another recipe.
    r"reward\.parts\.[^.]+\.(scorer|judge\.service)\."
    r"(url|key_env|timeout_s|retries|backoff_s|rate_per_s|max_running|cache|max_wait_s|max_batch))"
)
# Divides a trainer otherwise: what follows is equal up to rounding. Two runs that differ here are two, but one may go on so.
_LAYOUT = re.compile(r"stages\.[^.]+\.trainer\.workers")


@contextmanager
def alone_in(run: RunDirectory) -> Iterator[None]:
    """Keep a second process out of the run directory; the kernel lets go of the lock whatever ends this one.

    Raises:
        RunError: another process is running there.
    """
    descriptor = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunError(f"{run.path}: another strop is running there. Wait for it, end it, or choose another place.") from error
    try:
        yield
    finally:
        os.close(descriptor)


def claim(run: RunDirectory, recipe: Recipe, command: str, *, may_grow: bool = False) -> None:
    """Write the manifest of a new run, or make sure that the one there is of this recipe.

    Keys that change no result may differ from one try to the next, and the number of a trainer's processes. With `may_grow`,
    for which this process has to be `alone_in` the run, evaluations may ask for more than in the manifest, which stays as it
    is; stages that have not begun may be others than there; and where none has begun the run becomes one of this recipe.
    """
    resolved = recipe.model_dump(mode="json")
    if run.manifest.exists():
        recorded_recipe(run)  # of another format, or damaged: not ours to replace
        is_taken_over = may_grow and not _has_begun(run)
    else:
        is_taken_over = True
        if any(not entry.name.endswith(".tmp") for entry in run.path.iterdir()):  # a kill may leave half a manifest
            raise RunError(
                f"{run.path}: not empty, and not a run directory (no manifest.json). Choose another with --runs or --name."
            )
    if is_taken_over:
        write_json(
            run.manifest,
            {
                "format": FORMAT_VERSION,
                "name": recipe.name,
                "seed": recipe.seed,
                "command": command,
                "recipe": resolved,
                "versions": versions(),
                "stages": _graph(recipe),
            },
        )
    else:
        check_recipe(run, resolved, may_grow=may_grow)


def _has_begun(run: RunDirectory) -> bool:
    """Whether anything was made there, or put aside. A stage that begins writes its lineage first."""
    return run.metrics.exists() or any(any((run.path / place).glob("*")) for place in ("stages", "stale"))


def reclaim(run: RunDirectory, recipe: Recipe, command: str) -> None:
    """The run is of `recipe` from now on. Whoever calls has seen to what was made by another."""
    manifest = read_json(run.manifest)
    resolved = recipe.model_dump(mode="json")
    for key, there, _ in new_layouts(run, recipe):
        resolved["stages"][key.split(".")[1]]["trainer"]["workers"] = there
    write_json(run.manifest, manifest | {"command": command, "recipe": resolved, "stages": _graph(recipe)})


def _graph(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The stages in the order in which they run, each with what it stands on."""
    graph: dict[str, dict[str, Any]] = {}
    for name, stage in recipe.stages.items():
        inputs: dict[str, list[str]] = {}
        for each in stage.inputs():
            inputs.setdefault(each.key, []).append(each.stage)
        init = init_of(stage)
        graph[name] = {"kind": stage.kind, **({"init": init} if init else {}), "inputs": inputs}
    return graph


def check_recipe(run: RunDirectory, resolved: Mapping[str, Any], *, may_grow: bool = False) -> None:
    """Make sure that the run in `run` is of the recipe `resolved`, a `Recipe` as JSON.

    With `may_grow` evaluations may ask for more, and stages that have not begun are bound to nothing.

    Raises:
        RunError: naming the first keys that differ.
    """
    there = recorded_recipe(run)
    refuse_without(run, there, resolved)
    differing = hindrances(there, resolved)
    if may_grow:
        free = {*_size_keys_of(grown_evaluations(there, resolved)), *keys_of_unbegun(run, there, resolved)}
        differing = [each for each in differing if not f"{each[0]}.".startswith(tuple(free))]
    if differing:
        raise RunError(
            f"{run.path} holds a run of another recipe:\n{shown(differing)}\nGive this one a name of its own with --name, make"
            " the stages that this concerns anew with --from STAGE, or remove that directory."
        )


def refuse_without(run: RunDirectory, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises `RunError` where recipe `here` lacks a stage of recipe `there` that has begun."""
    if gone := [name for name in there["stages"] if name not in here["stages"] and run.stage(name).path.exists()]:
        raise RunError(
            f"{run.path} has stages that the recipe has no more: {', '.join(gone)}. Give this run a name of its own with"
            " --name."
        )


def keys_of_unbegun(run: RunDirectory, there: Mapping[str, Any], here: Mapping[str, Any]) -> set[str]:
    """How keys begin of stages of either recipe that have not begun: nothing of these is bound to the recipe of the run."""
    return {f"stages.{name}." for name in {*there["stages"], *here["stages"]} if not run.stage(name).path.exists()}


def recorded_recipe(run: RunDirectory) -> Mapping[str, Any]:
    """The recipe in the manifest, as JSON. Raises `RunError` where another format is written there."""
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
    """Where two recipes as JSON differ, without the keys that change no result."""
    return [each for each in _all_differences(there, here, "") if not _FREE_KEYS.fullmatch(each[0])]


def hindrances(there: Any, here: Any) -> list[Difference]:
    """Differences for which a run of the one recipe cannot go on as the other."""
    return [each for each in differences(there, here) if not _LAYOUT.fullmatch(each[0])]


def grown_evaluations(there: Mapping[str, Any], here: Mapping[str, Any]) -> set[str]:
    """Evaluations of recipe `here` that are those of `there` but for more tasks, or a larger k."""
    found = set()
    for name, stage in here["stages"].items():
        before = there["stages"].get(name, {})
        differing = hindrances({"stages": {name: before}}, {"stages": {name: stage}})
        is_evaluation = before.get("kind") == stage["kind"] == "eval"
        if is_evaluation and differing and all(key in _size_keys(name) and now > then for key, then, now in differing):
            found.add(name)
    return found


def _size_keys_of(names: Iterable[str]) -> set[str]:
    return {f"{key}." for name in names for key in _size_keys(name)}


def _size_keys(name: str) -> tuple[str, str]:
    """What says how large the evaluation `name` is."""
    return f"stages.{name}.num_tasks", f"stages.{name}.k"


def new_layouts(run: RunDirectory, recipe: Recipe) -> list[Difference]:
    """Where stages that have begun go on with another number of processes than the run's manifest has."""
    there, here = recorded_recipe(run), recipe.model_dump(mode="json")
    unbegun = tuple(keys_of_unbegun(run, there, here))
    return [each for each in differences(there, here) if _LAYOUT.fullmatch(each[0]) and not each[0].startswith(unbegun)]


def is_other_than_recorded(run: RunDirectory, recipe: Recipe) -> bool:
    """Whether the manifest is to say something else, `new_layouts` left aside: these are of one try."""
    found = differences(recorded_recipe(run), recipe.model_dump(mode="json"))
    return len(found) > len(new_layouts(run, recipe))


def without_layout(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as JSON, or some of its tables, without how a trainer is divided."""
    return _without(tree, _LAYOUT, "")


def without_free_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as JSON, or some of its tables, without the keys that change no result."""
    return _without(tree, _FREE_KEYS, "")


def _without(tree: Mapping[str, Any], keys: re.Pattern[str], path: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        place = f"{path}.{key}" if path else str(key)
        if not keys.fullmatch(place):
            kept[key] = _without(value, keys, place) if isinstance(value, Mapping) else value
    return kept


def shown(differing: Sequence[Difference]) -> str:
    """The first of `differing`, one line each."""
    return "\n".join(f"  {key}: {there!r} there, {here!r} asked for" for key, there, here in differing[:5])


def _all_differences(there: Any, here: Any, path: str) -> list[Difference]:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = sorted({*there, *here})
        return [
            found
            for key in keys
            for found in _all_differences(there.get(key), here.get(key), f"{path}.{key}" if path else str(key))
        ]
    return [] if there == here else [(path, there, here)]


def versions() -> dict[str, str]:
    """What the run's numbers depend on besides the recipe."""
    return {
        "strop": strop.__version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
