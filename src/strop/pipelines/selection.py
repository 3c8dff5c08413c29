"""Which stages of a run are made now: how far it goes, what is made anew, and what of it is stale."""

from __future__ import annotations

import difflib
import json
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from strop.errors import ConfigError, RunError
from strop.pipelines.claim import (
    claim,
    grown_evaluations,
    hindrances,
    is_other_than_recorded,
    reclaim,
    recorded_recipe,
    refuse_without,
    shown,
    without_layout,
)
from strop.pipelines.graph import Node, standing_on
from strop.pipelines.growth import growing, take_back, take_up
from strop.pipelines.lineage import Lineage, begun_with_other_code, lineages, why_stale
from strop.pipelines.recipe import Recipe
from strop.pipelines.stage import cut_back
from strop.runs import RunDirectory, read_json, read_lines, write_json, write_text

_log = logging.getLogger(__name__)

Starts: TypeAlias = str | Sequence[str]
"""Stages that are made anew, with all that stands on them; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The stages that this try makes sure of, in order, with what each stands on; and those that it leaves stale, with why."""

    stages: tuple[str, ...]
    lineages: Mapping[str, Lineage]
    left_stale: Mapping[str, str]


def named_starts(start: Starts) -> tuple[str, ...]:
    """The stages that `start` names."""
    return (start,) if isinstance(start, str) else tuple(start)


def stages_until(recipe: Recipe, until: str | None, start: Starts) -> tuple[str, ...]:
    """The stages up to `until`, in the order in which they run. Raises `ConfigError` for a stage that is not there."""
    names = list(recipe.stages)
    starts = named_starts(start)
    for option, name in (*([("--until", until)] if until is not None else []), *(("--from", each) for each in starts)):
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"{option} {name}: no such stage.{hint} The stages of {recipe.name!r}: {', '.join(names)}.")
    selected = tuple(names if until is None else names[: names.index(until) + 1])
    if late := [name for name in starts if name not in selected]:
        raise ConfigError(
            f"--from {late[0]} comes after --until {until}, so it would not be made anew. Leave one of them out, or end later."
        )
    return selected


def select(run: RunDirectory, recipe: Recipe, command: str, *, until: str | None, start: Starts) -> Selected:
    """Take the run directory for `recipe`, and put aside what `start` makes anew; what is left is there to go on from.

    The same command after a kill puts nothing aside a second time. Evaluations of which the recipe asks for more than they
    played are taken up again with what they have; where it asks for what they had before they began to grow, they have that.

    Raises:
        RunError: the run is of another recipe, or stages of it are stale, and `start` does not make them anew.
    """
    stages = stages_until(recipe, until, start)
    starts = named_starts(start)
    if not starts:
        take_back(run, recipe)
        try:
            claim(run, recipe, command, may_grow=True)
        except RunError as error:
            raise RunError(f"{error}{_stale_under(run, recipe)}") from error
        anew: set[str] = set()
    else:
        led_to = standing_on_starts(recipe, starts)
        anew = led_to & set(stages)
        if not run.manifest.exists():
            claim(run, recipe, command)
        else:
            _refuse_other_changes(run, recipe, led_to, starts)
    now = lineages(recipe, run)
    stale = why_stale(run, recipe, now)
    grown = (growing(run, recipe, now, stale) & set(stages)) - anew
    if hindering := {name: why for name, why in stale.items() if name in stages and name not in anew | grown}:
        first = " --from ".join([*starts, *_first_of(recipe, hindering)])
        told = "\n".join(f"  {name}: {why}" for name, why in hindering.items())
        played = "".join(f" {name} keeps what it has, and plays what is missing." for name in stages if name in grown)
        raise RunError(
            f"{run.path}: what these stages made is stale:\n{told}\nMake them anew with --from {first} (what they made is moved"
            f" to {run.path / 'stale'}), restore what has changed, or give this run a name of its own with --name.{played}"
        )
    if starts or is_other_than_recorded(run, recipe):
        reclaim(run, recipe, command)
    if starts:
        _put_aside(run, [name for name in stages if name in anew], now)
    for name in grown:
        take_up(run, name, now[name])
    if starts or grown:
        now = lineages(recipe, run)  # of the code as it is now, where they begin again
        stale = why_stale(run, recipe, now)
    if older := [name for name in begun_with_other_code(now) if name in stages]:
        remedy = _first_of(recipe, older)
        would_be_anew = standing_on_starts(recipe, remedy) & set(stages)
        is_owed = _record(run).exists() and set(read_json(_record(run))["stages"]) == would_be_anew
        _log.warning(
            "%s: strop has changed since these stages began, and what they made is kept: %s. --from %s %s.",
            *(run.path, ", ".join(older), " --from ".join(remedy)),
            "goes on with what it began; once that is done, it makes them anew" if is_owed else "makes them anew",
        )
    left = {name: why for name, why in stale.items() if name not in stages}
    _mark(run, recipe, left)
    return Selected(stages=stages, lineages=now, left_stale=left)


def finished(run: RunDirectory) -> None:
    """A try has ended; where everything that was to be made anew is made, nothing is owed any more."""
    if _record(run).exists() and all(run.stage(name).done.exists() for name in read_json(_record(run))["stages"]):
        _record(run).unlink()


