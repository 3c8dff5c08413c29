"""Marks of stale stages, and what a refusal says about stages that depend on others."""

import json
import shutil

import pytest

from scripted_runs import RECIPE, make_recipe, recipe_of, run_recipe
from strop.config import validate
from strop.errors import RunError
from strop.evaluation.results import gather
from strop.recipe.recipe import Recipe, resolve
from strop.reports.log import StageState, read_run
from strop.run_directory import read_json, write_json
from strop.runs import lineage


def marked(run):
    return {path.parent.name for path in run.path.glob("stages/*/stale.json")}


def test_restored_data_makes_stages_fresh_again_for_leaderboard_and_report(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}+{n}", "answer": str(2 * n)}) + "\n" for n in range(1, 6)))
    tasks = {"kind": "jsonl", "path": str(rows), "test_path": str(rows)}
    stages = RECIPE["stages"] | {"after": RECIPE["stages"]["after"] | {"tasks": tasks}}
    recipe = recipe_of(stages)
    run = run_recipe(tmp_path / "run", recipe).run
    before = rows.read_text()
    rows.write_text(before.replace("1+1", "2+0"))
    run_recipe(run.path, recipe, until="rl")
    assert marked(run) == {"after"}
    assert any("after/eval/result.json: stale" in line for line in gather([run.path]).left_out)
    rows.write_text(before)
    assert run_recipe(run.path, recipe).engines == []
    assert marked(run) == set()
    assert gather([run.path]).left_out == []
    assert {each.state for each in read_run(run).stages} == {StageState.DONE}


def test_a_mark_stays_while_a_parent_is_unfinished(run):
    write_json(run.stage("after").stale, {"because": "by hand"})
    kept = run.path / "elsewhere.json"
    shutil.move(run.stage("rl").done, kept)
    run_recipe(run.path, until="before")
    assert marked(run) == {"after"}
    shutil.move(kept, run.stage("rl").done)
    run_recipe(run.path, until="before")
    assert marked(run) == set()


def test_stages_after_the_last_one_are_marked_and_do_not_refuse(run):
    for _ in range(2):
        result = run_recipe(run.path, make_recipe(steps=9), until="before")
        assert marked(run) == {"rl", "after"}
    [of_rl, of_after] = result.progress.warnings
    assert of_rl.startswith("rl is stale: stages.rl.steps: ")
    assert of_after == "after is stale: rl is stale. Rerun it with --from after."


def refusal(run, **root):
    with pytest.raises(RunError, match="these stages are stale") as caught:
        run_recipe(run.path, validate(Recipe, resolve(RECIPE | root), place="test"))
    return [line for line in str(caught.value).splitlines() if line.startswith("  ")]


def test_a_refusal_names_the_changed_keys_and_the_stages_that_depend_on_them(run):
    assert refusal(run, seed=7) == [
        "  base: seed: 0 -> 7",
        "  sft: seed: 0 -> 7; base is stale",
        "  before: seed: 0 -> 7; sft is stale",
        "  rl: seed: 0 -> 7; sft is stale",
        "  after: seed: 0 -> 7; rl is stale",
    ]


def test_a_stage_does_not_depend_on_keys_that_it_does_not_read(run):
    """Neither the model nor SFT, which judges nothing here, reads the reward; nothing before them reads the engine."""
    changed = refusal(run, reward={"weights": {"accuracy": 0.5}})
    assert [line.split(":")[0].strip() for line in changed] == ["before", "rl", "after"]


def test_results_of_another_version_of_strop_are_kept(run, monkeypatch):
    monkeypatch.setattr(lineage, "_source_digest", lambda: "0" * 64)  # as after an update of strop
    assert run_recipe(run.path).engines == []
    run_recipe(run.path, start="base", until="base")
    assert read_json(run.stage("base").lineage)["code"]["digest"] == "0" * 64
