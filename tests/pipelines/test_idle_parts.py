"""A part of a reward that is for no rollout of a step: who trains without it is told so."""

import json

import pytest

from scripted_runs import RECIPE, run_recipe
from strop.recipe.recipe import Recipe, resolve

STAGES = {
    "rl": {"kind": "rl", "method": "grpo", "tasks_per_step": 3, "group_size": 4},
    "expert_iteration": {"kind": "expert_iteration", "tasks_per_step": 3, "group_size": 4, "batch_size": 3},
}


def warnings_of(directory, kind, where, **keys):
    parts = {"accuracy": {"kind": "math"}, "brief": {"kind": "repetition", "where": where}}
    stage = STAGES[kind] | {"init": "base", "steps": 2, "reward": {"kind": "sum", "parts": parts}} | keys
    recipe = RECIPE | {"stages": {"base": RECIPE["stages"]["base"], "it": stage}}
    return run_recipe(directory, Recipe.model_validate_json(json.dumps(resolve(recipe)))).progress.warnings


@pytest.mark.parametrize("kind", STAGES)
def test_a_part_that_is_for_no_task_of_a_step_is_told_once_a_stage(tmp_path, kind):
    assert warnings_of(tmp_path / "run", kind, {"domain": ["chess"]}) == [
        "step 1: reward.parts.brief is for none of its 3 tasks: `where` requires domain = 'chess', and the tasks have"
        " {'domain': ['']}. If no later step has such tasks, correct `where`, or add the column to tasks.facts."
    ]


def test_a_part_that_is_for_some_task_of_a_step_is_not_told(tmp_path):
    assert warnings_of(tmp_path / "run", "rl", {"domain": ["chess", ""]}) == []


def test_a_part_for_tasks_that_the_schedule_brings_is_told_only_where_they_do_not_come(tmp_path):
    """Their rows carry no domain either: the warning is of the step that has them, and not of those before it."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": str(n), "question": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(9)))
    later = {"at_step": 2, "tasks": {"kind": "jsonl", "dataset": "strop", "path": str(rows)}}
    [told] = warnings_of(tmp_path / "run", "rl", {"domain": ["chess"]}, schedule=[later])
    assert told.startswith("step 2: reward.parts.brief is for none of its 3 tasks")
