"""Curation as a stage: the rules of a curation file over its sources, so that a run records what it was trained on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from strop.curation.config import CurationConfig, load_curation
from strop.curation.run import named_files, run_curation
from strop.errors import ConfigError, TaskError, UserError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Input, Machine, Product, Stage, StageResult
from strop.reports.number_format import counted
from strop.stages.context import StageContext
from strop.stages.loop.fixed_set import SampledKeys

_NOTE_EVERY_S = 30.0


class Curation(Stage):
    """Problems that pass the rules of a curation file, as `strop data curate` keeps them."""

    makes = Product.TASKS

    class Config(Stage.Config):
        """Keys of `kind = "curation"`."""

        recipe: str = Field(description="The curation file: sources and rules.")
        outcomes: dict[Literal["agreement"], str] = Field(
            default={}, description="By rule, the stage whose rollouts it reads, instead of the rule's own `outcomes`."
        )
        jobs: int = Field(default=2, ge=1, description="Number of processes that judge.")

    config: Config

    def inputs(self) -> tuple[Input, ...]:
        return Input.each("outcomes", self.config.outcomes.values(), Product.TASKS, Product.CONVERSATIONS)

    def files(self) -> Mapping[str, Path]:
        """The curation file and the files that it names; only the former if it cannot be read, which `check` reports."""
        found = {"recipe": Path(self.config.recipe).expanduser()}
        try:
            named = named_files(load_curation(found["recipe"]))
        except ConfigError:
            return found
        of_stages = {f"rules.{kind}.outcomes" for kind in self.config.outcomes}
        return found | {f"recipe.{key}": path for key, path in named.items() if key not in of_stages}

    def check(self, name: str, recipe: Recipe, machine: Machine) -> Iterator[UserError]:
        try:
            kinds = [rule.kind for rule in load_curation(self.files()["recipe"]).rules]
        except ConfigError as error:
            yield ConfigError(f"stages.{name}.recipe: {error}")
            return
        for kind, other in self.config.outcomes.items():
            if kind not in kinds:
                yield ConfigError(
                    f"stages.{name}.outcomes names the rule {kind!r}, but {self.config.recipe} has only {', '.join(kinds)}."
                )
            elif not isinstance(recipe.stages[other].config, SampledKeys):
                yield ConfigError(
                    f"stages.{name}.outcomes.{kind} names {other!r}, a stage of kind {recipe.stages[other].kind!r}, which plays"
                    " no set of tasks. Name one of kind 'filter' or 'rejection_sampling'."
                )

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        config = load_curation(self.files()["recipe"])
        rules = ", ".join(rule.kind for rule in config.rules)
        sources, num_rules = counted(len(config.sources), "source"), counted(len(config.rules), "rule")
        return Estimate(arithmetic=f"{sources}, {num_rules} of {self.config.recipe}: {rules}")

    async def run(self, context: StageContext) -> StageResult:
        """Judge, or resume an interrupted try.

        Raises:
            UserError: the file is no curation, a source cannot be read, or nothing is kept.
            MachineError: a process that judged was killed; the same command resumes.
        """
        context.started(1, 0)
        kept = context.directory.kept
        config, stages = load_curation(self.files()["recipe"]), self.config.outcomes
        rules = tuple(
            rule.model_copy(update={"outcomes": context.run.stage(stages[rule.kind]).outcomes}) if rule.kind in stages else rule
            for rule in config.rules
        )
        config = config.model_copy(update={"rules": rules})
        try:
            summary = await _in_thread(context, config, kept.parent, jobs=self.config.jobs)
        except TaskError as error:
            raise TaskError(f"stages.{context.name}: {error}") from error
        dropped = ", ".join(f"{rule['num_dropped']} by {rule['name']}" for rule in summary["rules"] if rule["num_dropped"])
        if not summary["num_kept"]:
            raise TaskError(
                f"stages.{context.name}: none of the {summary['num_tasks']} problems passes the rules of {self.config.recipe}:"
                f" {dropped}. {kept.parent / 'report.html'} shows some of each. Loosen the rules or name other sources, then"
                f" rerun the stage with --from {context.name}."
            )
        dropped = f"; dropped: {dropped}" if dropped else ""
        return StageResult(summary=f"{summary['num_kept']} of {summary['num_tasks']} problems kept{dropped}", product=kept)


class _Stopped(Exception):  # noqa: N818 - named for what happened
    """The run ends, and the thread ends with it."""


async def _in_thread(context: StageContext, config: CurationConfig, directory: Path, *, jobs: int) -> Mapping[str, Any]:
    """Run the curation in a thread, with notes on its progress. The thread has ended when this returns or raises."""
    is_stopped = threading.Event()
    num_judged = 0

    def progress(num_rows: int) -> None:
        nonlocal num_judged
        num_judged += num_rows
        if is_stopped.is_set():
            raise _Stopped

    running = asyncio.ensure_future(asyncio.to_thread(run_curation, config, directory, jobs=jobs, progress=progress))
    try:
        while not (await asyncio.wait({running}, timeout=_NOTE_EVERY_S))[0]:
            context.progress.note(f"{num_judged:,} rows judged")
        return running.result()
    finally:
        is_stopped.set()
        await asyncio.wait({running})
        running.exception()  # retrieved, so that asyncio does not report it
