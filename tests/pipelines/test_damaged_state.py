"""A checkpoint that is not as it was written, and an update that is not finite: told, kept for a look, and survived."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripted_runs import RECIPE, Watching, assert_same_training, falling, make_recipe, recipe_of, run_recipe
from strop.analysis.read import read_analysis
from strop.errors import CannotLearnError, RunError
from strop.recipe import load
from strop.reports.page import write_report
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop import checkpoints
from strop.training.optimizer import WeightsLost

TROUBLES = Path(__file__).resolve().parents[2] / "docs" / "guides" / "troubleshooting.md"


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "a flipped bit": ("model/model.safetensors", _flip_a_bit, "model/model.safetensors is not as it was written"),
    "half a file": ("state/__0_0.distcp", _halve, "state/__0_0.distcp is not as it was written"),
    "a missing file": ("trainer.json", lambda path: path.unlink(), "trainer.json is missing"),
    "no checksums": ("checksums.json", lambda path: path.unlink(), "checksums.json is missing or not valid JSON. It is now"),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run of four steps that was stopped after the checkpoint of step 3, and the same run undisturbed."""
    directory, recipe = tmp_path_factory.mktemp("damaged"), make_recipe(steps=4)
    with falling("rl", after=3):
        run_recipe(directory / "interrupted", recipe)
    return directory / "interrupted", run_recipe(directory / "whole", recipe).run, recipe


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_it_used(interrupted, tmp_path, damage):
    stopped, whole, recipe = interrupted
    shutil.copytree(stopped, tmp_path / "run")
    stage = RunDirectory(tmp_path / "run").stage("rl")
    name, spoil, words = DAMAGES[damage]
    spoil(stage.checkpoint(3) / name)
    progress = Watching()
    again = run_recipe(tmp_path / "run", recipe, progress=progress).run
    [warning] = [warning for warning in progress.warnings if "step-000003" in warning]
    assert words in warning
    assert "the checkpoint before it is used" in warning
    assert (stage.checkpoints / "step-000003.damaged").is_dir()
    [told] = [row for row in TROUBLES.read_text().splitlines() if row.startswith("| `the checkpoint before it is used` |")]
    assert "set aside as `step-<k>.damaged`. The run goes on by itself from the one before" in told
    events = [line for line in read_lines(again.events) if line["event"] == "resumed" and line["stage"] == "rl"]
    assert [event["step"] for event in events] == [2]
    assert_same_training(again, whole)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_and_says_so(interrupted, tmp_path):
    stopped, whole, _ = interrupted
    shutil.copytree(stopped, tmp_path / "run")
    progress = Watching()
    recipe = make_recipe(steps=4, trainer={"optimizer": {"lr": 1e-2}, "workers": 2})
    again = run_recipe(tmp_path / "run", recipe, progress=progress).run
    assert progress.warnings[0] == (
        "stages.rl.trainer.workers is 2, and was 0 when the stage began: the result is equal up to rounding."
    )
    assert [line["step"] for line in read_lines(again.events) if line["event"] == "resumed" and line["stage"] == "rl"] == [3]
    mine, theirs = (load_file(run.stage("rl").model / "model.safetensors") for run in (again, whole))
    began = load_file(whole.stage("sft").model / "model.safetensors")
    for name, weights in theirs.items():
        moved = (weights - began[name]).norm()
        assert (mine[name] - weights).norm() <= 1e-3 * moved, name


def test_weights_that_an_update_made_infinite_are_never_saved_and_the_run_goes_on_before_it(tmp_path, monkeypatch):
    lr = 3e-3  # of RL alone
    recipe = make_recipe(steps=4, checkpoint_every=1, keep_checkpoints=2, trainer={"optimizer": {"lr": lr}})
    whole = run_recipe(tmp_path / "whole", recipe).run
    step = torch.optim.AdamW.step
    made = []

    def overflow(optimizer):
        step(optimizer)
        if optimizer.param_groups[0]["lr"] == lr:
            made.append(optimizer)
        if len(made) == 3:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].view(-1)[7] = torch.inf

    run = RunDirectory(tmp_path / "run")
    stage = run.stage("rl")
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", overflow)
        with pytest.raises(WeightsLost, match=r"^update 3 under trainer\.optimizer made weights that are not finite"):
            run_recipe(run.path, recipe)
    assert sorted(path.name for path in stage.checkpoints.iterdir()) == ["step-000001", "step-000002"]
    for kept in stage.checkpoints.iterdir():
        assert all(tensor.isfinite().all() for tensor in load_file(kept / "model" / "model.safetensors").values())
    assert [line["step"] for line in read_lines(run.metrics) if line["stage"] == "rl"] == [1, 2]
    assert not stage.model.exists()

    run_recipe(run.path, recipe)
    assert [line["step"] for line in read_lines(run.events) if line["event"] == "resumed" and line["stage"] == "rl"] == [2]
    mine, theirs = (each.stage("rl").model / "model.safetensors" for each in (run, whole))
    assert mine.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        ("grpo", [1]),  # the second step came to nothing
        ({"kind": "ppo", "kl_coefficient": 0.01}, [1, 2]),  # the critic learnt in it
    ],
    ids=["grpo", "ppo"],
)
def test_updates_that_are_not_finite_after_one_of_their_step_leave_the_state_of_that_step_saved(
    tmp_path, method, steps, monkeypatch
):
    monkeypatch.setattr("strop.training.optimizer.MAX_SKIPPED", 2)
    settings = {"optimizer": {"lr": 1e36}}
    recipe = make_recipe(method=method, steps=3, epochs=3, checkpoint_every=9, trainer=settings)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(CannotLearnError, match="2 updates in a row were skipped"):
        run_recipe(run.path, recipe)
    # The first update was made, the second skipped, the third skipped and one too many.
    assert checkpoints.latest_step(run.stage("rl")) == 1
    counters = read_json(run.stage("rl").checkpoint(1) / "trainer.json")
    assert (counters["num_updates"], counters["num_skipped"]) == (1, 2)
    assert [line["step"] for line in read_lines(run.metrics) if line["stage"] == "rl"] == [1]
    assert [row["update/skipped"] for row in read_lines(run.updates) if row["role"] == "policy"] == [0, 1]
    with pytest.raises(CannotLearnError, match=r"^stages\.rl, step 2: 3 updates in a row were skipped"):
        run_recipe(run.path, recipe)
    assert checkpoints.latest_step(run.stage("rl")) == steps[-1]
    assert [line["step"] for line in read_lines(run.metrics) if line["stage"] == "rl"] == steps


