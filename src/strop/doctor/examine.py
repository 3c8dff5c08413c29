"""Makes every check in turn, and reports what was found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from strop.doctor import answers, checks, logprobs, own_code
from strop.doctor.examination import Examination, pieces, try_out
from strop.doctor.finding import Diagnosis, Finding
from strop.doctor.parts import Parts, open_parts
from strop.errors import ConfigError, TaskError, UserError
from strop.pipeline.plan import plan
from strop.recipe.load import load_recipe

RECIPE = "recipe"


async def _own_code(examination: Examination) -> Finding:
    called = examination.parts.own_code
    if not called:
        return Finding.not_made(own_code.NAME, "the recipe names none")
    return Finding.fine(own_code.NAME, f"called on {own_code.NUM_TASKS} tasks: {called}")


CHECKS: Mapping[str, Callable[[Examination], Awaitable[Finding]]] = {
    own_code.NAME: _own_code,
    checks.TEMPLATE: checks.check_template,
    checks.MASK: checks.check_mask,
    logprobs.NAME: logprobs.check_logprobs,
    checks.TOOL: checks.check_tool,
    answers.NAME: answers.check_answers,
    checks.ARITHMETIC: checks.check_arithmetic,
    checks.PUBLICATION: checks.check_publication,  # last: it changes the weights
}


async def examine_file(
    path: Path, overrides: Sequence[str], *, model: Path | None, progress: Callable[[str], None] = lambda _: None
) -> Diagnosis:
    """Check the recipe at `path` and the model that it starts from, or the one in `model`, against each other.

    What keeps the checks from being made is the one problem of the diagnosis.

    Args:
        progress: called with the name of each thing that is begun.

    Raises:
        MachineError: the engine was lost.
    """
    try:
        progress("reading the recipe")
        recipe = load_recipe(path, overrides)
        plan(recipe)  # imports the user's code, and calls `check` and `plan` of each stage
        async with open_parts(recipe, model, progress) as parts:
            return await examine_parts(parts, progress)
    except UserError as error:
        check = {ConfigError: RECIPE, TaskError: "tasks"}.get(type(error), "model")
        lines = [line.strip() for line in str(error).removeprefix(f"{path}:").strip().split("\n")]
        findings = tuple(Finding.from_message(check, line) for line in lines)
        return Diagnosis(subject=str(path), findings=findings, not_made=tuple(CHECKS), rollout=())


async def examine_parts(parts: Parts, progress: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Check parts that are open already; the trainer's and the engine's weights are others afterwards."""
    progress("sampling rollouts")
    examination = await try_out(parts)
    findings = []
    for name, check in CHECKS.items():
        progress(f"checking: {name}")
        findings.append(await check(examination))
    return Diagnosis(
        subject=f"{parts.recipe.name} on {parts.model}",
        findings=tuple(findings),
        not_made=(),
        rollout=pieces(examination),
    )
