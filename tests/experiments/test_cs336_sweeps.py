"""The sweeps of CS336: arms are compared with the first, and what has not been run is named."""

import sys
from pathlib import Path

from strop.pipeline.sweep_file import load_sweep

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import cs336_sweeps

DIRECTORY = Path(__file__).resolve().parents[2] / "recipes" / "sweeps"


def test_every_sweep_of_the_course_is_asked_for_with_all_of_its_arms():
    asked = {name: set(arms) for name, arms in cs336_sweeps.SWEEPS.items()}
    assert asked == {path.stem: {arm.name for arm in load_sweep(path).arms} for path in DIRECTORY.glob("cs336-*.toml")}


TIED = "stages.rl: 3 steps in a row could not learn; of step 12: every group is tied: all 64 rewards are 0."


def run_of(arm, seed, result, *, state="done", failure=""):
    return {"arm": arm, "seed": seed, "state": state, "result": result, "time_s": 10.0, "failure": failure, "num_steps": 12}


def sweep_of(*runs):
    return {
        "recipe": "recipes/cs336-grpo-tiny.toml",
        "jobs": 2,
        "result": "after.accuracy",
        "stage": "rl",
        "arms": {arm: {"changes": []} for arm in ("clip", "no_clip")},
        "runs": list(runs),
        "curves": {"rollout/accuracy": {arm: {"0": [[1, 2.0, 0.5]], "1": [[1, 2.0, 0.25]]} for arm in ("clip", "no_clip")}},
    }


def test_arms_are_compared_by_seed_and_what_is_missing_is_named():
    runs = [run_of("clip", 0, 0.5), run_of("clip", 1, 0.7), run_of("clip", 2, 0.6)]
    runs += [run_of("no_clip", 0, 0.6), run_of("no_clip", 1, 0.8), run_of("no_clip", 2, None, state="unfinished")]
    results = cs336_sweeps.summarise("cs336-clip", sweep_of(*runs))
    assert results["missing"] == ["no_clip-seed-2"]
    arm = results["arms"]["no_clip"]
    assert arm["above"] == {"0": 0.1, "1": 0.1}
    assert arm["above_interval"] == [0.1, 0.1, 0.1]  # both seeds differ by the same
    assert results["curves"]["rollout/accuracy"]["no_clip"] == {"0": [[1, 2.0, 0.5]], "1": [[1, 2.0, 0.25]]}
    text = cs336_sweeps.table("cs336-clip", results)
    assert "0.600 0.800 –" in text
    assert "+0.100 +0.100 –" in text
    assert "not run, or not to the end: no_clip-seed-2" in text


def test_a_run_whose_baseline_is_missing_has_no_difference():
    runs = [run_of("clip", 0, None, state="waiting"), run_of("no_clip", 0, 0.6)]
    arms = cs336_sweeps.summarise("cs336-clip", sweep_of(*runs))["arms"]
    assert arms["no_clip"]["results"] == {"0": 0.6}
    assert (arms["no_clip"]["above"], arms["no_clip"]["above_interval"]) == ({}, None)


def test_a_run_that_nothing_rewards_any_more_is_an_answer_and_another_failure_is_not():
    runs = [run_of("clip", 0, 0.5), run_of("clip", 1, None, state="failed", failure="the disk is full")]
    runs += [run_of("no_clip", 1, None, state="failed", failure=TIED)]
    results = cs336_sweeps.summarise("cs336-clip", sweep_of(*runs))
    assert results["missing"] == ["clip-seed-1"]
    arm = results["arms"]["no_clip"]
    assert (arm["results"], arm["fell_at_step"]) == ({}, {"1": 12})
    assert list(results["curves"]["rollout/accuracy"]["no_clip"]) == ["1"]
    assert "– †12" in cs336_sweeps.table("cs336-clip", results)
