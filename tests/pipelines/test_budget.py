"""Stages with a budget of wall-clock time: where they stop, what is left of them, and that a fall changes none of it."""

import itertools

import pytest

from scripted_runs import RECIPE, lines_of, make_recipe, recipe_of, run_recipe
from strop.errors import ConfigError
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop import checkpoints
from strop.stages.loop.steps import StageClock

VALIDATION = {"every_steps": 9, "num_tasks": 2, "k": 1}


class Watch:
    """A clock that a test sets."""

    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def ticking(monkeypatch):
    """Every look at the clock of a stage finds that ten seconds have passed."""
    ticks = itertools.count(0, 10)

    class Ticking(StageClock):
        def __init__(self, budget_s, last):
            super().__init__(budget_s, last, now=lambda: float(next(ticks)))

    monkeypatch.setattr("strop.stages.loop.steps.StageClock", Ticking)


def test_a_step_is_begun_where_one_as_long_as_the_last_still_ends_in_time():
    watch = Watch()
    clock = StageClock(30.0, {}, now=watch)
    spent = []
    for took_s in (10.0, 10.0, 9.0):
        watch.time += took_s
        clock.step_finished(is_validated=False)
        clock.validated({})
        spent.append(clock.is_spent)
    assert spent == [False, False, True]  # at 20 one more of 10 still ends at 30; at 29 none does
    assert clock.metrics == {"time/elapsed_s": 29.0, "budget/left_s": 1.0, "budget/is_spent": 1.0}


def test_validations_are_paid_for_and_the_next_one_is_foreseen():
    watch = Watch()
    clock = StageClock(39.0, {}, now=watch)  # at 25 a validation of 10 and a step of 5 would end at 40
    for is_validated, elapsed, is_spent in ((True, 5.0, False), (False, 20.0, False), (True, 25.0, True)):
        watch.time += 5.0
        clock.step_finished(is_validated=is_validated)
        assert (clock.metrics["time/elapsed_s"], clock.is_spent) == (elapsed, is_spent)
        if is_validated:
            watch.time += 10.0
        clock.validated({"time/validation_s": 10.0} if is_validated else {})


def test_a_clock_goes_on_where_the_last_checkpoint_was_left():
    watch = Watch()
    clock = StageClock(30.0, {"time/elapsed_s": 12.0, "time/validation_s": 3.0, "budget/is_spent": 0.0}, now=watch)
    watch.time += 5.0
    clock.step_finished(is_validated=False)
    assert clock.metrics["time/elapsed_s"] == 20.0
    assert StageClock(30.0, {"budget/is_spent": 1.0}, now=watch).is_spent


def test_a_run_stops_with_its_budget_and_its_last_policy_is_saved_measured_and_handed_on(ticking, tmp_path):
    done = run_recipe(tmp_path / "run", make_recipe(steps=50, budget_s=115.0, checkpoint_every=50, validation=VALIDATION))
    lines, stage = lines_of(done.run), done.run.stage("rl")
    last = lines[-1]
    assert 1 < last["step"] < 50
    assert [line["budget/is_spent"] for line in lines] == [0.0] * (len(lines) - 1) + [1.0]
    assert 0 <= last["budget/left_s"] < last["time/elapsed_s"] - lines[-2]["time/elapsed_s"]
    assert [line["step"] for line in lines if "validation/accuracy" in line] == [last["step"]]
    assert checkpoints.latest_step(stage) == last["step"]
    assert read_json(stage.done)["summary"].startswith(f"{last['step']} steps of grpo")
    told = [line for line in read_lines(done.run.events) if line["event"] == "budget_spent"]
    assert [(line["step"], line["left_s"]) for line in told] == [(last["step"], last["budget/left_s"])]
    assert len(done.result.evaluations) == 2


def test_a_run_that_falls_after_its_budget_is_spent_trains_no_further(ticking, tmp_path, monkeypatch):
    recipe = make_recipe(steps=50, budget_s=115.0, checkpoint_every=50)
    with monkeypatch.context() as patched:
        patched.setattr("strop.stages.loop.steps.write_product", _fall)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(tmp_path / "run", recipe)
    before = lines_of(RunDirectory(tmp_path / "run"))
    again = run_recipe(tmp_path / "run", recipe)
    assert lines_of(again.run) == before
    assert len([line for line in read_lines(again.run.events) if line["event"] == "budget_spent"]) == 1


async def _fall(context, *words, **options):
    """In RL; other stages write their product."""
    if context.name == "rl":
        raise KeyboardInterrupt
    return await checkpoints.write_product(context, *words, **options)


def test_a_step_that_took_longer_than_foreseen_is_told(ticking, tmp_path):
    done = run_recipe(tmp_path / "run", make_recipe(steps=50, budget_s=1.0))
    assert [line["step"] for line in lines_of(done.run)] == [1]  # of the first nothing is known
    (warning,) = [text for text in done.progress.warnings if "budget_s" in text]
    assert warning.startswith("step 1 ended 19.0 s past budget_s = 1")


def test_a_cosine_over_an_unknown_number_of_updates_is_refused():
    rl = RECIPE["stages"]["rl"] | {"budget_s": 60.0, "trainer": {"optimizer": {"lr": 1e-2, "schedule": "cosine"}}}
    with pytest.raises(ConfigError, match=r"budget_s is 60, but trainer\.optimizer\.schedule is 'cosine'"):
        recipe_of(RECIPE["stages"] | {"rl": rl})
