"""Which stages of a run directory a command runs, continues or keeps: `--from`, `--until`, `--only`, and stale stages."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from strop.errors import ConfigError, RunError, did_you_mean
from strop.recipe.recipe import Recipe
from strop.run_directory import RunDirectory, cut_back, names_damage, read_json, read_lines, write_json, write_lines
from strop.runs.lineage import Lineage, lineages, mark_stale, parents_of, recorded_lineage, why_stale
from strop.runs.manifest import check_directory, differences, write_manifest

Starts: TypeAlias = str | Sequence[str]
"""Stages to rerun with everything that depends on them; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What one command does in a run directory."""

    stages: tuple[str, ...]  # to finish, in order
    lineages: Mapping[str, Lineage]
    left_stale: Mapping[str, str]  # stages that are left out, with the reason
    new_layouts: tuple[str, ...]  # begun stages that continue with another number of trainer processes, in words


def named_starts(start: Starts) -> tuple[str, ...]:
    """Return the stages that `start` names."""
    return (start,) if isinstance(start, str) else tuple(start)


def stages_to_run(recipe: Recipe, until: str | None, start: Starts, only: Starts = ()) -> tuple[str, ...]:
    """Return the stages up to `until`, or those `only` with all that they depend on, in the order in which they run.

    Raises:
        ConfigError: an unknown stage, or options that exclude each other.
    """
    names = list(recipe.stages)
    starts, wanted = named_starts(start), named_starts(only)
    named = [("--until", until)] if until is not None else []
    for option, name in (*named, *(("--from", each) for each in starts), *(("--only", each) for each in wanted)):
        if name not in names:
            raise ConfigError(
                f"{option} {name}: no such stage.{did_you_mean(name, names)} The stages of {recipe.name!r}: {', '.join(names)}."
            )
    if wanted and until is not None:
        raise ConfigError(f"--only {wanted[0]} and --until {until} exclude each other. Remove one of them.")
    up_to = names if until is None else names[: names.index(until) + 1]
    selected = tuple(recipe.with_parents(wanted) if wanted else up_to)
    if late := [name for name in starts if name not in selected]:
        why = f"is no stage that --only {' --only '.join(wanted)} needs" if wanted else f"comes after --until {until}"
        raise ConfigError(f"--from {late[0]} {why}, so it would not run. Remove one of the options, or name a later stage.")
    return selected


def stages_to_rerun(recipe: Recipe, start: Starts) -> set[str]:
    """Return the stages in `start` and everything that depends on them."""
    found = set(named_starts(start))
    for name in recipe.stages:
        if found & set(parents_of(recipe, name)):
            found.add(name)
    return found


@names_damage
def select(run: RunDirectory, recipe: Recipe, command: str, *, until: str | None, start: Starts, only: Starts = ()) -> Selected:
    """Prepare the run directory for `recipe`: write its manifest, and move the results of stages that rerun to `stale/`.

    The same command after a kill continues, and moves nothing a second time. The caller holds the lock of the directory.

    Raises:
        RunError: the directory holds something else, or a stage is stale and `start` does not rerun it.
    """
    stages = stages_to_run(recipe, until, start, only)
    rerun = [name for name in stages if name in stages_to_rerun(recipe, start)]
    check_directory(run, recipe)
    now = lineages(recipe, run)
    stale = why_stale(run, recipe, now)
    if blocking := {name: why for name, why in stale.items() if name in stages and name not in rerun}:
        first = " --from ".join([*named_starts(start), *_first_of(recipe, blocking)])
        lines = "\n".join(f"  {name}: {why}" for name, why in blocking.items())
        raise RunError(
            f"{run.path}: these stages are stale:\n{lines}\nRerun them with --from {first} (the present results are moved to"
            f" {run.path / 'stale'}), restore what has changed, or give this run another name with --name."
        )
    write_manifest(run, recipe, command)
    if rerun:
        if not _is_begun(run, rerun, stale):
            _move_results(run, rerun)
        now = lineages(recipe, run)  # stages that rerun begin with the present code and data
        stale = why_stale(run, recipe, now)
    left = {name: why for name, why in stale.items() if name not in stages}
    mark_stale(run, recipe, left)
    return Selected(stages=stages, lineages=now, left_stale=left, new_layouts=tuple(_new_layouts(run, stages, now)))


def finished(run: RunDirectory) -> None:
    """Remove the record of a rerun if all its stages are done."""
    if _record(run).exists() and all(run.stage(name).done.exists() for name in read_json(_record(run))["stages"]):
        _record(run).unlink()


def _new_layouts(run: RunDirectory, stages: Sequence[str], now: Mapping[str, Lineage]) -> list[str]:
    return [
        f"{key} is {here}, and was {there} when the stage began: the result is equal up to rounding."
        for name in stages
        if (recorded := recorded_lineage(run, name)) and not run.stage(name).done.exists()
        for key, there, here in differences(recorded["keys"], now[name]["keys"])
    ]


def _first_of(recipe: Recipe, names: Collection[str]) -> list[str]:
    """Return those of `names` that depend directly on no other of them."""
    return [name for name in names if not set(parents_of(recipe, name)) & set(names)]


def _is_begun(run: RunDirectory, names: Sequence[str], stale: Mapping[str, str]) -> bool:
    """Return whether an earlier command began to rerun the same stages, and nothing that they read has changed since."""
    is_recorded = _record(run).exists() and read_json(_record(run))["stages"] == list(names)
    return is_recorded and not stale.keys() & set(names)


def _move_results(run: RunDirectory, names: Sequence[str]) -> None:
    """Move the results of stages to `stale/`, with their lines of metrics. Dependents go first, in case of a kill."""
    for name in reversed(names):
        if run.stage(name).path.exists():
            for path in (run.metrics, run.updates):
                if lines := [line for line in read_lines(path) if line["stage"] == name]:
                    write_lines(run.stage(name).path / path.name, lines)
            shutil.move(run.stage(name).path, _free_place(run.path / "stale", name))
        for path in (run.metrics, run.updates):
            cut_back(path, name, 0)
    write_json(_record(run), {"stages": list(names)})


def _free_place(directory: Path, name: str) -> Path:
    directory.mkdir(exist_ok=True)
    number = 1
    while (place := directory / f"{name}-{number}").exists():
        number += 1
    return place


def _record(run: RunDirectory) -> Path:
    """The stages that a command with `--from` has still to finish."""
    return run.path / "rerun.json"
