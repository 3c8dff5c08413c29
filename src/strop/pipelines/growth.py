"""Evaluations of which a recipe now asks for more tasks or a larger k: they play what is missing, beside what is there.

Neither a problem nor the seed of a rollout depends on how many there are, so what was played is part of what is asked for, and
a larger evaluation says the same as one that was as large from the first. Until it is there, what the smaller one said is kept
beside it, for a recipe that asks for that again.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from strop.evaluation.results import PROBLEMS
from strop.pipelines.claim import differences, grown_evaluations, hindrances, keys_of_unbegun, recorded_recipe
from strop.pipelines.lineage import Lineage, has_other_product, recorded_lineage, write_lineage
from strop.pipelines.recipe import EvalStage, Recipe
from strop.runs import RunDirectory, StageDirectory, read_json, write_directory, write_json, writing_to


def asked_for_more(run: RunDirectory, recipe: Recipe) -> set[str]:
    """Evaluations that began with fewer tasks, or a smaller k, than `recipe` has; what else has changed is not looked at."""
    found = set()
    for name, stage in recipe.stages.items():
        begun = recorded_lineage(run, name).get("recipe", {}).get("stages", {}).get(name, {})
        if not isinstance(stage, EvalStage) or begun.get("kind") != stage.kind:
            continue
        if stage.num_tasks > begun["num_tasks"] or stage.k > begun["k"]:
            found.add(name)
    return found


def growing(run: RunDirectory, recipe: Recipe, now: Mapping[str, Lineage], stale: Collection[str]) -> set[str]:
    """Of the stages that are `stale`, the evaluations that are so only because more is asked of them."""
    return {name for name in asked_for_more(run, recipe) & set(stale) if _only_grows(run, name, now[name], stale)}


def take_up(run: RunDirectory, name: str, lineage: Lineage) -> None:
    """Make the evaluation `name` one that is not finished. A kill before it is all done leaves it growing."""
    directory = run.stage(name)
    if directory.done.exists() or not kept_before(directory).exists():  # else it grows already
        _keep(directory)
    directory.done.unlink(missing_ok=True)
    directory.evaluation.unlink(missing_ok=True)
    _part_from_others(directory)
    write_lineage(run, name, lineage)


def take_back(run: RunDirectory, recipe: Recipe) -> None:
    """Evaluations that have not grown to their end become what they were before, where `recipe` asks for that.

    A run of which the recipe asks for anything else that it is not of stays as it is.
    """
    if not run.manifest.exists():
        return
    there, here = recorded_recipe(run), recipe.model_dump(mode="json")
    stages = {name: here["stages"][name] for name in recipe.stages if _was_before(run, name, here["stages"][name])}
    before = {**there, "stages": {**there["stages"], **stages}}
    free = (*(f"stages.{name}." for name in grown_evaluations(before, here)), *keys_of_unbegun(run, before, here))
    if not stages or any(not f"{key}.".startswith(free) for key, _, _ in hindrances(before, here)):
        return
    write_json(run.manifest, read_json(run.manifest) | {"recipe": before})
    for name in stages:
        _put_back(run.stage(name))


def forget(directory: StageDirectory) -> None:
    """The evaluation in `directory` has its result, so there is nothing to take back."""
    if kept_before(directory).exists():
        shutil.rmtree(kept_before(directory))


def kept_before(directory: StageDirectory) -> Path:
    """What an evaluation that grows said before, while it does."""
    return directory.path / "before-growth"


def _keep(directory: StageDirectory) -> None:
    def fill(place: Path) -> None:
        for path in _said(directory):
            if path.exists():
                shutil.copy2(path, place / path.name)

    write_directory(kept_before(directory), fill)


def _put_back(directory: StageDirectory) -> None:
    """A kill on the way leaves all of it to be done once more: what was kept goes last."""
    for path in _said(directory):
        if (kept := kept_before(directory) / path.name).exists():
            with writing_to(path):
                copy = path.with_name(f".{path.name}.tmp")
                shutil.copy2(kept, copy)
                copy.replace(path)
    forget(directory)


def _said(directory: StageDirectory) -> tuple[Path, ...]:
    """The files by which an evaluation is finished, the one that says so last."""
    result = directory.evaluation
    return result.with_name(PROBLEMS), result, directory.lineage, directory.done


def _was_before(run: RunDirectory, name: str, stage: Mapping[str, Any]) -> bool:
    """Whether the evaluation `name` is growing, and was `stage` before."""
    directory = run.stage(name)
    path = kept_before(directory) / directory.lineage.name
    if directory.done.exists() or not path.exists():
        return False
    return not hindrances({"stages": read_json(path)["recipe"]["stages"]}, {"stages": {name: stage}})


def _only_grows(run: RunDirectory, name: str, now: Lineage, stale: Collection[str]) -> bool:
    recorded = recorded_lineage(run, name)
    before, data = ({key: facts["digest"] for key, facts in each["data"].items()} for each in (recorded, now))
    has_other_root = any(not key.startswith("stages.") for key, _, _ in differences(recorded["recipe"], now["recipe"]))
    has_other_parents = recorded["parents"] != now["parents"] or any(
        each in stale or has_other_product(run, recorded, each) for each in now["stands_on"]
    )
    grows = name in grown_evaluations(recorded["recipe"], now["recipe"])
    return grows and before == data and not has_other_root and not has_other_parents


def _part_from_others(directory: StageDirectory) -> None:
    """Arms of a sweep share the files of finished stages: what is appended to here must not grow there."""
    for path in directory.path.rglob("*"):
        if path.is_file() and path.stat().st_nlink > 1:
            with writing_to(path):
                copy = path.with_name(f".{path.name}.tmp")
                shutil.copy2(path, copy)
                copy.replace(path)
