"""The experiment on PPO's lambda: its comparison by hand, its bar, its table, and what a failed run leads to."""

import sys
from pathlib import Path

import pytest

from strop.pipeline.sweep_file import load_sweep
from strop.reports.sweep import State, SweepArm, SweepLog, SweepRun, sweep_json
from strop.run_directory import read_json, write_json

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import ppo_lambda

ARMS = ("ppo_lambda_0_95", "ppo_lambda_1", "grpo")


def sweep_run(arm, seed, result):
    """Of two steps of 3 s; one without a result failed."""
    steps = {1: {"time/step_s": 3.0, "rollout/accuracy": 0.25}, 2: {"time/step_s": 3.0, "rollout/accuracy": 0.5}}
    if arm != "grpo":
        steps = {step: figures | {"critic/explained_variance": 0.125} for step, figures in steps.items()}
    has_ended = result is not None
    return SweepRun(
        seed=seed,
        name=f"{arm}-seed-{seed}",
        state=State.DONE if has_ended else State.FAILED,
        failure="" if has_ended else "exit code 1",
        result=result,
        steps=steps if has_ended else {},
    )


def log_of(**results):
    """By arm, the result of each seed."""
    arms = tuple(
        SweepArm(name=arm, changes=(f"lam={arm}",), runs=tuple(sweep_run(arm, seed, one) for seed, one in enumerate(of_arm)))
        for arm, of_arm in results.items()
    )
    return SweepLog(
        name="ppo-lambda",
        description="",
        command="make it",
        recipe="r",
        common=(),
        stage="rl",
        result="after.accuracy",
        curves=("rollout/accuracy", "critic/explained_variance"),
        jobs=1,
        arms=arms,
    )


def summary(**results):
    return ppo_lambda.summarise(sweep_json(log_of(**results)))


ABOVE = {"ppo_lambda_0_95": (0.5, 0.25, 0.375), "ppo_lambda_1": (0.5625, 0.375, 0.46875), "grpo": (0.5, 0.5, 0.125)}
"""Lambda 1.0 is 1/16, 1/8 and 3/32 above 0.95: 3/32 on average, with a standard deviation of 1/32."""


def test_arms_are_compared_seed_by_seed_with_the_first():
    found = summary(**ABOVE)
    first, second, third = (found["arms"][arm] for arm in ARMS)
    assert "above_the_first" not in first
    assert second["above_the_first"]["by_seed"] == [0.0625, 0.125, 0.0938]
    assert second["above_the_first"]["mean"] == pytest.approx(3 / 32, abs=1e-4)
    margin = 4.3027 / 32 / 3**0.5  # Student's quantile of 97.5 % with 2 degrees of freedom
    assert second["above_the_first"]["interval"] == pytest.approx([3 / 32 - margin, 3 / 32 + margin], abs=1e-4)
    assert third["above_the_first"]["by_seed"] == [0.0, 0.25, -0.25]
    assert second["time_s"] == {"0": 6.0, "1": 6.0, "2": 6.0}
    assert found["curves"]["rollout/accuracy"]["grpo"]["1"] == [[1, 0.25], [2, 0.5]]


@pytest.mark.parametrize(("of_seed_0", "holds"), [(0.5625, True), (0.5, False)])
def test_the_bar_is_that_the_whole_interval_of_lambda_1_lies_above_0(of_seed_0, holds):
    """With 0, 1/8 and 3/32 the mean is 0.073 and the margin 0.162."""
    found = summary(**ABOVE | {"ppo_lambda_1": (of_seed_0, 0.375, 0.46875)})
    [(name, bar)] = found["bars"].items()
    assert name == "ppo_lambda_1_above_0_95_low"
    assert bar["value"] == found["arms"]["ppo_lambda_1"]["above_the_first"]["interval"][0]
    assert bar["holds"] is holds
    assert ppo_lambda.table(found).splitlines()[-1].endswith("must be > 0: " + ("holds" if holds else "does not hold"))


def test_a_run_without_a_result_is_in_no_difference_and_neither_is_its_seed_of_the_other_arm():
    found = summary(**ABOVE | {"ppo_lambda_0_95": (0.5, None, 0.375), "grpo": (None, None, None)})
    assert found["arms"]["ppo_lambda_1"]["above_the_first"]["by_seed"] == [0.0625, 0.0938]
    assert found["arms"]["ppo_lambda_1"]["results"] == {"0": 0.5625, "1": 0.375, "2": 0.4688}
    assert found["arms"]["grpo"] == {"changes": ["lam=grpo"], "results": {}, "time_s": {}, "above_the_first": {"by_seed": []}}
    rows = ppo_lambda.table(found).splitlines()
    assert rows[4].split() == ["grpo", "–", "–"]


def run_main(monkeypatch, directory, log):
    """The experiment with a sweep that ended as `log` says."""

    def run_sweep(sweep, path, *, jobs, progress, command):
        write_json(path / "sweep.json", sweep_json(log))
        return log

    monkeypatch.setattr(ppo_lambda, "run_sweep", run_sweep)
    return ppo_lambda.main(["--runs", str(directory / "runs"), "--results", str(directory / "results")])


def test_a_bar_that_is_missed_is_written_down_and_ends_with_1(tmp_path, monkeypatch, capsys):
    assert run_main(monkeypatch, tmp_path, log_of(**ABOVE)) == 0
    assert run_main(monkeypatch, tmp_path, log_of(**ABOVE | {"ppo_lambda_1": (0.25, 0.5, 0.375)})) == 1
    found = read_json(tmp_path / "results" / "ppo-lambda.json")
    assert found["bars"]["ppo_lambda_1_above_0_95_low"]["holds"] is False
    text = (tmp_path / "results" / "ppo-lambda.txt").read_text()
    assert "does not hold" in text
    assert capsys.readouterr().out.endswith(text)


def test_a_failed_run_is_named_and_leaves_the_results_as_they_were(tmp_path, monkeypatch, capsys):
    assert run_main(monkeypatch, tmp_path, log_of(**ABOVE)) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()}
    assert run_main(monkeypatch, tmp_path, log_of(**ABOVE | {"grpo": (0.5, None, 0.125)})) == 1
    assert "grpo-seed-1 failed, so the results stay as they were" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()} == before


def test_the_sweep_has_the_arms_of_the_bar_and_what_is_kept_is_what_its_figures_give():
    sweep = load_sweep(ppo_lambda.SWEEP)
    assert tuple(arm.name for arm in sweep.arms) == ARMS
    kept = read_json(ppo_lambda.RESULTS / "ppo-lambda.json")
    assert list(kept["arms"]) == list(ARMS)
    assert (ppo_lambda.RESULTS / "ppo-lambda.txt").read_text() == ppo_lambda.table(kept) + "\n"
    above = [
        round(kept["arms"]["ppo_lambda_1"]["results"][seed] - kept["arms"]["ppo_lambda_0_95"]["results"][seed], 4)
        for seed in ("0", "1", "2")
    ]
    assert kept["arms"]["ppo_lambda_1"]["above_the_first"]["by_seed"] == above
