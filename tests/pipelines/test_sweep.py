"""`strop sweep`: what it runs, shares, skips and refuses. Runs are doubles; test_sweep_for_real.py has real ones."""

import io
import json
import signal

import pytest
from fake_train import FakeTrain, figures, made_by
from rich.console import Console
from typer.testing import CliRunner

import strop.pipeline.sweep
from scripted_runs import RECIPE
from strop.cli import app
from strop.errors import RunError
from strop.pipeline.sweep import run_sweep
from strop.pipeline.sweep_file import load_sweep, toml_value
from strop.reports.sweep import State, SweepConsole
from strop.run_directory import RunDirectory, read_lines
from strop.runs.manifest import locked

LR = "stages.rl.trainer.optimizer.lr"
TWO_ARMS = {"seeds": [0, 1], "grid": {LR: [1e-2, 1e-3]}}


class Interrupted(SweepConsole):
    def under_way(self, runs):
        raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(strop.pipeline.sweep, "_LOOK_S", 0.001)


@pytest.fixture
def write_sweep(tmp_path):
    """Writes a recipe and a sweep of it, and returns the sweep's path."""

    def write(content, name="lr"):
        (tmp_path / "recipe.toml").write_text(as_toml(RECIPE))
        path = tmp_path / f"{name}.toml"
        path.write_text(as_toml({"recipe": "recipe.toml", **content}))
        return path

    return write


def as_toml(tree):
    return "".join(f"{json.dumps(key)} = {toml_value(value)}\n" for key, value in tree.items())


@pytest.fixture
def sweep(write_sweep, tmp_path):
    """Runs a sweep on doubles: content, ... -> (log, printed lines)."""

    def run(content, *, train=None, jobs=1, console=SweepConsole, to="out"):
        output = io.StringIO()
        progress, start = console(Console(file=output)), train or FakeTrain()
        log = run_sweep(load_sweep(write_sweep(content)), tmp_path / to, jobs=jobs, progress=progress, start=start)
        return log, output.getvalue().splitlines()

    return run


@pytest.fixture
def run_of(tmp_path):
    return lambda name: RunDirectory(tmp_path / "out" / name)


def test_every_arm_runs_with_every_seed_and_the_figures_are_those_of_its_runs(sweep, tmp_path):
    train = FakeTrain()
    log, _ = sweep(TWO_ARMS, train=train)
    assert train.started == ["lr-0.01-seed-0", "lr-0.001-seed-0", "lr-0.01-seed-1", "lr-0.001-seed-1"]
    assert train.most_at_once == 1
    assert not log.failures
    there = figures(tmp_path / "out")
    high, low = there["arms"]["lr-0.01"], there["arms"]["lr-0.001"]
    assert (high["mean"], high["min"], high["max"], high["num_seeds"]) == (pytest.approx(0.55), 0.5, 0.6, 2)
    assert high["high"] - high["mean"] == pytest.approx(12.7062 * 0.1 / 2)  # t s / √n, s = 0.1 / √2
    assert low["above"]["arm"] == "lr-0.01"
    assert (low["above"]["mean"], low["above"]["low"]) == (pytest.approx(-0.2), pytest.approx(-0.2))
    assert {(run["time_s"], run["tokens"]) for run in there["runs"]} == {(6.0, 200), (8.0, 200)}
    assert there["curves"]["rollout/accuracy"]["lr-0.01"]["1"] == [[1, 4.0, 0.1], [2, 8.0, 0.2]]


def test_the_same_command_again_runs_nothing(sweep):
    sweep(TWO_ARMS)
    train = FakeTrain()
    log, printed = sweep(TWO_ARMS, train=train)
    assert train.started == []
    assert printed[0] == "4 runs, 4 done before"
    assert {run.state for run in log.runs} == {State.DONE}


def test_arms_and_seeds_may_be_added(sweep):
    sweep(TWO_ARMS)
    train = FakeTrain()
    sweep({"seeds": [0, 1, 2], "grid": {LR: [1e-2, 1e-3, 1e-4]}}, train=train)
    assert sorted(train.started) == [
        "lr-0.0001-seed-0",
        "lr-0.0001-seed-1",
        "lr-0.0001-seed-2",
        "lr-0.001-seed-2",
        "lr-0.01-seed-2",
    ]


def test_arms_of_one_seed_share_the_stages_that_they_have_in_common(sweep, run_of):
    train = FakeTrain()
    _, printed = sweep(TWO_ARMS, train=train)
    assert [run for run, stage in train.stages if stage == "sft"] == ["lr-0.01-seed-0", "lr-0.01-seed-1"]
    assert [run for run, stage in train.stages if stage == "rl"] == train.started
    assert made_by(run_of("lr-0.001-seed-1"), "sft") == "lr-0.01-seed-1"
    assert made_by(run_of("lr-0.001-seed-1"), "rl") == "lr-0.001-seed-1"
    assert [line for line in printed if "starts" in line] == [
        "  · lr-0.01-seed-0 starts",
        "  · lr-0.001-seed-0 starts, from the first stages of lr-0.01-seed-0",
        "  · lr-0.01-seed-1 starts",
        "  · lr-0.001-seed-1 starts, from the first stages of lr-0.01-seed-1",
    ]
    events = [line["stage"] for line in read_lines(run_of("lr-0.001-seed-1").events)]
    assert events == ["base", "sft", "before", "rl", "after"]
    assert {line["step"] for line in read_lines(run_of("lr-0.001-seed-1").metrics)} == {1, 2}


