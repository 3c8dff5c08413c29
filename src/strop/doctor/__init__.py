"""Checks a model and a recipe against each other, on the real parts, before time is spent on a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from strop.doctor import checks
from strop.doctor.examination import Examination, Parts, open_parts, pieces, try_out
from strop.doctor.finding import Diagnosis, Finding, NotMade, Problem
from strop.doctor.own_code import NUM_TASKS
from strop.errors import ModelError, TaskError, UserError
from strop.pipeline.plan import plan
from strop.recipe.load import load_recipe

Check = Callable[[Examination], Awaitable[str]]
"""Returns what it measured, in words. Raises `Problem` or `NotMade`; a `UserError` is a problem, too."""


async def _check_own_code(examination: Examination) -> str:
    if not examination.parts.own_code:
        raise NotMade("the recipe names none")
    return f"called on {NUM_TASKS} tasks: {examination.parts.own_code}"


CHECKS: Mapping[str, Check] = {
    "your code": _check_own_code,
    "chat template": checks.check_template,
    "prompts": checks.check_prompts,
    "loss mask": checks.check_mask,
    "log-probs": checks.check_logprobs,
    "tool round trip": checks.check_tool,
    "reward": checks.check_answers,
    "batch arithmetic": checks.check_arithmetic,
    "publication": checks.check_publication,  # last: it changes the weights
}
_OF_ENGINE = ("log-probs", "publication")


async def examine_file(
    path: Path, overrides: Sequence[str], *, model: Path | None, progress: Callable[[str], None] = lambda _: None
) -> Diagnosis:
    """Check the recipe at `path` and the model that it starts from, or the one in `model`, against each other.

    What cannot be opened is a problem under its own name. Checks that need it are not made.

    Args:
        progress: called with the name of each thing that is begun.

    Raises:
        MachineError: the engine was lost.
    """
    faults: list[Finding] = []
    try:
        progress("reading the recipe")
        recipe = load_recipe(path, overrides)
        plan(recipe)  # imports the user's code, and calls `check` and `plan` of each stage
        async with open_parts(recipe, model, progress, faults.append) as parts:
            return await examine_parts(parts, progress, faults)
    except UserError as error:
        check = {ModelError: "model", TaskError: "tasks"}.get(type(error), "recipe")
        lines = [line.strip() for line in str(error).removeprefix(f"{path}:").strip().split("\n")]
        findings = (*faults, *(Finding.from_message(check, line) for line in lines))
        return Diagnosis(subject=str(path), findings=findings, not_made=tuple(CHECKS))


async def examine_parts(
    parts: Parts, progress: Callable[[str], None] = lambda _: None, faults: Sequence[Finding] = ()
) -> Diagnosis:
    """Check parts that are open already; the trainer's and the engine's weights are others afterwards.

    Args:
        faults: of `open_parts`.
    """
    progress("sampling rollouts")
    examination = await try_out(parts)
    findings = list(faults)
    has_stand_in = any(fault.check == "engine" for fault in faults)
    for name, check in CHECKS.items():
        progress(f"checking: {name}")
        if has_stand_in and name in _OF_ENGINE:
            findings.append(Finding(check=name, detail="not made: the recipe's engine cannot be opened", is_made=False))
        else:
            findings.append(await _finding(name, check, examination))
    subject = f"{parts.recipe.name} on {parts.model}"
    return Diagnosis(subject=subject, findings=tuple(findings), rollout=pieces(examination))


async def _finding(name: str, check: Check, examination: Examination) -> Finding:
    try:
        return Finding(check=name, detail=await check(examination))
    except NotMade as why:
        return Finding(check=name, detail=f"not made: {why}", is_made=False)
    except Problem as problem:
        return Finding(check=name, detail=problem.detail, remedy=problem.remedy)
    except UserError as error:
        return Finding.from_message(name, str(error))
