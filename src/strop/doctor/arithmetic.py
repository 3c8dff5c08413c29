"""Do the numbers of the recipe fit each other, the model and the prompts?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from strop.config import load_toml
from strop.doctor.examination import Examination
from strop.doctor.finding import Finding
from strop.doctor.parts import first_tasks
from strop.errors import ConfigError
from strop.pipelines.recipe import ExpertIterationStage, PlayedStage, RlStage, SftStage
from strop.pipelines.room import prompt_lengths

NAME = "batch arithmetic"
RECIPE = "recipe"


async def check_arithmetic(examination: Examination) -> Finding:
    """What a recipe's own validation cannot know: whether the prompts leave room in the engine and in the model."""
    parts = examination.parts
    told: list[str] = []
    for name, stage in parts.recipe.stages.items():
        match stage:
            case SftStage() if stage.num_demonstrations is not None:
                epochs = stage.steps * stage.batch_size / stage.num_demonstrations
                more = ", more where some are wrong" if stage.only_right else ""
                told.append(f"{name}: {stage.steps} steps x {stage.batch_size} demonstrations, {epochs:.1f} epochs{more}")
            case RlStage():
                kept = stage.tasks_per_step * stage.group_size
                told.append(
                    f"{name}: {stage.tasks_per_step} tasks x {stage.rollouts_per_task} rollouts a step, {kept} learnt from in"
                    f" {stage.updates_per_step} updates of {kept // stage.updates_per_step}"
                )
            case ExpertIterationStage():
                num = stage.tasks_per_step * stage.group_size
                told.append(
                    f"{name}: {stage.tasks_per_step} tasks x {stage.group_size} rollouts a step, those that are right imitated"
                    f" in {stage.epochs} epochs of up to {-(-num // stage.batch_size)} updates"
                )
    for name, stage in parts.recipe.stages.items():
        if isinstance(stage, PlayedStage):
            longest = max(prompt_lengths(stage, first_tasks(parts.recipe, name), parts.chat, parts.tools))
            problem = _length_problem(examination, longest, stage.sampling.max_tokens)
            if problem is not None:
                detail, remedy = problem
                return Finding(check=NAME, detail=f"stages.{name}: {detail}", remedy=remedy)
            if stage is parts.stage:
                told.append(
                    f"prompts of up to {longest} tokens + {stage.sampling.max_tokens} fit the engine's"
                    f" {parts.recipe.engine.max_length}"
                )
    return Finding.fine(NAME, "; ".join(told) or "nothing is trained or sampled")


def findings_of_file(path: Path, overrides: Sequence[str], error: ConfigError) -> tuple[Finding, ...]:
    """A recipe that was refused when it was loaded, as findings: one for each mistake, told apart by what it is about."""
    try:
        load_toml(path, overrides)
    except ConfigError:
        return (Finding.from_message(RECIPE, str(error)),)
    cause = error.__cause__
    if not isinstance(cause, ValidationError):  # a method's own arithmetic refuses without a place
        return (Finding.from_message(NAME, str(error)),)
    lines = [line.strip() for line in str(error).removeprefix(f"{path}:").strip().split("\n")]
    return tuple(
        Finding.from_message(NAME if _is_arithmetic(mistake["type"], mistake["loc"]) else RECIPE, line)
        for mistake, line in zip(cause.errors(include_url=False), lines, strict=True)
    )


def _is_arithmetic(kind: str, place: tuple[int | str, ...]) -> bool:
    """Whether a whole training stage was refused, which its own validators do when its numbers do not fit each other."""
    return kind == "value_error" and len(place) == 3 and place[-1] in ("rl", "sft", "distil", "expert_iteration")


def _length_problem(examination: Examination, longest: int, max_tokens: int) -> tuple[str, str] | None:
    """What is wrong with a response of `max_tokens` behind the longest prompt, and its remedy."""
    parts = examination.parts
    needed, held = longest + max_tokens, parts.recipe.engine.max_length
    if needed > held:
        return (
            f"a prompt of {longest} tokens and sampling.max_tokens = {max_tokens} make {needed}, but the engine holds {held}.",
            f"Raise engine.max_length to {needed} or more, or lower sampling.max_tokens to {max(1, held - longest)}.",
        )
    trained = getattr(parts.original.config, "max_position_embeddings", None)
    if trained is not None and needed > trained:
        return (
            f"a prompt of {longest} tokens and sampling.max_tokens = {max_tokens} make {needed}, but the model knows"
            f" {trained} positions.",
            f"Lower sampling.max_tokens to {max(1, trained - longest)}, or take a model of a longer context.",
        )
    return None
