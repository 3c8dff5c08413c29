"""`strop sweep`: what it runs, shares, skips, survives and refuses. Runs are doubles; test_sweep_for_real.py has real ones."""

import json
import signal

import pytest
from fake_train import FakeTrain, figures, made_by
from typer.testing import CliRunner

from scripted_runs import RECIPE
from strop.cli import app
from strop.errors import RunError
from strop.pipelines import children
from strop.pipelines.claim import alone_in
from strop.pipelines.sweep import run_sweep
from strop.pipelines.sweep_file import load_sweep, toml_value
from strop.reports.sweep_log import State
from strop.runs import RunDirectory, read_json, read_lines

LR = "stages.rl.trainer.optimizer.lr"
TWO_ARMS = {"seeds": [0, 1], "grid": {LR: [1e-2, 1e-3]}}
MANIFEST = "manifest.json"


class Watching:
    """Keeps what a user would have been told; raises what it is given when first asked what is under way."""

    def __init__(self, interrupt=None):
        self.told, self.log, self.interrupt = [], None, interrupt

    def started(self, **facts):
        self.told.append(("started", facts))

    def run_started(self, name, **facts):
        self.told.append(("run_started", name, facts))

    def run_finished(self, name, summary, time_s):
        self.told.append(("run_finished", name, summary))

    def run_failed(self, name, failure, log):
        self.told.append(("run_failed", name, failure))

    def under_way(self, runs):
        if self.interrupt is not None:
            raise self.interrupt

    def finished(self, log, page):
        self.log = log


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(children, "_LOOK_EVERY_S", 0.001)


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
    """Runs a sweep on doubles: content, ... -> (log, who watched)."""

    def run(content, *, train=None, jobs=1, watching=None, to="out"):
        watching = watching or Watching()
        start = train or FakeTrain()
        log = run_sweep(load_sweep(write_sweep(content)), tmp_path / to, jobs=jobs, progress=watching, start=start)
        return log, watching

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


def test_the_page_names_arms_results_and_links_to_the_reports(sweep, tmp_path):
    sweep(TWO_ARMS | {"description": "Which <learning rate>?"})
    page = (tmp_path / "out" / "sweep.html").read_text()
    assert "Which &lt;learning rate&gt;?" in page
    assert "55.0%" in page
    assert 'href="lr-0.001-seed-1/report.html"' in page
    assert "Against steps" in page
    assert "Against wall-clock time" in page
    assert page.count("<svg") == 2  # one metric was logged


def test_the_same_command_again_runs_nothing(sweep):
    sweep(TWO_ARMS)
    train = FakeTrain()
    log, watching = sweep(TWO_ARMS, train=train)
    assert train.started == []
    assert watching.told == [("started", {"num_runs": 4, "num_done": 4, "warning": ""})]
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


def test_an_evaluation_may_ask_for_more_and_nothing_else_runs_again(sweep):
    sweep(TWO_ARMS | {"set": {"stages.after.k": 2}})
    train, more = FakeTrain(), TWO_ARMS | {"set": {"stages.after.k": 4}}
    _, watching = sweep(more, train=train)
    assert watching.told[0][1]["num_done"] == 0
    assert [stage for _, stage in train.stages] == ["after"] * 4
    again = FakeTrain()
    sweep(more, train=again)
    assert again.started == []
    with pytest.raises(RunError, match=r"holds another sweep:\n  of arm 'lr-0\.01':\n  stages\.after\.k: 4 there, 2 asked"):
        sweep(TWO_ARMS | {"set": {"stages.after.k": 2}})


def test_a_run_that_takes_stages_over_may_ask_for_more_than_it_began_with(sweep, run_of):
    less, more = (TWO_ARMS | {"seeds": [0], "set": {"stages.after.k": k}} for k in (2, 4))
    sweep(less, train=FakeTrain(fails={"lr-0.01-seed-0": "sft"}))  # so the other arm makes what the two share
    train = FakeTrain()
    log, _ = sweep(more, train=train)
    assert not log.failures
    assert [stage for run, stage in train.stages if run == "lr-0.01-seed-0"] == ["rl", "after"]
    assert made_by(run_of("lr-0.01-seed-0"), "sft") == "lr-0.001-seed-0"


