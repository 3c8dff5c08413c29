"""What `--from` reruns, where the earlier results go, and what may change without it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil

import pytest

from scripted_runs import RECIPE, Watching, answer, make_recipe, recipe_of, run_recipe
from strop.errors import ConfigError, RunError, TaskError
from strop.recipe.recipe import Recipe, resolve
from strop.run_directory import RunDirectory, read_json, read_lines, write_json
from strop.runs.lineage import state_of
from strop.runs.resume import select


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
        write_json(run.stage(name).lineage, recorded | {"parents": {"sft": {"model.safetensors": "another"}}})
    with pytest.raises(RunError, match=r"Rerun them with --from before --from rl \(the present results"):
        run_recipe(run.path)
    with pytest.raises(RunError, match=r"rl: sft has another result\n(.*\n)*Rerun them with --from before --from rl \("):
        run_recipe(run.path, start="before")
    run_recipe(run.path, start=("before", "rl"))
    assert {path.name for path in (run.path / "stale").iterdir()} >= {"before-1", "rl-1", "after-1"}
    run_recipe(run.path)


@pytest.mark.parametrize("start", ["rll", ("rl", "rll")])
def test_a_start_that_is_no_stage_is_named(run, start):
    with pytest.raises(ConfigError, match=r"--from rll: no such stage. Did you mean 'rl'\?"):
        run_recipe(run.path, start=start)


def test_a_missing_model_is_reported_with_its_stage_and_the_remedy(run):
    shutil.rmtree(run.stage("rl").path / "model")
    with pytest.raises(RunError, match=r"rl/model: removed since stage rl finished\. Restore it, or rerun .* --from rl\."):
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
    with pytest.raises(RunError, match=r"rl: stages.rl.steps: \d -> 9\n  after: rl is stale\nRerun them with --from rl \("):
        run_recipe(run.path, make_recipe(steps=9))


def test_the_plan_of_a_run_says_what_is_done_and_what_is_stale(run, tmp_path):
    assert state_of(RunDirectory(tmp_path / "none"), make_recipe()) == []
    assert state_of(run, make_recipe()) == [f"{run.path}: finished before: base, sft, before, rl, after."]
    _, of_rl, of_after = state_of(run, make_recipe(steps=9))
    assert re.fullmatch(r"rl is stale: stages\.rl\.steps: \d -> 9\. Rerun it with --from rl\.", of_rl)
    assert of_after == "after is stale: rl is stale. Rerun it with --from after."


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
    assert not (run.path / "rerun.json").exists()


def test_a_stage_that_began_with_what_its_parent_made_before_does_not_go_on(run):
    """As after a kill while the parent was made anew: it had no product then that could have been compared."""
    recorded = read_json(run.stage("rl").lineage)
    sft = read_json(run.stage("sft").lineage)
    write_json(run.stage("sft").lineage, {key: value for key, value in sft.items() if key != "product"})
    write_json(run.stage("rl").lineage, recorded | {"parents": {"sft": {"model.safetensors": "another"}}})
    run.stage("sft").done.unlink()
    with pytest.raises(RunError, match=r"stage rl is stale: sft has another result\. Rerun it with --from rl \("):
        run_recipe(run.path)
    assert read_json(run.stage("rl").lineage)["parents"] == {"sft": {"model.safetensors": "another"}}
    run_recipe(run.path, start="rl")


def test_a_stage_that_has_begun_may_not_be_left_out(run):
    tree = make_recipe().model_dump(mode="json")
    del tree["stages"]["after"]
    without = Recipe.model_validate_json(json.dumps(tree))
    for start in ((), "rl"):
        with pytest.raises(RunError, match=r"the recipe lacks stages that have begun there: after\. Give"):
            run_recipe(run.path, without, start=start)


def test_a_begun_stage_goes_on_with_another_number_of_processes_and_a_warning(run):
    tree = make_recipe().model_dump(mode="json")
    tree["stages"]["rl"]["trainer"] |= {"workers": 2, "fsdp_size": 1, "sequence_parallel": 2}
    divided = Recipe.model_validate_json(json.dumps(tree))
    assert run_recipe(run.path, divided).progress.warnings == []  # the stage is finished
    run.stage("rl").done.unlink()
    selected = select(run, divided, "", until=None, start=())
    before = {"fsdp_size": (1, 0), "sequence_parallel": (2, 1), "workers": (2, 0)}
    assert set(selected.new_layouts) == {
        f"stages.rl.trainer.{key} is {now}, and was {then} when the stage began: the result is equal up to rounding."
        for key, (now, then) in before.items()
    }


def with_root(**keys):
    tree = make_recipe().model_dump(mode="json") | keys
    return Recipe.model_validate_json(json.dumps(tree))


def test_a_key_of_the_root_may_change_where_all_that_has_begun_is_made_anew(run):
    with pytest.raises(RunError, match=r"(?s)base: threads: 1 -> 2\n.*with --from rl --from base"):
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
        return recipe_of({"base": base, "written": written, **stages})

    run = RunDirectory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(run.path, with_stages(sft=sft), progress=Stopped())
    assert not run.stage("sft").path.exists()
    run_recipe(run.path, with_stages())
    assert [*read_lines(run.metrics), *read_lines(run.updates)] == []


def test_a_run_directory_that_is_in_use_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    descriptor = os.open(tmp_path / "run" / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(RunError, match="another strop is running there"):
            run_recipe(tmp_path / "run", make_recipe())
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    finally:
        os.close(descriptor)
    run_recipe(tmp_path / "run", make_recipe())


ARMS = {
    "base": RECIPE["stages"]["base"],
    "sft": RECIPE["stages"]["sft"],
    "before": RECIPE["stages"]["before"],
    "other": RECIPE["stages"]["sft"] | {"steps": 1},
    "after": RECIPE["stages"]["before"] | {"init": "other"},
}


def test_one_arm_runs_alone_and_the_others_later(tmp_path):
    run = run_recipe(tmp_path / "run", recipe_of(ARMS), only="after", is_fresh=True).run
    done = [name for name in ARMS if run.stage(name).done.exists()]
    assert done == ["base", "other", "after"]
    assert not run.stage("sft").path.exists()
    run_recipe(tmp_path / "run", recipe_of(ARMS))
    assert all(run.stage(name).done.exists() for name in ARMS)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"only": ["after"], "until": "before"}, "--only after and --until before exclude each other"),
        ({"only": ["after"], "start": "sft"}, "--from sft is no stage that --only after needs"),
        ({"only": ["afte"]}, "--only afte: no such stage. Did you mean 'after'?"),
    ],
)
def test_options_that_exclude_each_other_are_named(tmp_path, words, problem):
    with pytest.raises(ConfigError, match=problem):
        run_recipe(tmp_path / "run", recipe_of(ARMS), **words)
