"""Expert iteration that is killed ends where an undisturbed run ends, bit for bit (laws 8 and 9)."""

from __future__ import annotations

import shutil

import pytest
from killing import HERE, events, finish, kill_when, open_tool_calls

from scripted_runs import untimed
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop.ledger import read_rollouts

RECIPE = HERE / "tiny_expert.toml"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = RunDirectory(tmp_path_factory.mktemp("undisturbed") / "run")
    finish(run, RECIPE)
    assert any(line["rollout/kept_fraction"] > 0 for line in lines_of(run)), "nothing was imitated: the test proves nothing"
    return run


def lines_of(run):
    return [untimed(line) for line in read_lines(run.metrics) if line["stage"] == "expert"]


def calls_are_open(run, *, step):
    rollouts = run.stage("expert").rollouts(step)
    return len(read_lines(rollouts)) >= 1 and open_tool_calls(rollouts.with_suffix(".ledger.jsonl")) >= 4


def has_imitated(run, *, step):
    return run.stage("expert").selection(step).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_time", "resumes_from"),
    [
        pytest.param(lambda run: calls_are_open(run, step=1), [], id="first step, among open tool calls"),
        pytest.param(lambda run: calls_are_open(run, step=2), [], id="second step, before any checkpoint"),
        pytest.param(
            lambda run: calls_are_open(run, step=3) and events(run, "checkpoint_finished", "expert"),
            [2],
            id="third step, among open tool calls",
        ),
    ],
)
def test_a_kill_in_expert_iteration_changes_nothing(undisturbed, tmp_path, is_time, resumes_from):
    run = RunDirectory(shutil.copytree(undisturbed.path, tmp_path / "run"))  # up to the stage itself, to save time
    shutil.rmtree(run.stage("expert").path)
    run.events.unlink()
    kill_when(run, lambda: is_time(run), recipe=RECIPE)
    finish(run, RECIPE)
    assert lines_of(run) == lines_of(undisturbed)
    assert [line["step"] for line in events(run, "resumed", "expert")] == resumes_from
    for step in (1, 2, 3):
        mine, theirs = (each.stage("expert") for each in (run, undisturbed))
        assert read_json(mine.selection(step)) == read_json(theirs.selection(step))
        assert tokens(mine, step) == tokens(theirs, step)
    models = [each.stage("expert").model / "model.safetensors" for each in (run, undisturbed)]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert not list(run.path.rglob(".*.tmp"))


def tokens(stage, step):
    """Of each rollout of the weights that the step was played with."""
    found = {scored.trajectory.key: scored.trajectory.ids for scored in read_rollouts(stage.rollouts(step))}
    assert len(found) == 24
    return found