def test_arms_of_one_seed_share_the_stages_that_they_have_in_common(sweep, run_of):
    train = FakeTrain()
    _, watching = sweep(TWO_ARMS, train=train)
    assert [run for run, stage in train.stages if stage == "sft"] == ["lr-0.01-seed-0", "lr-0.01-seed-1"]
    assert [run for run, stage in train.stages if stage == "rl"] == train.started
    assert made_by(run_of("lr-0.001-seed-1"), "sft") == "lr-0.01-seed-1"
    assert made_by(run_of("lr-0.001-seed-1"), "rl") == "lr-0.001-seed-1"
    started = [facts["shared"] for what, _, *facts in watching.told if what == "run_started" for facts in facts]
    assert started == ["", "lr-0.01-seed-0", "", "lr-0.01-seed-1"]
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


def test_arms_whose_root_differs_share_nothing(sweep):
    train = FakeTrain()
    sweep({"arms": {"one": {}, "two": {"tools.python.name": "calculator"}}}, train=train)
    assert [run for run, stage in train.stages if stage == "base"] == ["one-seed-0", "two-seed-0"]


def test_of_several_at_once_one_waits_for_the_stages_that_another_makes(sweep):
    train = FakeTrain()
    sweep({"seeds": [0], "grid": {LR: [1e-2, 1e-3, 1e-4]}}, train=train, jobs=3)
    assert [run for run, stage in train.stages if stage == "sft"] == ["lr-0.01-seed-0"]
    assert train.most_at_once >= 2
    assert train.stages.index(("lr-0.01-seed-0", "before")) < train.stages.index(("lr-0.001-seed-0", "rl"))


def test_other_seeds_do_not_wait(sweep):
    train = FakeTrain()
    sweep(TWO_ARMS, train=train, jobs=2)
    assert train.started[:2] == ["lr-0.01-seed-0", "lr-0.01-seed-1"]
    assert train.most_at_once == 2


def test_a_failing_arm_is_named_and_the_others_go_on(sweep, tmp_path):
    train = FakeTrain(fails={"lr-0.001-seed-0": "rl"})
    log, watching = sweep(TWO_ARMS, train=train)
    assert len(train.started) == 4
    assert [run.name for run in log.failures] == ["lr-0.001-seed-0"]
    failure = "stages.rl: 3 steps in a row could not learn. (exit code 2)"
    assert ("run_failed", "lr-0.001-seed-0", failure) in watching.told
    page = (tmp_path / "out" / "sweep.html").read_text()
    assert failure in page
    assert "3 of 4 runs are finished" in page
    there = figures(tmp_path / "out")
    assert there["arms"]["lr-0.001"]["num_seeds"] == 1
    assert {run["state"] for run in there["runs"]} == {"done", "failed"}


def test_a_run_that_was_killed_is_said_to_be(sweep):
    log, _ = sweep(TWO_ARMS, train=FakeTrain(fails={"lr-0.001-seed-0": "rl"}, status=-signal.SIGKILL))
    assert log.failures[0].failure.startswith("killed, by hand or for want of memory, after it said: stages.rl: 3 steps")


def test_the_same_command_tries_a_failed_arm_again_from_where_it_was(sweep):
    sweep(TWO_ARMS, train=FakeTrain(fails={"lr-0.01-seed-1": "rl"}))
    train = FakeTrain()
    log, _ = sweep(TWO_ARMS, train=train)
    assert train.started == ["lr-0.01-seed-1"]
    assert train.stages == [("lr-0.01-seed-1", "rl"), ("lr-0.01-seed-1", "after")]
    assert not log.failures


