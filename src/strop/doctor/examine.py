"""Makes every check in turn, and tells what was found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from strop.doctor import answers, arithmetic, logprobs, mask, publication, template, tool
from strop.doctor.examination import Examination, pieces, try_out
from strop.doctor.finding import Diagnosis, Finding
from strop.doctor.parts import Parts, open_parts
from strop.errors import ConfigError, TaskError, UserError
from strop.pipelines.load import load_recipe
from strop.pipelines.recipe import Recipe

CHECKS: Mapping[str, Callable[[Examination], Awaitable[Finding]]] = {
    template.NAME: template.check_template,
    mask.NAME: mask.check_mask,
    logprobs.NAME: logprobs.check_logprobs,
    tool.NAME: tool.check_tool,
    answers.NAME: answers.check_answers,
    arithmetic.NAME: arithmetic.check_arithmetic,
    publication.NAME: publication.check_publication,  # last: it changes the weights
}


async def examine_file(path: Path, overrides: Sequence[str], *, model: Path | None) -> Diagnosis:
    """Like `examine`, of a recipe that may not even load: then that is what was found."""
    try:
        recipe = load_recipe(path, overrides)
    except ConfigError as error:
        findings = arithmetic.findings_of_file(path, overrides, error)
        return _cut_short(str(path), findings)
    return await examine(recipe, model=model)


async def examine(recipe: Recipe, *, model: Path | None) -> Diagnosis:
    """Check `recipe` and the model that it starts from, or the one in `model`, against each other.

    Raises:
        MachineError: the engine was lost.
    """
    try:
        async with open_parts(recipe, model) as parts:
            return await examine_parts(parts)
    except UserError as error:
        check = {ConfigError: arithmetic.RECIPE, TaskError: "tasks"}.get(type(error), "model")
        return _cut_short(recipe.name, (Finding.from_message(check, str(error)),))


async def examine_parts(parts: Parts) -> Diagnosis:
    """Check parts that are open already; the trainer's and the engine's weights are others afterwards."""
    examination = await try_out(parts)
    findings = [await check(examination) for check in CHECKS.values()]
    return Diagnosis(
        subject=f"{parts.recipe.name} on {parts.model}",
        findings=tuple(findings),
        not_made=(),
        rollout=pieces(examination),
    )


def _cut_short(subject: str, findings: tuple[Finding, ...]) -> Diagnosis:
    made = {finding.check for finding in findings}
    return Diagnosis(
        subject=subject, findings=findings, not_made=tuple(name for name in CHECKS if name not in made), rollout=()
    )
