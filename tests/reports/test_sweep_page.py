"""Figures over seeds, and curves against time."""

import pytest
from fake_run import write_run

from strop.evaluation.statistics import mean_of_seeds
from strop.reports.plots import compare_plots
from strop.reports.sweep import (
    State,
    SweepArm,
    SweepLog,
    SweepRun,
    curves_of,
    difference,
    read_sweep_run,
    results_table,
    sweep_page,
)
from strop.run_directory import write_json

METRIC = "rollout/accuracy"


def run(seed, result, steps, *, state=State.DONE):
    """`steps`: of each, its seconds and its accuracy (None: not logged)."""
    return SweepRun(
        seed=seed,
        name=f"run-seed-{seed}",
        state=state,
        failure="",
        result=result,
        steps={
            number: {"time/step_s": time_s} | ({} if value is None else {METRIC: value})
            for number, (time_s, value) in enumerate(steps, start=1)
        },
    )


def log_of(**arms):
    return SweepLog(
        name="s",
        description="",
        command="strop sweep s.toml",
        recipe="r.toml",
        common=(),
        stage="rl",
        result="after.accuracy",
        curves=(),
        jobs=1,
        arms=tuple(SweepArm(name=name, changes=(), runs=tuple(runs)) for name, runs in arms.items()),
    )


def test_a_run_whose_evaluation_is_stale_has_no_result(tmp_path):
    words = {"seed": 0, "state": State.DONE, "failure": "", "stage": "rl", "result": "after.accuracy", "curves": ()}
    written = write_run(tmp_path / "run", num_steps=2)
    assert read_sweep_run(written, **words).result == 0.842
    write_json(written.stage("after").stale, {"because": "rl was made anew"})
    stale = read_sweep_run(written, **words)
    assert stale.result is None


def test_the_interval_over_seeds_is_students():
    estimate = mean_of_seeds([0.1, 0.2, 0.3])  # s = 0.1, t of 2 degrees of freedom 4.3027
    assert estimate.mean == pytest.approx(0.2)
    assert (estimate.low, estimate.high) == (pytest.approx(0.2 - 0.24842, abs=1e-5), pytest.approx(0.2 + 0.24842, abs=1e-5))


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (10, 2.2281), (11, 2.2010), (20, 2.0860), (30, 2.0423), (120, 1.9799)]
)
def test_the_quantiles_are_those_of_the_tables(degrees, quantile):
    values = [0.0] * (degrees + 1)
    values[0] = 1.0  # n values, one of them 1: s / √n = 1 / n
    estimate = mean_of_seeds(values)
    assert (estimate.high - estimate.mean) * len(values) == pytest.approx(quantile, abs=2e-4)


def test_one_seed_has_no_interval_over_seeds():
    with pytest.raises(ValueError, match="needs at least two values, not 1"):
        mean_of_seeds([0.5])


def test_differences_are_of_runs_with_one_seed():
    noisy = [run(0, 0.1, []), run(1, 0.5, []), run(2, 0.9, [])]
    better = [run(0, 0.2, []), run(1, 0.6, []), run(2, 1.0, [])]
    log = log_of(noisy=noisy, better=better)
    above = difference(log.arms[1], log.arms[0])
    assert (above.low, above.high) == (pytest.approx(0.1), pytest.approx(0.1))


def test_a_seed_that_one_arm_lacks_is_in_no_difference():
    log = log_of(one=[run(0, 0.1, []), run(1, None, [])], other=[run(0, 0.3, []), run(1, 0.9, [])])
    assert difference(log.arms[1], log.arms[0]) is None


def test_against_time_seeds_meet_at_their_steps():
    log = log_of(one=[run(0, 0.5, [(1.0, 0.1), (1.0, 0.3)]), run(1, 0.5, [(3.0, 0.2), (5.0, 0.5)])])
    (series,) = compare_plots(curves_of(log, by_time=True))[METRIC].series
    assert series.points == ((2.0, pytest.approx(0.15)), (5.0, pytest.approx(0.4)))
    assert series.band == ((2.0, 0.1, 0.2), (5.0, 0.3, 0.5))


def test_a_step_that_a_seed_did_not_log_is_in_no_mean_and_its_time_counts():
    log = log_of(one=[run(0, 0.5, [(1.0, None), (1.0, 0.3)]), run(1, 0.5, [(1.0, 0.1), (1.0, 0.5)])])
    assert curves_of(log)[METRIC]["one"] == [[(2, 0.3)], [(2, 0.5)]]
    assert curves_of(log, by_time=True)[METRIC]["one"] == [[(2.0, 0.3)], [(2.0, 0.5)]]


def test_seeds_without_a_step_in_common_are_named_as_missing():
    apart = [run(0, 0.5, [(1.0, None), (1.0, 0.3)]), run(1, 0.5, [(1.0, 0.1)])]
    log = log_of(one=apart, other=[run(0, 0.5, [(1.0, 0.3)])])
    assert compare_plots(curves_of(log))[METRIC].missing == (f"{METRIC} of one",)


def test_unfinished_runs_are_drawn_only_where_nothing_else_is():
    failed = run(1, None, [(1.0, 0.2)], state=State.FAILED)
    beside = log_of(one=[run(0, 0.5, [(1.0, 0.1), (1.0, 0.3)]), failed])
    assert len(curves_of(beside)[METRIC]["one"]) == 1
    alone = log_of(one=[failed])
    assert curves_of(alone)[METRIC]["one"] == [[(1, 0.2)]]


def test_an_arm_without_a_result_has_a_row_that_says_so():
    log = log_of(one=[run(0, 0.25, [(61.0, 0.1)])], other=[run(0, None, [], state=State.WAITING)])
    first, second = results_table(log).rows
    assert first == ("one", "25.0%", "–", "25.0% – 25.0%", "–", "1 of 1", "1 min 01 s", "0")
    assert second == ("other", "–", "–", "–", "–", "0 of 1", "–", "–")
    page = sweep_page(log)
    assert "One seed has no interval" in page
    assert "1 of 2 runs are finished" in page


def test_a_page_is_there_before_the_first_step():
    page = sweep_page(log_of(one=[run(0, None, [], state=State.RUNNING)]))
    assert "No step of rl is finished yet." in page
