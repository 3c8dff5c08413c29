"""Rollouts of steps that no try plays again are compressed; of old steps a sample is kept."""

import gzip
import json
import shutil
from types import SimpleNamespace

import pytest

from scripted_runs import assert_same_training, make_recipe, run_recipe
from strop.analysis.read import read_analysis
from strop.errors import RunError
from strop.reports.page import write_report
from strop.run_directory import LineWriter, RunDirectory, iter_lines, pack, packed, read_json, read_lines, write_json
from strop.stages.loop import checkpoints
from strop.stages.loop.checkpoints import CheckpointWriter
from strop.stages.loop.ledger import read_rollouts, settle_rollouts
from strop.training.config import TrainerConfig
from strop.types import RolloutKey


def names_in(stage, pattern="step-*.jsonl*"):
    return sorted(path.name for path in stage.rollouts(0).parent.glob(pattern))


def test_a_finished_run_holds_its_rollouts_compressed_and_all_of_them(scripted_run):
    stage = scripted_run.run.stage("rl")
    steps = [line["step"] for line in read_lines(scripted_run.run.metrics) if line["stage"] == "rl"]
    assert names_in(stage) == sorted(f"step-{step:06d}{kind}.jsonl.gz" for step in steps for kind in ("", ".ledger"))
    assert names_in(scripted_run.run.stage("before")) == ["step-000000.jsonl.gz", "step-000000.ledger.jsonl.gz"]
    for step in steps:
        lines = gzip.decompress(packed(stage.rollouts(step)).read_bytes()).splitlines()
        assert [json.loads(line) for line in lines] == read_lines(stage.rollouts(step))
        in_file = [scored.trajectory.key for scored in read_rollouts(stage.rollouts(step))]
        groups = read_json(stage.selection(step))["groups"]
        assert {RolloutKey(**each["key"]) for group in groups for each in group["rollouts"]} <= set(in_file)


def test_steps_before_the_oldest_checkpoint_are_compressed_while_the_stage_goes_on(tmp_path, monkeypatch):
    seen = {}

    def settle(directory, *, upto, keep):
        problems = [*settle_rollouts(directory, upto=upto, keep=keep)]
        kept = sorted(int(path.name[5:]) for path in directory.checkpoints.iterdir() if path.name.startswith("step-"))
        plain = [name for name in names_in(directory) if name.endswith(".jsonl")]
        seen[upto] = (kept, sorted({int(name[5:11]) for name in plain}))
        return problems

    monkeypatch.setattr("strop.stages.loop.steps.settle_rollouts", settle)
    run_recipe(tmp_path / "run", make_recipe(steps=4, keep_checkpoints=1))
    for upto, (kept, plain) in seen.items():
        if upto < 4:
            assert upto == min(kept)
        assert all(step > upto for step in plain)
    assert set(seen) >= {1, 4}


@pytest.fixture
def old(tmp_path):
    """Three steps of three tasks with two rollouts each, of which a sample has the first task."""
    stage = RunDirectory(tmp_path / "run").stage("rl")
    for step in (1, 2, 3):
        rollouts, ledger = LineWriter(stage.rollouts(step)), LineWriter(stage.rollouts(step).with_suffix(".ledger.jsonl"))
        groups = []
        for task in range(3 * step, 3 * step + 3):
            keys = [{"task_index": task, "attempt": attempt, "branch": 0} for attempt in range(2)]
            for key in keys:
                rollouts.append({"rollout": {"trajectory": {"key": key}}})
                ledger.append({"event": "finished", "key": key})
            groups.append({"task_index": task, "rollouts": [{"key": key, "reward": 1.0, "entropies": [0.5]} for key in keys]})
        write_json(stage.selection(step), {"step": step, "groups": groups})
        rollouts.close()
        ledger.close()
    return stage


def tasks_of(stage, step):
    return sorted({line["rollout"]["trajectory"]["key"]["task_index"] for line in read_lines(stage.rollouts(step))})


def test_of_old_steps_the_first_tasks_are_kept_and_what_is_said_of_all(old, monkeypatch):
    monkeypatch.setattr("strop.stages.loop.ledger.SAMPLE_TASKS", 1)
    assert not [*settle_rollouts(old, upto=3, keep=2)]
    assert names_in(old, "step-000001*") == ["step-000001.jsonl.gz", "step-000001.selection.json"]
    assert [tasks_of(old, step) for step in (1, 2, 3)] == [[3], [6, 7, 8], [9, 10, 11]]
    groups = read_json(old.selection(1))["groups"]
    assert [["entropies" in each for each in group["rollouts"]] for group in groups] == [[True] * 2, [False] * 2, [False] * 2]
    assert [each["reward"] for group in groups for each in group["rollouts"]] == [1.0] * 6
    before = {path: path.read_bytes() for path in old.path.rglob("*") if path.is_file()}
    assert not [*settle_rollouts(old, upto=3, keep=2)]
    assert before == {path: path.read_bytes() for path in old.path.rglob("*") if path.is_file()}