def test_an_arm_makes_what_it_changes_and_what_stands_on_it(sweep, run_of):
    train = FakeTrain()
    sweep(
        {"arms": {"long": {"stages.sft.steps": 2}, "short": {"stages.sft.steps": 1}, "again": {"stages.rl.steps": 1}}},
        train=train,
    )
    assert [run for run, stage in train.stages if stage == "base"] == ["long-seed-0"]
    assert [run for run, stage in train.stages if stage == "sft"] == ["long-seed-0", "short-seed-0"]
    assert made_by(run_of("again-seed-0"), "sft") == "long-seed-0"


def test_of_several_at_once_one_waits_for_the_stages_that_another_makes(sweep):
    train = FakeTrain()
    sweep({"seeds": [0], "grid": {LR: [1e-2, 1e-3, 1e-4]}}, train=train, jobs=3)
    assert [run for run, stage in train.stages if stage == "sft"] == ["lr-0.01-seed-0"]
    assert train.most_at_once >= 2
    assert train.stages.index(("lr-0.01-seed-0", "before")) < train.stages.index(("lr-0.001-seed-0", "rl"))


def test_a_failing_arm_is_named_and_the_others_go_on(sweep, tmp_path):
    train = FakeTrain(fails={"lr-0.001-seed-0": "rl"})
    log, printed = sweep(TWO_ARMS, train=train)
    assert len(train.started) == 4
    assert [run.name for run in log.failures] == ["lr-0.001-seed-0"]
    failure = "stages.rl: 3 steps in a row could not learn. (exit code 2)"
    assert f"failed: lr-0.001-seed-0: {failure}" in printed
    page = (tmp_path / "out" / "sweep.html").read_text()
    assert failure in page
    assert "3 of 4 runs are finished" in page
    there = figures(tmp_path / "out")
    assert there["arms"]["lr-0.001"]["num_seeds"] == 1
    assert {run["state"] for run in there["runs"]} == {"done", "failed"}


def test_the_same_command_tries_a_failed_arm_again_from_where_it_was(sweep):
    sweep(TWO_ARMS, train=FakeTrain(fails={"lr-0.01-seed-1": "rl"}))
    train = FakeTrain()
    log, _ = sweep(TWO_ARMS, train=train)
    assert train.started == ["lr-0.01-seed-1"]
    assert train.stages == [("lr-0.01-seed-1", "rl"), ("lr-0.01-seed-1", "after")]
    assert not log.failures


def test_an_interrupt_ends_the_runs_that_are_under_way_and_leaves_a_page(sweep, tmp_path):
    train = FakeTrain(hangs=True)
    with pytest.raises(KeyboardInterrupt):
        sweep(TWO_ARMS, train=train, jobs=2, console=Interrupted)
    assert train.signals == [("lr-0.01-seed-0", signal.SIGINT), ("lr-0.01-seed-1", signal.SIGINT)]
    assert "0 of 4 runs are finished" in (tmp_path / "out" / "sweep.html").read_text()
    train = FakeTrain()
    sweep(TWO_ARMS, train=train)
    assert len(train.started) == 4


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (TWO_ARMS | {"seeds": [0]}, "seeds: 1 there, not asked for"),
        (TWO_ARMS | {"grid": {LR: [1e-2]}}, "arms: 'lr-0.001' there, not asked for"),
        (TWO_ARMS | {"set": {"stages.rl.steps": 1}}, "stages.rl.steps: 2 there, 1 here"),
    ],
)
def test_the_directory_of_another_sweep_is_refused_by_what_differs(sweep, other, difference):
    sweep(TWO_ARMS)
    train = FakeTrain()
    with pytest.raises(RunError, match=difference):
        sweep(other, train=train)
    assert train.started == []


def test_a_directory_that_is_not_a_sweeps_is_refused(sweep, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("")
    with pytest.raises(RunError, match=r"not empty, and not a sweep directory"):
        sweep(TWO_ARMS)


def test_one_sweep_at_a_time_in_a_directory(sweep, tmp_path):
    (tmp_path / "out").mkdir()
    with locked(RunDirectory(tmp_path / "out")), pytest.raises(RunError, match="another strop is running there"):
        sweep(TWO_ARMS)


def test_runs_at_once_that_would_each_take_all_cores_are_warned_of(sweep, monkeypatch):
    _, printed = sweep(TWO_ARMS, jobs=2)
    assert not [line for line in printed if "threads" in line]  # the recipe sets threads = 1
    monkeypatch.delitem(RECIPE, "threads")
    _, printed = sweep({**TWO_ARMS, "seeds": [5]}, jobs=2, to="other")
    assert "[set] threads = 1" in printed[1]


def test_the_plan_names_arms_and_what_they_share_and_writes_nothing(write_sweep, tmp_path):
    path = write_sweep(TWO_ARMS)
    result = CliRunner().invoke(app, ["sweep", str(path), "--dry-run", "--run-dir", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert f"{LR}=0.001" in result.output
    shown = " ".join(result.output.split())
    assert "4 runs to go" in shown
    assert "plus base, sft, before, shared by the arms of a seed" in shown
    assert not (tmp_path / "out").exists()