def _mark(run: RunDirectory, recipe: Recipe, stale: Mapping[str, str]) -> None:
    """Stages that are `stale` have a mark, and no others: what had changed may have been restored.

    While what a stage stands on is not made, nobody knows whether that comes out as before: a mark that is there stays.
    """
    unknown: set[str] = set()
    for name in recipe.stages:
        parents = _parents(recipe, name)
        if name in stale:
            write_json(run.stage(name).stale, {"because": stale[name]})
        elif parents & unknown or not all(run.stage(each).done.exists() for each in parents):
            unknown.add(name)
        else:
            run.stage(name).stale.unlink(missing_ok=True)


def _stale_under(run: RunDirectory, recipe: Recipe) -> str:
    """For the end of a refusal: the begun stages that would be stale under `recipe`, a line each. "" where there are none."""
    if not run.manifest.exists():
        return ""
    there, here = recorded_recipe(run), recipe.model_dump(mode="json")
    roots = ({key: value for key, value in each.items() if key not in ("name", "stages")} for each in (there, here))
    of_root = ["keys of the root differ"] if hindrances(*roots) else []
    grown = grown_evaluations(there, here)
    told: dict[str, str] = {}
    for name, stage in recipe.stages.items():
        if name not in there["stages"] or not run.stage(name).path.exists():
            continue
        parts = ({"stages": {name: each["stages"][name]}} for each in (there, here))
        why = [*of_root, *(["keys of it differ"] if name not in grown and hindrances(*parts) else [])]
        why += [f"{each} is stale" for each in dict.fromkeys(each.stage for each in stage.inputs()) if each in told]
        if why:
            told[name] = "; ".join(why)
    lines = "".join(f"\n  {name}: {why}" for name, why in told.items())
    return f"\nBy that, what these stages made is stale:{lines}" if told else ""


def standing_on_starts(recipe: Recipe, starts: Collection[str]) -> set[str]:
    """The stages that `--from` each of `starts` makes anew: these, and all that stand on them."""
    nodes = {name: Node(makes=stage.makes, inputs=stage.inputs()) for name, stage in recipe.stages.items()}
    return standing_on(set(starts), nodes)


def _first_of(recipe: Recipe, names: Collection[str]) -> list[str]:
    """Those of `names` that stand on no other of them."""
    return [name for name in names if not _parents(recipe, name) & set(names)]


def _parents(recipe: Recipe, name: str) -> set[str]:
    return {each.stage for each in recipe.stages[name].inputs()}


def _refuse_other_changes(run: RunDirectory, recipe: Recipe, allowed: Collection[str], starts: Sequence[str]) -> None:
    """Raises `RunError` where the recipe differs from the run's in more than stages that `starts` lead to."""
    there, here = recorded_recipe(run), recipe.model_dump(mode="json")
    begun = [name for name in there["stages"] if run.stage(name).path.exists()]
    kept = {*allowed, *grown_evaluations(there, here)}
    others = [name for name in begun if name not in kept and name in here["stages"]]
    roots = [{key: value for key, value in each.items() if key != "stages"} for each in (there, here)]
    parts = [{"stages": {name: each["stages"][name] for name in others}} for each in (there, here)]
    is_all_anew = set(begun) <= set(allowed)
    if differing := [*([] if is_all_anew else hindrances(*roots)), *hindrances(*parts)]:
        everything = " --from ".join(name for name in recipe.stages if not _parents(recipe, name))
        raise RunError(
            f"{run.path} holds a run of another recipe, in more than --from {' --from '.join(starts)} makes anew:\n"
            f"{shown(differing)}\nGive this one a name of its own with --name, put back what differs, or make an earlier stage"
            f" anew: --from {everything} makes all."
        )
    refuse_without(run, there, here)


def _put_aside(run: RunDirectory, names: Sequence[str], now: Mapping[str, Lineage]) -> None:
    """Move what the stages made so far, unless a try that was to make the same stages anew did.

    What stands on others goes first: a kill on the way leaves no stage beside one that its parent did not make.
    """
    wanted = {name: {"recipe": without_layout(now[name]["recipe"]), "data": _digests(now[name])} for name in names}
    if _record(run).exists() and _recorded_parts(run) == wanted:
        return
    for name in reversed(names):
        if run.stage(name).path.exists():
            _copy_lines(run, name)
            shutil.move(run.stage(name).path, _free_place(run.path / "stale", name))
        for path in (run.metrics, run.updates):
            cut_back(path, name, 0)
    write_json(_record(run), {"stages": wanted})


def _recorded_parts(run: RunDirectory) -> dict[str, Any]:
    """What was to be made anew, by stage; an older strop wrote more of it."""
    parts = read_json(_record(run))["stages"]
    return {
        name: {
            "recipe": without_layout(part["recipe"]),
            "data": {key: each["digest"] if isinstance(each, dict) else each for key, each in part["data"].items()},
        }
        for name, part in parts.items()
    }


def _digests(lineage: Lineage) -> dict[str, str]:
    return {key: facts["digest"] for key, facts in lineage["data"].items()}


def _copy_lines(run: RunDirectory, name: str) -> None:
    """The stage's steps as the run has them, into its own directory."""
    for path in (run.metrics, run.updates):
        if lines := [line for line in read_lines(path) if line["stage"] == name]:
            text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
            write_text(run.stage(name).path / path.name, text)


def _free_place(directory: Path, name: str) -> Path:
    directory.mkdir(exist_ok=True)
    number = 1
    while (place := directory / f"{name}-{number}").exists():
        number += 1
    return place


def _record(run: RunDirectory) -> Path:
    return run.path / "anew.json"
