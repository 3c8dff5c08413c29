"""Checkpoints are written while the stage goes on: whole or not at all, one at a time, and what goes wrong is told."""

import errno
import time

import pytest

from scripted_runs import Watching, assert_same_training, make_recipe, run_recipe
from strop.errors import CannotLearnError, RunError
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop import checkpoints
from strop.training.weights import Snapshot

WRITE = Snapshot.write
LIMIT_S = 20


def wait_for(is_time):
    deadline = time.monotonic() + LIMIT_S
    while not is_time():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def is_of(directory, stage, step):
    return f"/{stage}/" in str(directory) and f"step-{step:06d}" in directory.name


def order_of(run, *kinds):
    return [
        (line["event"], line["step"]) for line in read_lines(run.events) if line["stage"] == "rl" and line["event"] in kinds
    ]


def test_the_next_step_is_trained_on_while_a_checkpoint_is_written_that_holds_its_own_step(scripted_run, tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "run")

    def write(snapshot, directory):
        if is_of(directory, "rl", 1):
            wait_for(lambda: ("step_finished", 2) in order_of(run, "step_finished"))
        WRITE(snapshot, directory)

    monkeypatch.setattr(Snapshot, "write", write)
    run_recipe(run.path)
    assert order_of(run, "step_finished", "checkpoint_finished") == [
        ("step_finished", 1),
        ("step_finished", 2),
        ("checkpoint_finished", 1),
    ]
    assert_same_training(run, scripted_run.run)
    assert checksums_of(run) == checksums_of(scripted_run.run)


def checksums_of(run):
    """Of the checkpoint of step 1; the library puts the path of a checkpoint into its metadata."""
    checksums = read_json(run.stage("rl").checkpoint(1) / "checksums.json")
    assert {"model/model.safetensors", "state/__0_0.distcp", "trainer.json"} <= checksums.keys()
    return {name: checksum for name, checksum in checksums.items() if name != "state/.metadata"}


def test_a_checkpoint_waits_for_the_one_before_it(tmp_path, monkeypatch):
    running = []

    def write(snapshot, directory):
        assert not running, "two are written at once"
        running.append(directory)
        time.sleep(0.1)
        WRITE(snapshot, directory)
        running.remove(directory)

    monkeypatch.setattr(Snapshot, "write", write)
    run = run_recipe(tmp_path / "run", make_recipe(steps=4, keep_checkpoints=2)).run
    assert sorted(path.name for path in run.stage("rl").checkpoints.iterdir()) == ["step-000002", "step-000003"]


def test_a_full_disk_in_the_background_is_told_with_its_place_and_the_run_goes_on_from_the_one_before(tmp_path, monkeypatch):
    def write(snapshot, directory):
        WRITE(snapshot, directory)
        if is_of(directory, "rl", 2):
            raise OSError(errno.ENOSPC, "No space left on device")

    recipe = make_recipe(steps=4)
    whole = run_recipe(tmp_path / "whole", recipe).run
    finished = [path.name for path in whole.stage("rl").checkpoints.iterdir()]
    assert finished == ["step-000003"], "a finished stage keeps only its last checkpoint by default"
    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "write", write)
        with pytest.raises(RunError, match=r"rl/checkpoints/step-000002: cannot be written: No space left on device"):
            run_recipe(tmp_path / "run", recipe)
    stage = RunDirectory(tmp_path / "run").stage("rl")
    assert [path.name for path in stage.checkpoints.iterdir()] == ["step-000001"]
    again = run_recipe(tmp_path / "run", recipe).run
    assert_same_training(again, whole)


def test_the_last_checkpoint_before_giving_up_is_whole_although_the_writer_is_slow(tmp_path, monkeypatch):
    def write(snapshot, directory):
        time.sleep(0.3)
        WRITE(snapshot, directory)

    monkeypatch.setattr(Snapshot, "write", write)
    with pytest.raises(CannotLearnError, match="2 steps in a row"):
        run_recipe(
            tmp_path / "run",
            make_recipe(steps=5, give_up_after=2, checkpoint_every=9),
            say=lambda conversation, draw: "no answer",
            progress=Watching(),
        )
    assert checkpoints.latest_step(RunDirectory(tmp_path / "run").stage("rl")) == 2
