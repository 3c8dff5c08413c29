"""Seconds of off-policy arms: sums over the stage's steps, and the first window of three steps that is half right."""

import json
import sys
from pathlib import Path

import pytest

from strop.run_directory import RunDirectory, write_json, write_text

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

from cs336_off_policy_seconds import of_run, summarise, table
from cs336_sweeps import half_right


def make_run(path, accuracies, *, after=0.5):
    run = RunDirectory(path)
    other = {"stage": "sft", "step": 1, "time/step_s": 100.0}
    steps = [
        {
            "stage": "rl",
            "step": step,
            "time/step_s": 2.0,
            "time/rollout_s": 1.5,
            "time/update_s": 0.25,
            "rollout/accuracy": share,
        }
        for step, share in enumerate(accuracies, start=1)
    ]
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in [other, *steps]))
    write_json(run.stage("after").evaluation, {"accuracy": after})
    return run


def test_seconds_are_those_of_the_stage_and_phases_that_it_did_not_log_took_none(tmp_path):
    found = of_run(make_run(tmp_path, [0.1, 0.2]))
    assert found["seconds"] == {"step": 4.0, "rollout": 3.0, "score": 0.0, "update": 0.5}
    assert found["curve"] == [(1, 2.0, 0.1), (2, 4.0, 0.2)]
    assert found["half_right_at"] is None


@pytest.mark.parametrize(
    ("accuracies", "at"),
    [([0.9, 0.9], None), ([0.9, 0.6, 0.0], (3, 3.0)), ([0.0, 0.0, 0.9, 0.5, 0.1], (5, 5.0)), ([0.4] * 9, None)],
)
def test_half_is_right_once_the_mean_of_three_steps_is(accuracies, at):
    assert half_right([(step, float(step), share) for step, share in enumerate(accuracies, start=1)]) == at


def test_a_run_that_is_missing_is_counted_and_the_table_has_a_row_for_each_arm(tmp_path):
    runs = {
        "on": {0: make_run(tmp_path / "a", [0.6] * 3), 1: make_run(tmp_path / "b", [0.1] * 3)},
        "off": {0: make_run(tmp_path / "c", [0.6] * 3)},
    }
    results = summarise(runs, num_seeds=2)
    assert results["bars"]["runs_missing"] == {"value": 1, "bar": "== 0", "holds": False}
    lines = table(results).splitlines()
    assert lines[1].startswith("on ")
    assert lines[1].endswith("step 3, 6 s, never")
    assert lines[2].split()[:3] == ["off", "6.0", "4.5"]
