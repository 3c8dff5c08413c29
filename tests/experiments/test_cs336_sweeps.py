"""The sweeps of CS336: every question compares arms that are there, and what has not been run is told."""

import sys
from pathlib import Path

import pytest

from strop.pipeline.sweep_file import load_sweep

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import cs336_sweeps

SWEEPS = Path(__file__).resolve().parents[2] / "recipes" / "sweeps"


@pytest.mark.parametrize("name", cs336_sweeps.SWEEPS)
def test_every_question_compares_arms_of_its_sweep_and_every_arm_answers_one(name):
    sweep = load_sweep(SWEEPS / f"{name}.toml")
    asked = {arm for of_sweep, arms in cs336_sweeps.QUESTIONS.values() if of_sweep == name for arm in arms}
    assert asked == {arm.name for arm in sweep.arms}


TIED = "stages.rl: 3 steps in a row could not learn; of step 12: every group is tied: all 64 rewards are 0."


def run_of(arm, seed, result, *, state="done", failure=""):
    return {"arm": arm, "seed": seed, "state": state, "result": result, "time_s": 10.0, "failure": failure, "num_steps": 12}


def sweep_of(*runs):
    arms = ("off_policy_4x4", "off_policy_4x4_no_clip")
    everything = {arm for sweep, asked in cs336_sweeps.QUESTIONS.values() if sweep == cs336_sweeps.ABLATIONS for arm in asked}
    curve = {arm: {"0": [[1, 2.0, 0.5]], "1": [[1, 2.0, 0.25]]} for arm in arms}
    return {
        "recipe": "recipes/cs336-grpo-tiny.toml",
        "jobs": 2,
        "result": "after.accuracy",
        "stage": "rl",
        "arms": {arm: {"changes": []} for arm in everything},
        "runs": list(runs),
        "curves": {"rollout/accuracy": curve},
    }


def test_arms_are_compared_by_seed_and_what_is_missing_is_named():
    clip, no_clip = "off_policy_4x4", "off_policy_4x4_no_clip"
    runs = [run_of(clip, 0, 0.5), run_of(clip, 1, 0.7), run_of(clip, 2, 0.6)]
    runs += [run_of(no_clip, 0, 0.6), run_of(no_clip, 1, 0.8), run_of(no_clip, 2, None, state="unfinished")]
    results = cs336_sweeps.summarise(cs336_sweeps.ABLATIONS, sweep_of(*runs))
    assert results["missing"] == [f"{no_clip}-seed-2"]
    assert set(results["questions"]) == {
        question for question, (sweep, _) in cs336_sweeps.QUESTIONS.items() if sweep == cs336_sweeps.ABLATIONS
    }
    arm = results["questions"]["clip"]["arms"][no_clip]
    assert arm["above"] == {"0": 0.1, "1": 0.1}
    assert arm["above_interval"] == [0.1, 0.1, 0.1]  # both seeds differ by the same
    assert results["questions"]["clip"]["curves"]["rollout/accuracy"][no_clip] == {
        "0": [[1, 2.0, 0.5]],
        "1": [[1, 2.0, 0.25]],
    }
    text = cs336_sweeps.table(results)
    assert "0.600 0.800 –" in text
    assert "+0.100 +0.100 –" in text
    assert f"not run, or not to the end: {no_clip}-seed-2" in text


def test_a_run_whose_baseline_is_missing_has_no_difference():
    clip, no_clip = "off_policy_4x4", "off_policy_4x4_no_clip"
    runs = [run_of(clip, 0, None, state="waiting"), run_of(no_clip, 0, 0.6)]
    arms = cs336_sweeps.summarise(cs336_sweeps.ABLATIONS, sweep_of(*runs))["questions"]["clip"]["arms"]
    assert arms[no_clip]["results"] == {"0": 0.6}
    assert (arms[no_clip]["above"], arms[no_clip]["above_interval"]) == ({}, None)


def test_a_run_that_nothing_rewards_any_more_is_an_answer_and_another_failure_is_not():
    clip, no_clip = "off_policy_4x4", "off_policy_4x4_no_clip"
    runs = [run_of(clip, 0, 0.5), run_of(clip, 1, None, state="failed", failure="the disk is full")]
    runs += [run_of(no_clip, 1, None, state="failed", failure=TIED)]
    results = cs336_sweeps.summarise(cs336_sweeps.ABLATIONS, sweep_of(*runs))
    assert results["missing"] == [f"{clip}-seed-1"]
    arm = results["questions"]["clip"]["arms"][no_clip]
    assert (arm["results"], arm["fell_at_step"]) == ({}, {"1": 12})
    assert list(results["questions"]["clip"]["curves"]["rollout/accuracy"][no_clip]) == ["1"]
    assert "– †12" in cs336_sweeps.table(results)
