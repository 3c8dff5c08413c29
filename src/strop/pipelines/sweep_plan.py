"""What a sweep would run, where each run lies and how far it is; refuses the directory of another sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from strop.errors import RunError
from strop.pipelines.claim import Difference, check_recipe, differences, grown_evaluations, shown
from strop.pipelines.common_stages import Resolved, num_common, num_done
from strop.pipelines.growth import asked_for_more
from strop.pipelines.plan import plan
from strop.pipelines.recipe import Recipe
from strop.pipelines.sweep_file import Arm, Sweep, as_words
from strop.reports.scales import duration
from strop.reports.sweep_console import PlannedArm
from strop.reports.sweep_log import State
from strop.runs import RunDirectory, read_json, write_json

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One arm with one seed, and where it lies."""

    arm: Arm
    seed: int
    directory: RunDirectory
    words: tuple[str, ...]  # the command, behind `strop`

    @property
    def name(self) -> str:
        return self.arm.run_name(self.seed)

    @property
    def recipe(self) -> Recipe:
        return self.arm.recipes[self.seed]

    @cached_property
    def resolved(self) -> Resolved:
        return self.recipe.model_dump(mode="json")

    @property
    def command(self) -> str:
        """As a user would type it."""
        return shlex.join(["strop", *self.words])

    @property
    def num_done(self) -> int:
        """Finished stages, up to the first evaluation of which more is asked than it played."""
        return num_done(self.directory, self.resolved, growing=asked_for_more(self.directory, self.recipe))

    @property
    def state(self) -> State:
        """As far as the disk tells."""
        if self.num_done == len(self.recipe.stages) and self.directory.report.exists():
            return State.DONE
        return State.UNFINISHED if self.directory.manifest.exists() else State.WAITING


def plan_runs(sweep: Sweep, directory: Path) -> list[PlannedRun]:
    """Every run, the arms of one seed after the other, so that a comparison is there early.

    Raises:
        RunError: `directory` holds another sweep, or a run of it another recipe.
    """
    _check_directory(sweep, directory)
    runs = [
        PlannedRun(
            arm=arm,
            seed=seed,
            directory=RunDirectory(directory / arm.run_name(seed)),
            words=("train", *sweep.words(arm, seed), "--runs", str(directory)),
        )
        for seed in sweep.file.seeds
        for arm in sweep.arms
    ]
    for run in runs:
        if run.directory.manifest.exists():
            check_recipe(run.directory, run.resolved, may_grow=True)
    return runs


def plan_arms(sweep: Sweep, runs: Sequence[PlannedRun]) -> tuple[list[PlannedArm], str]:
    """Every arm with estimates for this machine, and in words what the arms of a seed share.

    Raises:
        UserError: an arm's model directory, or something else that it will open, is missing here.
    """
    firsts = [next(run for run in runs if run.arm is arm) for arm in sweep.arms]
    num_shared = min((num_common(firsts[0].resolved, other.resolved) for other in firsts[1:]), default=0)
    arms, shared_s = [], 0.0
    for first in firsts:
        stages = plan(first.recipe)
        shared_s = sum(stage.time_s for stage in stages[:num_shared])
        arms.append(
            PlannedArm(
                name=first.arm.name,
                changes=as_words(first.arm.overrides),
                states={run.seed: run.state for run in runs if run.arm is first.arm},
                time_s=sum(stage.time_s for stage in stages[num_shared:]),
            )
        )
    names = ", ".join(list(firsts[0].resolved["stages"])[:num_shared])
    return arms, f", beside {names}, which the arms of a seed share (about {duration(shared_s)} a seed)" if names else ""


def _arms_json(sweep: Sweep) -> dict[str, Any]:
    """What makes a sweep this one: every arm, and what it is with the first seed."""
    return {
        arm.name: {"changes": dict(arm.overrides), "recipe": _seedless(next(iter(arm.recipes.values())))} for arm in sweep.arms
    }


def _seedless(recipe: Recipe) -> dict[str, Any]:
    resolved = recipe.model_dump(mode="json")
    return {key: value for key, value in resolved.items() if key not in ("seed", "name")}


def _check_directory(sweep: Sweep, directory: Path) -> None:
    """Raises `RunError` unless `directory` is new, or holds this sweep: arms and seeds may be added, none may be gone.

    Evaluations may ask for more than they did.
    """
    path = directory / "arms.json"
    if not path.exists():
        if directory.exists() and any(not entry.name.endswith(".tmp") for entry in directory.iterdir()):
            raise RunError(
                f"{directory}: not empty, and not the directory of a sweep (no arms.json). Choose another --run-dir."
            )
        return
    there = read_json(path)
    names = [arm.name for arm in sweep.arms]
    problems = [f"  arms: {name!r} there, not asked for" for name in there["arms"] if name not in names]
    problems += [f"  seeds: {seed} there, not asked for" for seed in there["seeds"] if seed not in sweep.file.seeds]
    for name, here in _arms_json(sweep).items():
        if name in there["arms"] and (differing := _changes(there["arms"][name]["recipe"], here["recipe"])):
            problems.append(f"  of arm {name!r}:\n{shown(differing)}")
    if problems:
        raise RunError(
            f"{directory} holds another sweep:\n"
            + "\n".join(problems)
            + "\nGive this one a directory of its own with --run-dir"
            " (or another name), or remove that one. Arms and seeds may be added to a sweep, but not changed or taken away."
        )


def _changes(there: Resolved, here: Resolved) -> list[Difference]:
    grown = tuple(f"stages.{name}." for name in grown_evaluations(there, here))
    return [each for each in differences(there, here) if not each[0].startswith(grown)]


def claim_directory(sweep: Sweep, directory: Path, *, command: str, jobs: int) -> int:
    """Write down what this sweep is; the most jobs that it ran at once before."""
    path = directory / "arms.json"
    jobs_before = int(read_json(path)["jobs"]) if path.exists() else 0
    write_json(
        path,
        {
            "format": FORMAT_VERSION,
            "name": sweep.file.name,
            "command": command,
            "file": str(sweep.path),
            "recipe": str(sweep.recipe),
            "seeds": list(sweep.file.seeds),
            "jobs": max(jobs, jobs_before),
            "arms": _arms_json(sweep),
        },
    )
    return jobs_before
