"""`kill -9` at any moment, then the same command again, ends where an undisturbed run ends: bit for bit (laws 8 and 9).

Real processes, the embedded engine, a real sandbox whose answers come after random times: no two runs have one order.
"""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from killing import events, finish, kill_when, num_steps, open_tool_calls

from scripted_runs import untimed
from strop.run_directory import RunDirectory, StageDirectory, read_json, read_lines, write_directory, write_json
from strop.stages.loop import checkpoints
from strop.stages.loop.ledger import read_rollouts

LEDGER = "step-{:06d}.ledger.jsonl"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = RunDirectory(tmp_path_factory.mktemp("undisturbed") / "run")
    finish(run)
    return run


def calls_are_open(run):
    """At least four tool calls of the second RL step are open, a rollout of it has ended, and the first step is on disk."""
    rollouts = run.stage("rl").path / "rollouts"
    if not (run.stage("rl").checkpoints / "step-000001").exists():  # written while the second step begins
        return False
    ended = read_lines(rollouts / "step-000002.jsonl")
    return len(ended) >= 1 and open_tool_calls(rollouts / LEDGER.format(2)) >= 4


def is_in_checkpoint(run):
    halves = run.stage("rl").checkpoints.glob(".step-000002.*.tmp/model/model.safetensors")
    return any(half.stat().st_size > 0 for half in halves)


def assert_equal_runs(run, other):
    """Equal in all that no clock said."""
    assert [untimed(line) for line in read_lines(run.metrics)] == [untimed(line) for line in read_lines(other.metrics)]
    assert [untimed(row) for row in read_lines(run.updates)] == [untimed(row) for row in read_lines(other.updates)]
    for stage in ("before", "after"):
        assert untimed(read_json(run.stage(stage).evaluation)) == untimed(read_json(other.stage(stage).evaluation))
    for stage in ("base", "sft", "rl"):
        mine, theirs = (each.stage(stage).model / "model.safetensors" for each in (run, other))
        assert mine.read_bytes() == theirs.read_bytes(), stage
    for step in (1, 2, 3):
        assert read_json(run.stage("rl").selection(step)) == read_json(other.stage("rl").selection(step))
        assert tokens(run, step) == tokens(other, step)


def tokens(run, step):
    rollouts = read_rollouts(run.stage("rl").rollouts(step))
    assert len({scored.trajectory.key for scored in rollouts}) == len(rollouts), "a rollout was played twice"
    return {scored.trajectory.key: scored.trajectory.ids for scored in rollouts}


def order_of_arrival(run, step):
    return [scored.trajectory.key for scored in read_rollouts(run.stage("rl").rollouts(step))]


@pytest.mark.slow
def test_a_kill_among_open_tool_calls_changes_nothing(undisturbed, tmp_path):
    run = RunDirectory(shutil.copytree(undisturbed.path, tmp_path / "run"))  # up to its RL, to save time
    shutil.rmtree(run.stage("rl").path)
    shutil.rmtree(run.stage("after").path)
    run.events.unlink()
    family = kill_when(run, lambda: calls_are_open(run))
    assert family, "the sandbox was running"
    ledger = run.stage("rl").path / "rollouts" / LEDGER.format(2)
    assert open_tool_calls(ledger) >= 4
    num_started = len({json.dumps(line["key"]) for line in read_lines(ledger) if line["event"] == "started"})
    assert num_started == 24  # conversations in the batch
    num_ended = len(read_lines(run.stage("rl").rollouts(2)))
    assert 1 <= num_ended < 24

    finish(run)

    assert_equal_runs(run, undisturbed)
    assert [line["step"] for line in events(run, "resumed", "rl")] == [1]
    assert [line["reused"] for line in read_lines(ledger) if line["event"] == "opened"] == [0, num_ended]
    assert any(order_of_arrival(run, step) != order_of_arrival(undisturbed, step) for step in (1, 2, 3))
    calls = sum(line["rollout/tool_calls_mean"] * 24 for line in read_lines(run.metrics) if line["stage"] == "rl")
    assert calls >= 24, "hardly any rollout called a tool: the test proves nothing"


@pytest.mark.slow
def test_a_run_that_is_killed_in_every_stage_ends_the_same(undisturbed, tmp_path):
    run = RunDirectory(tmp_path / "run")
    for is_time in (
        lambda: events(run, "stage_started", "base"),
        lambda: num_steps(run, "sft") == 12,  # before its first checkpoint
        lambda: num_steps(run, "sft") >= 40,
        lambda: 2 <= len(read_lines(run.stage("before").rollouts(0))) < 16,
        lambda: calls_are_open(run),
    ):
        kill_when(run, is_time)
    kill_when(run, lambda: is_in_checkpoint(run), "hold")
    assert [line["step"] for line in events(run, "checkpoint_started", "rl")][-1] == 2
    assert 2 not in [line["step"] for line in events(run, "checkpoint_finished", "rl")]
    [half] = run.path.glob("stages/*/checkpoints/.step-*.tmp")
    kill_when(run, lambda: run.stage("rl").selection(3).exists())
    finish(run)
    warned = [line["text"] for line in read_lines(run.events) if line["event"] == "warning"]
    [warning] = [text for text in warned if "half written" in text]
    assert warning.startswith(f"{half.with_name(half.name.split('.')[1])} was half written")
    assert "the checkpoint before it is used" in warning
    assert_equal_runs(run, undisturbed)
    assert not list(run.path.rglob(".*.tmp"))


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("is_new_there", [False, True])
def test_a_kill_while_the_best_policy_is_replaced_leaves_the_old_one_or_the_new_one(tmp_path, monkeypatch, is_new_there):
    context, best = FakeContext(tmp_path / "stages" / "rl"), tmp_path / "stages" / "rl" / "best"
    write_directory(best, lambda directory: write_json(directory / "validation.json", {"step": 1}))
    rename = Path.rename

    def fall(path, target):
        if Path(target) == best:
            if is_new_there:
                rename(path, target)
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fall)
        with pytest.raises(Killed):
            write_directory(best, lambda directory: write_json(directory / "validation.json", {"step": 2}))
    assert best.exists() == is_new_there
    assert asyncio.run(checkpoints.resume(context, None)) == 0
    assert [path.name for path in best.parent.iterdir()] == ["best"]
    assert read_json(best / "validation.json") == {"step": 2 if is_new_there else 1}
    write_directory(best, lambda directory: write_json(directory / "validation.json", {"step": 3}))
    assert read_json(best / "validation.json") == {"step": 3}
    assert [path.name for path in best.parent.iterdir()] == ["best"]


def test_a_checkpoint_that_is_half_written_is_named(tmp_path):
    context = FakeContext(tmp_path / "rl")
    half = context.directory.checkpoints / ".step-000002.0a1b.tmp" / "model"
    half.mkdir(parents=True)
    assert asyncio.run(checkpoints.resume(context, None)) == 0
    [warning] = context.warnings
    assert warning.startswith(f"{context.directory.checkpoint(2)} was half written")
    assert not half.parent.exists()
    assert asyncio.run(checkpoints.resume(context, None)) == 0
    assert len(context.warnings) == 1


class FakeContext:
    """What `resume` asks of a stage's context."""

    def __init__(self, path):
        self.directory, self.warnings = StageDirectory(path), []

    def warn(self, message):
        self.warnings.append(message)
