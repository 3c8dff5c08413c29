"""The curation files that a recipe's stages name: what they say, which files they read, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from strop.curation.config import AgreementRule, CurationConfig, DifficultyRule
from strop.curation.inputs import named_files
from strop.curation.load import load_curation
from strop.errors import ConfigError, TaskError
from strop.pipelines.recipe import CurationStage, Recipe, SampledStage
from strop.pipelines.stage_data import outcomes_path
from strop.runs import RunDirectory


def curation_of(name: str, stage: CurationStage, run: RunDirectory | None = None) -> CurationConfig:
    """What the file of the stage `name` says; its rules over rollouts read those of stages of `run`, where `outcomes` says so.

    Raises:
        ConfigError: there is no such file, it is none of a curation, or it has no such rule.
    """
    try:
        config = load_curation(Path(stage.recipe).expanduser())
    except ConfigError as error:
        raise ConfigError(f"stages.{name}.recipe: {error}") from error
    kinds = [rule.kind for rule in config.rules]
    for kind in stage.outcomes:
        if kind not in kinds:
            raise ConfigError(
                f"stages.{name}.outcomes names the rule {kind!r}, but {stage.recipe} has none: {', '.join(kinds)}. Add the rule"
                " there, or leave it out here."
            )
    if run is None:
        return config
    rules = tuple(
        rule.model_copy(update={"outcomes": outcomes_path(run.stage(stage.outcomes[rule.kind]))})
        if isinstance(rule, AgreementRule | DifficultyRule) and rule.kind in stage.outcomes
        else rule
        for rule in config.rules
    )
    return config.model_copy(update={"rules": rules})


def files_of(stage: CurationStage) -> Mapping[str, Path]:
    """By key, the file and all that it reads from elsewhere; the file alone where it cannot be read, which says enough."""
    found = {"recipe": Path(stage.recipe).expanduser()}
    try:
        config = load_curation(found["recipe"])
    except ConfigError:
        return found
    of_stages = {f"rules.{kind}.outcomes" for kind in stage.outcomes}
    return found | {f"recipe.{key}": path for key, path in named_files(config).items() if key not in of_stages}


def check_curations(recipe: Recipe, *, done: Collection[str] = (), is_plan: bool = False) -> None:
    """Look at the curation files of all stages of `recipe` but those that are `done`, before time is spent on anything.

    Args:
        is_plan: what a file reads from elsewhere may still be made or fetched.

    Raises:
        ConfigError: naming the stage, and what is wrong with its file.
        TaskError: a file that it reads is not there.
    """
    for name, stage in recipe.stages.items():
        if not isinstance(stage, CurationStage) or name in done:
            continue
        curation_of(name, stage)
        for kind, other in stage.outcomes.items():
            if not isinstance(recipe.stages[other], SampledStage):
                raise ConfigError(
                    f"stages.{name}.outcomes.{kind} names {other!r}, a stage of kind {recipe.stages[other].kind!r}, which plays"
                    " no set of tasks. Name one of kind 'filter' or 'rejection_sampling'."
                )
        for key, path in files_of(stage).items():
            if not is_plan and not path.exists():
                raise TaskError(
                    f"stages.{name}.recipe: {path} ({key.removeprefix('recipe.')}) is not there. {_remedy(name, key)}"
                )


def _remedy(name: str, key: str) -> str:
    _, _, rule = key.partition("recipe.rules.")
    if rule.endswith(".outcomes"):
        kind = rule.removesuffix(".outcomes")
        return (
            f"The rule {kind!r} judges by rollouts of a model: let a stage of kind 'filter' or 'rejection_sampling' play them"
            f" and set stages.{name}.outcomes.{kind} to its name, or name the outcomes.jsonl of another run in the file."
        )
    return "Set it to a file of rows; relative paths are looked for beside the curation file first."