def test_a_critic_that_was_updated_is_not_saved_as_that_of_the_step_before(tmp_path, monkeypatch):
    """Its update is made, then the policy gives up: the state is no longer that of the last step."""
    monkeypatch.setattr("strop.training.optimizer.MAX_SKIPPED", 1)
    critic = {"optimizer": {"lr": 1e-3}}
    settings = {"optimizer": {"lr": 1e36}, "critic": critic}
    recipe = make_recipe(
        method={"kind": "ppo", "kl_coefficient": 0.0}, steps=3, checkpoint_every=9, give_up_after=9, trainer=settings
    )
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(CannotLearnError, match="1 updates in a row were skipped"):
        run_recipe(run.path, recipe)
    stage = run.stage("rl")
    assert checkpoints.latest_step(stage) == 2
    counters = read_json(stage.checkpoint(2) / "trainer.json")
    assert (counters["num_updates"], counters["critic"]["num_updates"]) == (1, 2)


def test_batches_of_updates_that_are_not_finite_are_kept_and_the_run_stops(tmp_path):
    sft = RECIPE["stages"]["sft"] | {"steps": 12, "trainer": {"optimizer": {"lr": 1e36}}}
    recipe = recipe_of({"base": RECIPE["stages"]["base"], "sft": sft})
    progress = Watching()
    with pytest.raises(CannotLearnError, match=r"^stages\.sft, step 4: 3 updates in a row were skipped"):
        run_recipe(tmp_path / "run", recipe, progress=progress)
    stage = RunDirectory(tmp_path / "run").stage("sft")
    lines = [line for line in read_lines(RunDirectory(tmp_path / "run").metrics) if line["stage"] == "sft"]
    assert [(line["step"], line["update/skipped"]) for line in lines] == [(1, 0.0), (2, 1.0), (3, 1.0)]
    assert ["sft/loss" in line for line in lines] == [True, False, False]
    assert checkpoints.latest_step(stage) == 3  # after one update that went wrong and two that were skipped
    kept = sorted(stage.skipped.glob("*.pt"))
    assert len(kept) == 3
    assert all(any(str(path) in warning for warning in progress.warnings) for path in kept)
    batch = torch.load(kept[0], weights_only=True)
    assert batch["ids"].shape == batch["loss_mask"].shape == batch["loss_weights"].shape
    assert batch["loss_mask"].any()


def test_expert_iteration_whose_updates_are_not_finite_stops_with_its_state_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("strop.training.optimizer.MAX_SKIPPED", 2)
    expert = {"kind": "expert_iteration", "init": "base", "steps": 4, "tasks_per_step": 4, "group_size": 4, "batch_size": 16}
    expert |= {"checkpoint_every": 9, "trainer": {"optimizer": {"lr": 1e36}}}
    recipe = recipe_of({"base": RECIPE["stages"]["base"], "expert": expert})
    progress = Watching()
    with pytest.raises(CannotLearnError, match="2 updates in a row were skipped"):
        run_recipe(tmp_path / "run", recipe, progress=progress)
    stage = RunDirectory(tmp_path / "run").stage("expert")
    assert checkpoints.latest_step(stage) == 2  # one update a step: the first makes huge weights, the next is skipped
    assert [path.name for path in sorted(stage.skipped.glob("*.pt"))] == ["step-000002-1.pt", "step-000003-2.pt"]
    assert sum("Its batch is in" in warning for warning in progress.warnings) == 2


@pytest.mark.parametrize(
    ("file", "content", "read"),
    [
        ("manifest.json", "{}", load.recipe_of),
        ("stages/rl/rollouts/step-000001.jsonl", "{}\n", write_report),
        ("stages/after/eval/result.json", "[]", read_analysis),
    ],
)
def test_a_run_with_a_damaged_file_is_named_by_what_reads_it(scripted_run, tmp_path, file, content, read):
    run = RunDirectory(shutil.copytree(scripted_run.run.path, tmp_path / "run"))
    (run.path / file).write_text(content)
    with pytest.raises(RunError, match=f"{run.path}: a file is damaged"):
        read(run)
