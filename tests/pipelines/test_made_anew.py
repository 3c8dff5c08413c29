"""What `--from` makes anew, what becomes of what was there, and what may change without it."""

from __future__ import annotations

import json
import shutil

import pytest

from scripted_runs import RECIPE, Watching, answer, make_recipe, run_recipe
from strop.errors import ConfigError, RunError, TaskError
from strop.pipelines.claim import new_layouts
from strop.pipelines.recipe import Recipe, resolve
from strop.runs import RunDirectory, read_json, read_lines, write_json


def never_right(conversation, draw):
    return answer(draw.choice([0, 1]))


def of_stage(lines, name):
    return [line for line in lines if line["stage"] == name]


def test_the_steps_of_what_is_put_aside_lie_beside_it(run):
    before = read_lines(run.metrics)
    run_recipe(run.path, start="rl", say=never_right)
    put_aside = run.path / "stale" / "rl-1"
    assert read_lines(put_aside / "metrics.jsonl") == of_stage(before, "rl") != []
    assert not (run.path / "stale" / "after-1" / "metrics.jsonl").exists()  # an evaluation has none
    now = read_lines(run.metrics)
    assert of_stage(now, "sft") == of_stage(before, "sft")
    assert of_stage(now, "rl") != of_stage(before, "rl")


def test_siblings_that_are_stale_are_made_anew_by_one_command(run):
    for name in ("before", "rl"):
        recorded = read_json(run.stage(name).lineage)
        write_json(run.stage(name).lineage, recorded | {"parent_products": {"sft": "of other weights"}})
    with pytest.raises(RunError, match=r"Make them anew with --from before --from rl \(what they made"):
        run_recipe(run.path)
    with pytest.raises(RunError, match=r"rl: sft was made anew\n(.*\n)*Make them anew with --from before --from rl \("):
        run_recipe(run.path, start="before")
    run_recipe(run.path, start=("before", "rl"))
    assert {path.name for path in (run.path / "stale").iterdir()} >= {"before-1", "rl-1", "after-1"}
    run_recipe(run.path)


@pytest.mark.parametrize("start", ["rll", ("rl", "rll")])
def test_a_start_that_is_no_stage_is_named(run, start):
    with pytest.raises(ConfigError, match=r"--from rll: no such stage. Did you mean 'rl'\?"):
        run_recipe(run.path, start=start)


def test_a_model_that_is_gone_is_told_with_its_stage_and_how_to_have_it_again(run):
    shutil.rmtree(run.stage("rl").path / "model")
    with pytest.raises(RunError, match=r"rl/model: missing, though stage 'rl' is done\. Restore it, or .* with --from rl\."):
        run_recipe(run.path, start="after")


def test_a_stage_that_has_not_begun_may_change_be_added_and_be_removed(tmp_path):
    path = tmp_path / "run"
    run_recipe(path, until="sft")
    changed = make_recipe(steps=1)
    tree = changed.model_dump(mode="json")
    tree["stages"]["once_more"] = tree["stages"]["after"]
    del tree["stages"]["before"]
    changed = type(changed).model_validate_json(json.dumps(tree))
    run_recipe(path, changed)
    manifest = read_json(path / "manifest.json")["recipe"]
    assert manifest == changed.model_dump(mode="json")
    assert len(of_stage(read_lines(path / "metrics.jsonl"), "rl")) == 1
    assert (path / "stages" / "once_more" / "done.json").exists()


def test_a_stage_that_has_begun_may_not(run):
    with pytest.raises(RunError, match=r"stages.rl.steps: \d there, 9 asked for"):
        run_recipe(run.path, make_recipe(steps=9))


def stops(conversation, draw):
    raise KeyboardInterrupt


def put_aside(run):
    return sorted(path.name for path in (run.path / "stale").iterdir())


def test_what_is_put_aside_once_is_not_put_aside_again_by_the_same_stages_in_other_words(run):
    with pytest.raises(KeyboardInterrupt):
        run_recipe(run.path, start=("before", "rl"), say=stops)
    assert put_aside(run) == ["after-1", "before-1", "rl-1"]
    with pytest.raises(KeyboardInterrupt):
        run_recipe(run.path, start=("rl", "before"), say=stops)
    run_recipe(run.path, until="sft")  # ends, and something is still owed
    run_recipe(run.path, start=("rl", "before"))
    assert put_aside(run) == ["after-1", "before-1", "rl-1"]
    assert not (run.path / "anew.json").exists()


