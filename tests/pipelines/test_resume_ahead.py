"""`kill -9` while the next step is played ahead, then the same command again: the same weights, bit for bit (laws 8 and 9).

Real processes, an embedded engine in a process of its own, a real sandbox whose answers come after random times.
"""

import shutil

import pytest
from killing import TINY, events, finish, kill_when, open_tool_calls
from test_resume import LEDGER, assert_equal_runs, is_in_checkpoint

from scripted_runs import lines_of
from strop.run_directory import RunDirectory, read_lines
from strop.stages.loop.async_rollouts import read_closed
from strop.stages.loop.ledger import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # whole runs, one after the other

LIMIT_S = 240
AHEAD = ("stages.rl.engine.own_process=true", "stages.rl.engine.threads=1", "stages.rl.async_rollouts.max_staleness=1")
MOMENTS = {
    "the second step is played ahead of the first": (1, 2, []),
    "in the middle of a checkpoint": (0, 0, ["hold"]),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = RunDirectory(tmp_path_factory.mktemp("undisturbed") / "run")
    finish(run, TINY, *AHEAD, limit_s=LIMIT_S)
    return run


def is_played_ahead(run, step, ahead):
    """Tool calls of step `ahead` are open, a rollout of it has ended, and the checkpoint before `step` is there, if any is."""
    rollouts, checkpoints = run.stage("rl").path / "rollouts", run.stage("rl").checkpoints
    if step > 1 and not (checkpoints / f"step-{step - 1:06d}").exists():
        return False
    return len(read_lines(run.stage("rl").rollouts(ahead))) >= 1 and open_tool_calls(rollouts / LEDGER.format(ahead)) >= 2


def before_rl(whole, path):
    """A copy of a run as it was before its RL, to save time."""
    run = RunDirectory(shutil.copytree(whole.path, path))
    shutil.rmtree(run.stage("rl").path)
    shutil.rmtree(run.stage("after").path)
    run.events.unlink()
    return run


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_a_step_is_played_ahead_changes_nothing(undisturbed, tmp_path, moment):
    step, ahead, words = MOMENTS[moment]
    run = before_rl(undisturbed, tmp_path / "run")
    if ahead:
        kill_when(run, lambda: is_played_ahead(run, step, ahead), *AHEAD, limit_s=LIMIT_S)
        num_ended = len(read_lines(run.stage("rl").rollouts(ahead)))
        assert 1 <= num_ended < 24
    else:
        kill_when(run, lambda: is_in_checkpoint(run), *words, *AHEAD, limit_s=LIMIT_S)
    finish(run, TINY, *AHEAD, limit_s=LIMIT_S)
    assert_equal_runs(run, undisturbed)
    assert [line["step"] for line in events(run, "resumed", "rl")] == ([1] if step != 1 else [])
    if ahead:
        ledger = read_lines(run.stage("rl").path / "rollouts" / LEDGER.format(ahead))
        assert [line["reused"] for line in ledger if line["event"] == "opened"] == [0, num_ended]


DAPO = (
    *AHEAD,
    'stages.rl.method={kind="grpo", drop_tied=true, tied_by="accuracy", refill_rounds=3}',
)
OWN_TASKS, REFILLS = 4, 12  # of a step


def test_a_kill_in_a_refill_of_a_step_that_is_played_ahead_changes_nothing(undisturbed, tmp_path):
    """DAPO's dynamic sampling and overlap together."""
    whole = before_rl(undisturbed, tmp_path / "whole")
    finish(whole, TINY, *DAPO, limit_s=LIMIT_S)
    run = before_rl(whole, tmp_path / "run")
    first = 3 * OWN_TASKS + 2 * REFILLS  # of the refills of step 3: they lie behind all own tasks, and the refills of 1 and 2

    def is_refilled_ahead():
        keys = [scored.trajectory.key for scored in read_rollouts(run.stage("rl").rollouts(3))]
        return (
            any(key.task_index >= first for key in keys)
            and read_closed(run.stage("rl").rollouts(3), lambda index: None) is None
        )

    kill_when(run, is_refilled_ahead, *DAPO, limit_s=LIMIT_S)
    finish(run, TINY, *DAPO, limit_s=LIMIT_S)
    assert_equal_runs(run, whole)
    refilled = {line["step"]: line["groups/refilled"] for line in read_lines(run.metrics) if line["stage"] == "rl"}
    assert refilled[3] > 0


def test_real_engines_sample_each_step_from_the_weights_of_the_step_before(undisturbed):
    for step, version in ((1, 0), (2, 0), (3, 1)):
        turns = [turn for each in read_rollouts(undisturbed.stage("rl").rollouts(step)) for turn in each.trajectory.turns]
        assert {turn.completion.policy_version for turn in turns} == {version}
    published = {line["step"]: line["weights"] for line in events(undisturbed, "step_finished", "rl")}
    lines = read_lines(undisturbed.stage("rl").rollouts(3))
    assert [line["weights"] for line in lines] == [{"1": published[1]}] * len(lines)
    first, *later = lines_of(undisturbed)
    assert first["policy/logprob_gap_max"] < 1e-3  # of equal weights
    assert all(line["policy/sampler_gap_nats_max"] > 1e-3 for line in later), "the policy did not move: the test proves nothing"


PARTIAL = (*AHEAD[:2], "stages.rl.async_rollouts={max_staleness=1, partial=true}")


def test_a_kill_while_rollouts_are_in_flight_over_publications_loses_and_doubles_none(undisturbed, tmp_path):
    run = before_rl(undisturbed, tmp_path / "run")
    kill_when(run, lambda: is_played_ahead(run, 2, 3), *PARTIAL, limit_s=LIMIT_S)
    finish(run, TINY, *PARTIAL, limit_s=LIMIT_S)
    lines = lines_of(run)
    for line in lines:
        rollouts = read_rollouts(run.stage("rl").rollouts(line["step"]))
        keys = [scored.trajectory.key for scored in rollouts]
        assert len(set(keys)) == len(keys) - line["rollout/dropped_too_old"]
        as_undisturbed = read_rollouts(undisturbed.stage("rl").rollouts(line["step"]))
        assert set(keys) == {scored.trajectory.key for scored in as_undisturbed}
        assert line["rollout/staleness_max"] <= 1
        for scored in rollouts:
            for completion in (turn.completion for turn in scored.trajectory.turns):
                assert sum(num for _, num in completion.spans) == len(completion.ids)
    assert len(lines) == len(lines_of(undisturbed))