def test_a_step_that_may_be_played_again_is_neither_compressed_nor_sampled(old):
    assert not [*settle_rollouts(old, upto=0, keep=1)]
    assert not names_in(old, "*.gz")
    assert tasks_of(old, 1) == [3, 4, 5]


def test_a_kill_while_a_file_is_compressed_loses_nothing(old, monkeypatch):
    lines = read_lines(old.rollouts(1))
    monkeypatch.setattr("gzip.GzipFile.close", lambda file: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pack(old.rollouts(1))
    monkeypatch.undo()
    assert read_lines(old.rollouts(1)) == lines
    packed(old.rollouts(1)).write_bytes(b"half of it")  # the kill came after the new name, before the old one went
    assert read_lines(old.rollouts(1)) == lines
    pack(old.rollouts(1))
    assert read_lines(old.rollouts(1)) == lines


def test_a_compressed_file_that_is_written_again_is_unpacked(old):
    lines = read_lines(old.rollouts(1))
    pack(old.rollouts(1))
    writer = LineWriter(old.rollouts(1))
    writer.append({"one": "more"})
    writer.close()
    assert read_lines(old.rollouts(1)) == [*lines, {"one": "more"}]


CUT = gzip.compress(b'{"a": 1}\n', mtime=0)[:-12]


@pytest.mark.parametrize("content", [b"no gzip", CUT, b"\x1f\x8b\x08\x00" + b"\x07" * 40], ids=["none", "cut", "garbled"])
def test_a_damaged_file_is_one_error(tmp_path, content):
    path = tmp_path / "step-000001.jsonl"
    packed(path).write_bytes(content)
    with pytest.raises(RunError, match=r"step-000001\.jsonl: cannot be read: .*Restore it"):
        list(iter_lines(path))


@pytest.mark.parametrize("harm", ["cut", "gone", "no selection", "empty"])
def test_an_old_file_that_is_damaged_is_told_and_left_and_nothing_else_depends_on_it(old, harm):
    assert not [*settle_rollouts(old, upto=3, keep=3)]
    path = packed(old.rollouts(1))
    match harm:
        case "cut":
            path.write_bytes(path.read_bytes()[:-12])
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
        case "no selection":
            old.selection(1).unlink()
    problems = [*settle_rollouts(old, upto=3, keep=2)]
    assert [each[:44] for each in problems] == ["the rollouts of step 1 are left as they are:"] * (harm in ("cut", "empty"))
    assert path.exists() is (harm != "gone")
    assert not [*settle_rollouts(old, upto=3, keep=2)]


def test_report_and_analysis_read_samples(scripted_run, tmp_path, monkeypatch):
    monkeypatch.setattr("strop.stages.loop.ledger.SAMPLE_TASKS", 1)
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(scripted_run.run.path, run.path)
    whole = len(read_rollouts(run.stage("rl").rollouts(1)))
    assert not [*settle_rollouts(run.stage("rl"), upto=3, keep=1)]
    assert 0 < len(read_rollouts(run.stage("rl").rollouts(1))) < whole
    assert "rollouts" in write_report(run).read_text(encoding="utf-8")
    assert read_analysis(run, stage="rl", steps=None) is not None


def test_what_is_kept_changes_no_result(scripted_run, tmp_path, monkeypatch):
    monkeypatch.setattr("strop.stages.loop.ledger.SAMPLE_TASKS", 1)
    sampled = run_recipe(tmp_path / "run", make_recipe(keep_rollouts=1)).run
    assert_same_training(sampled, scripted_run.run)
    first, whole = (read_rollouts(run.stage("rl").rollouts(1)) for run in (sampled, scripted_run.run))
    assert 0 < len(first) < len(whole)


def test_half_an_hour_of_training_ends_with_a_checkpoint(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now)
    stage = SimpleNamespace(checkpoint_every=100, keep_checkpoints=2, trainer=TrainerConfig())
    writer = CheckpointWriter(SimpleNamespace(), SimpleNamespace(), stage)
    assert [writer.is_due(step) for step in (1, 99, 100, 101)] == [False, False, True, False]
    now += 1801
    assert writer.is_due(1)