def test_a_stage_that_began_with_what_its_parent_made_before_does_not_go_on(run):
    """As after a kill while the parent was made anew: it had no product then that could have been compared."""
    recorded = read_json(run.stage("rl").lineage)
    sft = read_json(run.stage("sft").lineage)
    write_json(run.stage("sft").lineage, {key: value for key, value in sft.items() if key != "product"})
    write_json(run.stage("rl").lineage, recorded | {"parent_products": {"sft": "of other weights"}})
    run.stage("sft").done.unlink()
    with pytest.raises(RunError, match=r"stage rl had begun with what sft made before, .* Make it anew with --from rl \("):
        run_recipe(run.path)
    assert read_json(run.stage("rl").lineage)["parent_products"] == {"sft": "of other weights"}
    run_recipe(run.path, start="rl")


def test_a_stage_that_has_begun_may_not_be_left_out(run):
    tree = make_recipe().model_dump(mode="json")
    del tree["stages"]["after"]
    without = Recipe.model_validate_json(json.dumps(tree))
    for start in ((), "rl"):
        with pytest.raises(RunError, match=r"has stages that the recipe has no more: after\. Give this run a name"):
            run_recipe(run.path, without, start=start)


def test_the_manifest_has_the_processes_with_which_stages_began_and_those_that_others_will_have(tmp_path):
    path = tmp_path / "run"
    run_recipe(path, until="sft")
    tree = make_recipe().model_dump(mode="json")
    for name in ("sft", "rl"):
        tree["stages"][name]["trainer"]["workers"] = 2
    divided = Recipe.model_validate_json(json.dumps(tree))
    run_recipe(path, divided, until="sft")
    stages = read_json(path / "manifest.json")["recipe"]["stages"]
    assert (stages["sft"]["trainer"]["workers"], stages["rl"]["trainer"]["workers"]) == (0, 2)
    assert [key for key, _, _ in new_layouts(RunDirectory(path), divided)] == ["stages.sft.trainer.workers"]


def test_an_evaluation_may_be_taken_back_while_what_has_not_begun_changes(tmp_path):
    path = tmp_path / "run"
    run_recipe(path, until="before")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(path, with_tasks(5), until="before", say=stops)
    run_recipe(path, with_tasks(3, steps=1), until="before")
    stages = read_json(path / "manifest.json")["recipe"]["stages"]
    assert (stages["before"]["num_tasks"], stages["rl"]["steps"]) == (3, 1)


def with_tasks(num, **rl):
    """The scripted recipe with another number of tasks of its first evaluation."""
    tree = make_recipe(**rl).model_dump(mode="json")
    tree["stages"]["before"]["num_tasks"] = num
    return Recipe.model_validate_json(json.dumps(tree))


def with_root(**keys):
    tree = make_recipe().model_dump(mode="json") | keys
    return Recipe.model_validate_json(json.dumps(tree))


def test_a_key_of_the_root_may_change_where_all_that_has_begun_is_made_anew(run):
    with pytest.raises(RunError, match=r"threads: 1 there, 2 asked for\n(.*\n?)*--from base makes all"):
        run_recipe(run.path, with_root(threads=2), start="rl")
    run_recipe(run.path, with_root(threads=2), start="base")
    assert read_json(run.manifest)["recipe"]["threads"] == 2
    assert "base-1" in put_aside(run)


def test_a_stage_that_ended_before_it_made_anything_has_not_begun(tmp_path):
    path = tmp_path / "run"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")

    def with_written(limit):
        written = {"kind": "conversations", "path": str(rows), "limit": limit}
        tree = make_recipe().model_dump(mode="json")
        tree["stages"] = {
            "base": tree["stages"]["base"],
            "written": resolve({**RECIPE, "stages": {"written": written}})["stages"]["written"],
        }
        return Recipe.model_validate_json(json.dumps(tree))

    with pytest.raises(TaskError, match="has no rows"):
        run_recipe(path, with_written(3))
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}) + "\n")
    run_recipe(path, with_written(2))
    assert read_json(path / "manifest.json")["recipe"]["stages"]["written"]["limit"] == 2


class Stopped(Watching):
    """Ends the run behind a step of which no checkpoint is kept."""

    def step(self, metrics, step):
        raise KeyboardInterrupt


def test_a_stage_that_is_let_go_leaves_no_steps_behind(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        2 * (json.dumps({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}) + "\n")
    )
    base, written = RECIPE["stages"]["base"], {"kind": "conversations", "path": str(rows)}
    sft = {"kind": "sft", "init": "base", "data": ["written"], "steps": 4, "batch_size": 1, "checkpoint_every": 4}

    def with_stages(**stages):
        return Recipe.model_validate_json(
            json.dumps(resolve(RECIPE | {"stages": {"base": base, "written": written, **stages}}))
        )

    run = RunDirectory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(run.path, with_stages(sft=sft), progress=Stopped())
    assert not run.stage("sft").path.exists()
    run_recipe(run.path, with_stages())
    assert [*read_lines(run.metrics), *read_lines(run.updates)] == []
