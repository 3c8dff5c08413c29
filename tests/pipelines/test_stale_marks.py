"""Marks of stale stages: who gets one, and who is rid of it; and what a refusal says of stages that stand on others."""

import json
import shutil

import pytest

from scripted_runs import RECIPE, make_recipe, run_recipe
from strop.config import validate
from strop.errors import RunError
from strop.evaluation.leaderboard import gather
from strop.pipelines import lineage
from strop.pipelines.recipe import Recipe, resolve
from strop.reports.log import StageState, read_run
from strop.runs import read_json, write_json


def marked(run):
    return {path.parent.name for path in run.path.glob("stages/*/stale.json")}


def test_what_is_restored_is_not_stale_for_the_leaderboard_or_the_report_either(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}+{n}", "answer": str(2 * n)}) + "\n" for n in range(1, 6)))
    tasks = {"kind": "jsonl", "path": str(rows), "test_path": str(rows)}
    stages = RECIPE["stages"] | {"after": RECIPE["stages"]["after"] | {"tasks": tasks}}
    recipe = validate(Recipe, resolve(RECIPE | {"stages": stages}), place="test")
    run = run_recipe(tmp_path / "run", recipe).run
    before = rows.read_text()
    rows.write_text(before.replace("1+1", "2+0"))
    run_recipe(run.path, recipe, until="rl")
    assert marked(run) == {"after"}
    assert any("after/eval/result.json: stale" in told for told in gather([run.path]).left_out)
    rows.write_text(before)
    assert run_recipe(run.path, recipe).engines == []
    assert marked(run) == set()
    assert gather([run.path]).left_out == []
    assert {each.state for each in read_run(run).stages} == {StageState.DONE}


def test_a_mark_stays_until_what_the_stage_stands_on_is_made_again(run):
    """Until rl is there again, nobody knows whether it comes out as `after` had it."""
    write_json(run.stage("after").stale, {"because": "by hand"})
    kept = run.path / "elsewhere.json"
    shutil.move(run.stage("rl").done, kept)
    run_recipe(run.path, until="before")
    assert marked(run) == {"after"}
    shutil.move(kept, run.stage("rl").done)
    run_recipe(run.path, until="before")
    assert marked(run) == set()


def test_a_stage_that_is_still_stale_keeps_its_mark(run):
    recorded = read_json(run.stage("after").lineage)
    write_json(run.stage("after").lineage, recorded | {"digest": "of another recipe"})
    run_recipe(run.path, until="rl")
    run_recipe(run.path, until="rl")
    assert marked(run) == {"after"}


def refusal(run, recipe):
    with pytest.raises(RunError, match="a run of another recipe") as caught:
        run_recipe(run.path, recipe)
    return str(caught.value).partition("stale:\n")[2].splitlines()


def test_a_refused_key_is_told_with_the_begun_stages_that_stand_on_it(run):
    assert refusal(run, make_recipe(steps=3)) == ["  rl: keys of it differ", "  after: rl is stale"]
    shutil.rmtree(run.stage("after").path)
    assert refusal(run, make_recipe(steps=3)) == ["  rl: keys of it differ"]
    other_root = validate(Recipe, resolve(RECIPE | {"seed": 7}), place="test")
    told = refusal(run, other_root)
    assert told[0] == "  base: keys of the root differ"
    assert told[1] == "  sft: keys of the root differ; base is stale"
    assert len(told) == 4


def test_an_evaluation_that_would_only_grow_is_not_among_them(run):
    stages = RECIPE["stages"] | {
        "before": RECIPE["stages"]["before"] | {"k": 4},
        "rl": RECIPE["stages"]["rl"] | {"steps": 3},
    }
    assert refusal(run, validate(Recipe, resolve(RECIPE | {"stages": stages}), place="test")) == [
        "  rl: keys of it differ",
        "  after: rl is stale",
    ]


def test_what_other_code_of_strop_made_is_kept_and_told(run, caplog, monkeypatch):
    run_recipe(run.path)
    assert "strop has changed" not in caplog.text
    monkeypatch.setattr(lineage, "_source_digest", lambda: "0" * 64)  # as after an update of strop
    assert run_recipe(run.path).engines == []
    assert (
        f"{run.path}: strop has changed since these stages began, and what they made is kept: base, sft, before, rl, after."
        in caplog.text
    )
    assert "--from base makes them anew" in caplog.text


def test_a_start_that_goes_on_after_an_update_of_strop_is_not_told_to_make_anew(run, caplog, monkeypatch):
    def stops(conversation, draw):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(run.path, start="base", say=stops)
    monkeypatch.setattr(lineage, "_source_digest", lambda: "0" * 64)
    run_recipe(run.path, start="base")
    assert not (run.path / "stale" / "base-2").exists()
    assert (
        "is kept: base, sft, before. --from base goes on with what it began; once that is done, it makes them anew"
        in caplog.text
    )
    caplog.clear()
    run_recipe(run.path)
    assert "--from base makes them anew" in caplog.text
    run_recipe(run.path, start="base")
    assert (run.path / "stale" / "base-2").exists()
