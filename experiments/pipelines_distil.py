"""One seed of the distillation experiment: a teacher and data first, then students that imitate equally many tokens of each.

    python experiments/pipelines_distil.py --seed 0 --runs runs/pipelines/distil

How many tokens a row has is known once the rows are there. So the recipe runs up to its data in `seed-0-data`; in `seed-0` it
takes those stages over and goes on, with the steps of each student set so that the tokens agree. Either may be killed: the same
call goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.errors import UserError
from strop.pipeline.run import train
from strop.recipe.load import load_recipe, recipe_of
from strop.recipe.recipe import Recipe
from strop.reports.trackers import Progress
from strop.run_directory import RunDirectory, iter_lines, write_json
from strop.runs.lineage import copy_stages, num_common, num_done
from strop.runs.manifest import write_manifest
from strop.stages.context import load_chat, product_of
from strop.stages.sft import SFT

RECIPE = Path(__file__).resolve().parent / "pipelines" / "distil-recipe.toml"
STUDENTS = {"distilled": "student_distilled", "demonstrated": "student_demonstrated", "right": "student_demonstrated_right"}
"""Arm -> the stage that trains its student; the first says how many tokens the others have."""
LAST_BEFORE_STUDENTS = "small"
COMMAND = "make experiments-pipelines ONLY=distil"


async def run_seed(seed: int, runs: Path, overrides: Sequence[str] = ()) -> RunDirectory:
    """The whole program of one seed in `runs`; its run, with `tokens.json` beside its stages."""
    words = [*overrides, f"seed={seed}"]
    data = await _train(load_recipe(RECIPE, words, name=f"seed-{seed}-data"), runs, until=LAST_BEFORE_STUDENTS)
    recipe = recipe_of(data)
    per_update = {arm: imitated_tokens(data, recipe, stage) for arm, stage in STUDENTS.items()}
    first = next(iter(STUDENTS))
    budget = _student(recipe, STUDENTS[first]).steps * per_update[first]
    steps = {arm: max(1, round(budget / tokens)) for arm, tokens in per_update.items()}
    words += [f"stages.{stage}.steps={steps[arm]}" for arm, stage in STUDENTS.items()]
    whole = load_recipe(RECIPE, words, name=f"seed-{seed}")
    run = RunDirectory(runs / whole.name)
    run.path.mkdir(parents=True, exist_ok=True)
    write_manifest(run, whole, COMMAND)
    copy_stages(run, data, whole, num=min(num_common(recipe, whole), num_done(data, recipe)))
    told = {
        arm: {
            "steps": steps[arm],
            "imitated_tokens_per_update": per_update[arm],
            "imitated_tokens": steps[arm] * per_update[arm],
            "rows": len(_rows(data, recipe, stage)),
        }
        for arm, stage in STUDENTS.items()
    }
    write_json(run.path / "tokens.json", told)
    return await _train(whole, runs)


async def _train(recipe: Recipe, runs: Path, *, until: str | None = None) -> RunDirectory:
    result = await train(recipe, runs / recipe.name, progress=Progress(), command=COMMAND, until=until)
    return result.run


def imitated_tokens(run: RunDirectory, recipe: Recipe, student: str) -> float:
    """Tokens of a mean update of `student` that it imitates: what the rows' turns have in its own tokenizer."""
    stage = _student(recipe, student)
    chat = load_chat(product_of(run, stage.init))
    rows = _rows(run, recipe, student)
    lengths = [sum(len(chat.completion_ids(turn["completion_text"])) for turn in row["trajectory"]["turns"]) for row in rows]
    return stage.batch_size * math.fsum(lengths) / len(lengths)


def _rows(run: RunDirectory, recipe: Recipe, student: str) -> list[dict[str, Any]]:
    return [row for name in _student(recipe, student).data for row in iter_lines(product_of(run, name))]


def _student(recipe: Recipe, name: str) -> SFT.Config:
    stage = recipe.stages[name]
    assert isinstance(stage, SFT)
    return stage.config


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value of the recipe: a pilot")
    options = parser.parse_args(arguments)
    try:
        run = asyncio.run(run_seed(options.seed, options.runs, options.set))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(run.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
