"""The sweeps of CS336: every question compares arms that are there, and what has not been run is told."""

import json
import sys
from pathlib import Path

import pytest

from strop.pipelines.sweep_file import load_sweep
from strop.runs import RunDirectory

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
    results = cs336_sweeps.summarise({cs336_sweeps.ABLATIONS: sweep_of(*runs)})
    assert results["missing"] == {cs336_sweeps.ABLATIONS: [f"{no_clip}-seed-2"]}
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
    arms = cs336_sweeps.summarise({cs336_sweeps.ABLATIONS: sweep_of(*runs)})["questions"]["clip"]["arms"]
    assert arms[no_clip]["results"] == {"0": 0.6}
    assert (arms[no_clip]["above"], arms[no_clip]["above_interval"]) == ({}, None)


def test_a_run_that_nothing_rewards_any_more_is_an_answer_and_another_failure_is_not():
    clip, no_clip = "off_policy_4x4", "off_policy_4x4_no_clip"
    runs = [run_of(clip, 0, 0.5), run_of(clip, 1, None, state="failed", failure="the disk is full")]
    runs += [run_of(no_clip, 1, None, state="failed", failure=TIED)]
    results = cs336_sweeps.summarise({cs336_sweeps.ABLATIONS: sweep_of(*runs)})
    assert results["missing"] == {cs336_sweeps.ABLATIONS: [f"{clip}-seed-1"]}
    arm = results["questions"]["clip"]["arms"][no_clip]
    assert (arm["results"], arm["fell_at_step"]) == ({}, {"1": 12})
    assert list(results["questions"]["clip"]["curves"]["rollout/accuracy"][no_clip]) == ["1"]
    assert "– †12" in cs336_sweeps.table(results)


def test_what_was_written_of_sweeps_that_are_not_there_any_more_stays():
    clip, no_clip = "off_policy_4x4", "off_policy_4x4_no_clip"
    both = [run_of(arm, 0, 0.5) for arm in (clip, no_clip)]
    earlier = cs336_sweeps.summarise({cs336_sweeps.ABLATIONS: sweep_of(*both)})
    focused = sweep_of(run_of("on_policy", 0, 0.9), run_of("off_policy_1x4", 0, None, state="unfinished"))
    focused["arms"] = {arm: {"changes": []} for arm in cs336_sweeps.QUESTIONS["off-policy-focused"][1]}
    found = cs336_sweeps.summarise({cs336_sweeps.FOCUSED: focused})
    results = cs336_sweeps.with_earlier(found, earlier)
    assert results["questions"]["clip"] == earlier["questions"]["clip"]
    assert results["questions"]["off-policy-focused"]["arms"]["on_policy"]["results"] == {"0": 0.9}
    assert list(results["questions"]) == [question for question in cs336_sweeps.QUESTIONS if question in results["questions"]]
    assert results["missing"] == {cs336_sweeps.ABLATIONS: [], cs336_sweeps.FOCUSED: ["off_policy_1x4-seed-0"]}
    assert results["bars"]["runs_missing"] == {"value": 1, "bar": "== 0", "holds": False}
    again = sweep_of(run_of(clip, 0, 0.75), run_of(no_clip, 0, 0.5))
    newer = cs336_sweeps.with_earlier(cs336_sweeps.summarise({cs336_sweeps.ABLATIONS: again}), results)
    assert newer["questions"]["clip"]["arms"][no_clip]["above"] == {"0": -0.25}
    assert newer["missing"] == results["missing"]
    assert cs336_sweeps.with_earlier(found, {}) == found


def test_off_policy_tells_the_step_and_the_seconds_at_which_half_the_rollouts_were_right():
    arms = ("defaults", "off_policy_1x4")
    sweep = sweep_of(*(run_of(arm, seed, 0.5) for arm in arms for seed in (0, 1)))
    rises = [[1, 2.0, 0.3], [2, 4.0, 0.5], [3, 6.0, 0.6], [4, 8.0, 0.7]]  # means of three: 0.467 at step 3, 0.6 at step 4
    stays = [[step, 2.0 * step, 0.4] for step in range(1, 9)]
    sweep["curves"] = {"rollout/accuracy": {"defaults": {"0": rises, "1": stays}}}
    text = cs336_sweeps.table(cs336_sweeps.summarise({cs336_sweeps.ABLATIONS: sweep}))
    (defaults,) = [row for row in text.splitlines() if "half right: step" in row]
    assert defaults.endswith("half right: step 4 (8 s), never")


def test_rollouts_are_shown_by_step_and_reward_with_what_their_tools_said(tmp_path):
    def rollout(task, reward, *turns):
        turns = [{"completion_text": said, "observation_text": seen, "calls": [{}] * bool(seen)} for said, seen in turns]
        return {"rollout": {"reward": reward, "trajectory": {"key": {"attempt": 0, "task_index": task}, "turns": turns}}}

    run = RunDirectory(tmp_path)
    rows = [rollout(3, 1.0, ("call", "4\nok\n"), ("four", "")), rollout(1, 0.0, ("five", "")), rollout(2, 0.0, ("six", ""))]
    rows += [rollout(0, 0.0, ("seven", ""))]
    run.stage("rl").rollouts(5).parent.mkdir(parents=True)
    run.stage("rl").rollouts(5).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cs336_sweeps.rollouts_over_time(run, [5]).splitlines() == [
        "step 5: 1 of 4 rollouts call the tool",
        "",
        "step 5: 3 of 4 rollouts have reward 0",
        "    seven",
        "",
        "    five",
        "",
        "step 5: 1 of 4 rollouts have reward 1",
        "    call",
        "        4",
        "        ok",
        "    four",
    ]
