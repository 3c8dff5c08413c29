"""The trends' experiments: what they measure, and that every sweep compares what its hypothesis names."""

import json
import sys
from pathlib import Path

import pytest

from strop.pipelines.sweep_file import load_sweep
from strop.runs import RunDirectory, write_json, write_text

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import trends
import trends_measures as measures


def turn(num_sampled, num_observed, *, cached, calls=("stdout",)):
    completion = {"ids": [1] * num_sampled, "cached_tokens": cached}
    return {"completion": completion, "calls": [{"outcome": each} for each in calls], "observation_ids": [2] * num_observed}


def test_a_branch_costs_what_its_parent_did_not_pay_and_flat_all_of_it():
    turns = [turn(10, 5, cached=0), turn(7, 3, cached=16), turn(4, 0, cached=25, calls=())]
    parent = {"prompt_ids": [0] * 6, "turns": turns, "forked_at": 0}
    assert measures.cost_of(parent) == measures.Cost(
        calls=2, generated_tokens=21, prefilled_tokens=6 + 5 + 6, flat_calls=2, flat_generated_tokens=21
    )  # prompt 6; behind turn 1 21 - 16; behind turn 2 31 - 25
    branch = measures.cost_of(parent | {"forked_at": 15})
    assert branch == measures.Cost(calls=1, generated_tokens=11, prefilled_tokens=11, flat_calls=2, flat_generated_tokens=21)


def test_a_call_that_was_not_run_costs_nothing():
    rollout = {"prompt_ids": [0], "turns": [turn(3, 0, cached=0, calls=("not_run", "error"))], "forked_at": 0}
    assert measures.cost_of(rollout).calls == 1


def test_the_mean_up_to_a_budget_is_the_area_under_straight_lines():
    curve = [(0.0, 0.0), (10.0, 1.0), (30.0, 0.5)]
    assert measures.mean_up_to(curve, 10.0) == pytest.approx(0.5)
    assert measures.mean_up_to(curve, 20.0) == pytest.approx((5 + 8.75) / 20)  # 1 to 0.75 over the second ten
    assert measures.mean_up_to(curve, 30.0) == pytest.approx((5 + 15) / 30)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.1, 0.2, 0.3), "as expected"),
        ((-0.1, -0.2, -0.3), "opposite"),
        ((-0.1, 0.2, -0.1), "not shown"),
        ((0.4,), "pilot: one seed decides nothing"),
    ],
)
def test_a_difference_is_shown_only_where_its_whole_interval_is_on_one_side(differences, verdict):
    first = dict.fromkeys(range(len(differences)), 0.5)
    second = {seed: 0.5 + difference for seed, difference in enumerate(differences)}
    assert measures.paired(first, second, is_more_expected=True)["verdict"] == verdict
    answer = measures.paired(first | {9: 0.1}, second, is_more_expected=False)
    assert answer["mean"] == pytest.approx(sum(differences) / len(differences))  # a seed without a pair is left out


@pytest.mark.parametrize("letter", sorted(trends.TRENDS))
def test_the_arms_that_are_compared_are_those_of_the_sweep(letter):
    trend = trends.TRENDS[letter]
    sweep = load_sweep(trends.SWEEPS / f"{trend.name}.toml")
    assert {name for each in trend.comparisons for name in (each.first, each.second)} == {arm.name for arm in sweep.arms}
    assert len(sweep.file.seeds) >= 8
    assert trends.PILOT_SEED not in sweep.file.seeds


def test_hard_and_soft_credit_are_compared_with_at_least_four_updates_a_step():
    for arm in load_sweep(trends.SWEEPS / "c-credit.toml").arms:
        stage = arm.recipes[0].stages["rl"]
        assert stage.updates_per_step * stage.epochs >= 4


def run_with(path, *, accuracy, num_calls):
    """A run of one step, validated after it."""
    run = RunDirectory(path)
    for stage in ("before", "after"):
        write_json(run.stage(stage).evaluation, {"accuracy": accuracy if stage == "after" else 0.2, "tool_calls_mean": 1.0})
    rollout = {"prompt_ids": [0], "turns": [turn(3, 1, cached=0)] * num_calls, "forked_at": 0}
    write_text(run.stage("rl").rollouts(1), json.dumps({"rollout": {"trajectory": rollout}}) + "\n")
    line = {"stage": "rl", "step": 1, "rollout/accuracy": 0.5, "validation/accuracy": accuracy}
    write_text(run.metrics, json.dumps(line) + "\n")
    return run


def test_arms_are_compared_up_to_the_calls_of_the_one_that_made_fewest(tmp_path):
    runs = {
        "grpo": {0: run_with(tmp_path / "grpo", accuracy=0.6, num_calls=4)},
        "arpo": {0: run_with(tmp_path / "arpo", accuracy=0.8, num_calls=2)},
    }
    results = trends.summarise(trends.TRENDS["b"], runs, command="")
    assert results["figures"]["accuracy at the budget"] == {"grpo": {0: pytest.approx(0.4)}, "arpo": {0: 0.8}}
    assert results["figures"]["generated_tokens at the budget"] == {"grpo": {0: 6}, "arpo": {0: 6}}
    assert results["is_pilot"]
    assert "decides nothing" in trends.table(trends.TRENDS["b"], results | {"changes": []})