def test_when_the_first_of_a_seed_fails_early_the_next_makes_what_they_share(sweep, run_of):
    train = FakeTrain(fails={"lr-0.01-seed-0": "sft"})
    log, _ = sweep({"seeds": [0], "grid": {LR: [1e-2, 1e-3, 1e-4]}}, train=train)
    assert [run.name for run in log.failures] == ["lr-0.01-seed-0"]
    assert made_by(run_of("lr-0.001-seed-0"), "sft") == "lr-0.001-seed-0"
    assert made_by(run_of("lr-0.0001-seed-0"), "sft") == "lr-0.001-seed-0"


def test_an_interrupt_ends_the_runs_that_are_under_way_and_leaves_a_page(sweep, tmp_path):
    train = FakeTrain(hangs=True)
    with pytest.raises(KeyboardInterrupt):
        sweep(TWO_ARMS, train=train, jobs=2, watching=Watching(interrupt=KeyboardInterrupt()))
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
        (TWO_ARMS | {"set": {"stages.rl.steps": 1}}, "stages.rl.steps: 2 there, 1 asked for"),
    ],
)
def test_the_directory_of_another_sweep_is_refused_by_what_differs(sweep, other, difference):
    sweep(TWO_ARMS)
    train = FakeTrain()
    with pytest.raises(RunError, match=difference):
        sweep(other, train=train)
    assert train.started == []


def test_what_changes_no_result_may_differ(sweep):
    sweep(TWO_ARMS)
    log, _ = sweep(
        TWO_ARMS | {"description": "other words", "result": "before.accuracy", "set": {"stages.rl.give_up_after": 9}}
    )
    assert log.result == "before.accuracy"


def test_a_directory_that_is_not_a_sweeps_is_refused(sweep, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("")
    with pytest.raises(RunError, match=r"not empty, and not the directory of a sweep"):
        sweep(TWO_ARMS)


def test_a_run_of_another_recipe_in_an_arms_place_is_refused(sweep, run_of):
    sweep(TWO_ARMS)
    run = run_of("lr-0.01-seed-0")
    manifest = read_json(run.manifest)
    manifest["recipe"]["stages"]["rl"]["steps"] = 7
    run.manifest.write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"stages.rl.steps: 7 there, 2 asked for"):
        sweep(TWO_ARMS)


def test_one_sweep_at_a_time_in_a_directory(sweep, tmp_path):
    (tmp_path / "out").mkdir()
    with alone_in(RunDirectory(tmp_path / "out")), pytest.raises(RunError, match="another strop is running there"):
        sweep(TWO_ARMS)


def test_runs_at_once_that_would_each_take_all_cores_are_warned_of(sweep, monkeypatch):
    _, watching = sweep(TWO_ARMS, jobs=2)
    assert watching.told[0][1]["warning"] == ""  # the recipe says threads = 1
    monkeypatch.delitem(RECIPE, "threads")
    _, watching = sweep({**TWO_ARMS, "seeds": [5]}, jobs=2, to="other")
    assert "[set] threads = 1" in watching.told[0][1]["warning"]


def test_a_sweep_without_an_evaluation_compares_the_last_step(sweep, write_sweep, tmp_path, monkeypatch):
    stages = {name: stage for name, stage in RECIPE["stages"].items() if stage["kind"] != "eval"}
    monkeypatch.setitem(RECIPE, "stages", stages)
    sweep({"seeds": [0], "grid": {LR: [1e-2]}})
    assert figures(tmp_path / "out")["arms"]["lr-0.01"]["mean"] == pytest.approx(0.2)


def test_the_plan_names_arms_and_what_they_share_and_writes_nothing(write_sweep, tmp_path):
    path = write_sweep(TWO_ARMS)
    result = CliRunner().invoke(app, ["sweep", str(path), "--dry-run", "--run-dir", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert f"{LR}=0.001" in result.output
    shown = " ".join(result.output.split())
    assert "4 runs to go" in shown
    assert "beside base, sft, before, which the arms of a seed share" in shown
    assert not (tmp_path / "out").exists()
