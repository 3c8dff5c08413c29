"""Evaluations of which a recipe now asks for more tasks or a larger k: they play what is missing, beside what is there.

Neither a problem nor the seed of a rollout depends on how many there are, so what was played is part of what is asked for, and
a larger evaluation says the same as one that was as large from the first.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping

from strop.pipelines.claim import differences, grown_evaluations
from strop.pipelines.lineage import Lineage, has_other_product, recorded_lineage, write_lineage
from strop.pipelines.recipe import EvalStage, Recipe
from strop.runs import RunDirectory, StageDirectory, writing_to


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
    directory.done.unlink(missing_ok=True)
    directory.evaluation.unlink(missing_ok=True)
    _part_from_others(directory)
    write_lineage(run, name, lineage)


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
