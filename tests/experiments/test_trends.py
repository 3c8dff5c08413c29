"""The trends' experiments: what they measure, and that every sweep compares what its hypothesis names."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from scripted_runs import make_recipe, run_recipe
from strop.pipeline.sweep_file import load_sweep
from strop.run_directory import RunDirectory, read_lines, write_json, write_text
from strop.runs.lineage import num_common

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import trends
import trends_measures as measures


def turn(num_sampled, num_observed, *, cached, calls=("stdout",)):
    completion = {"ids": [1] * num_sampled, "cached_tokens": cached}
    return {"completion": completion, "calls": [{"outcome": each} for each in calls], "observation_ids": [2] * num_observed}


def key(attempt, branch=0):
    return {"task_index": 0, "attempt": attempt, "branch": branch}


TURNS = [turn(10, 5, cached=0), turn(7, 3, cached=15), turn(4, 0, cached=27, calls=())]
PARENT = {"key": key(0), "prompt_ids": [0] * 6, "turns": TURNS, "forked_at": 0}
FLAT = {"flat_calls": 2, "flat_generated_tokens": 21, "flat_prefilled_tokens": 6 + (5 + 1) + (3 + 1)}
"""Of a path: its prompt, then each observation with the id sampled last, which is fed with it."""


def test_a_branch_costs_what_its_parent_did_not_pay_and_flat_all_of_it():
    parent = measures.cost_of(PARENT, is_in_group=True)
    assert parent == measures.Cost(generated_tokens=21, prefilled_tokens=6 + 6 + 4, **FLAT)  # 6; 21 - 15; 31 - 27
    branch = measures.cost_of(PARENT | {"forked_at": 15}, is_in_group=True)
    assert branch == measures.Cost(generated_tokens=11, prefilled_tokens=6 + 4, **FLAT)
    displaced = measures.cost_of(PARENT | {"forked_at": 15}, is_in_group=False)
    assert displaced == measures.Cost(generated_tokens=11, prefilled_tokens=10)  # whoever plays flat never had it


def opened(seed, turn, index=0):
    return {"event": "tool_opened", "seed": seed, "turn": turn, "index": index, "call": "[]"}


def displaced(of, *, generated, prefilled, is_sampling):
    tokens = {"generated_tokens": generated, "prefilled_tokens": prefilled}
    return {"event": "displaced", "key": of, **tokens, "is_sampling": is_sampling}


def test_a_branch_that_was_displaced_while_it_played_costs_its_calls_and_its_tokens():
    ledger = [
        *(opened(7, 0), opened(7, 1)),  # the parent's
        *(opened(8, 1), opened(8, 1, 1), opened(8, 1)),  # the branch's: two, one of which our fault made run again
        displaced(key(0, 1), generated=9, prefilled=12, is_sampling=True),
    ]
    cost = measures.cost_of_step([PARENT], ledger, in_groups=[key(0)])
    mean = 21 / 3  # of a completion: what the one under way is charged
    assert cost == measures.Cost(calls=4, generated_tokens=21 + 9 + mean, prefilled_tokens=16 + 12, **FLAT)


def test_a_branch_that_was_displaced_when_it_had_finished_costs_once():
    branch = PARENT | {"key": key(0, 1), "forked_at": 15}
    ledger = [displaced(key(0, 1), generated=11, prefilled=10, is_sampling=False)]
    assert measures.cost_of_step([PARENT, branch], ledger, in_groups=[key(0)]) == measures.Cost(
        generated_tokens=21 + 11, prefilled_tokens=16 + 10, **FLAT
    )


def test_without_branches_the_calls_of_a_real_run_are_those_of_its_rollouts(tmp_path):
    run = run_recipe(tmp_path / "run", make_recipe(method="grpo")).run
    costs = measures.costs_by_step(run)
    assert costs[-1].calls == costs[-1].flat_calls > 0
    assert costs[-1].generated_tokens == costs[-1].flat_generated_tokens > 0
    assert costs[-1].flat_prefilled_tokens >= costs[-1].prefilled_tokens > 0  # rollouts of a task share its prompt


def test_seeds_are_drawn_over_the_calls_that_all_of_them_made():
    first, second = measures.on_common_grid([[(0.0, 0.2), (100.0, 0.6)], [(0.0, 0.4), (50.0, 0.5), (80.0, 0.8)]], num_points=3)
    assert first == [(0.0, pytest.approx(0.2)), (40.0, pytest.approx(0.36)), (80.0, pytest.approx(0.52))]
    assert second == [(0.0, pytest.approx(0.4)), (40.0, pytest.approx(0.48)), (80.0, pytest.approx(0.8))]


def test_a_smooth_curve_goes_through_its_points_rises_where_they_do_and_is_that_of_pchip():
    curve = [(0.0, 0.3), (500.0, 0.7), (1300.0, 0.8), (2000.0, 0.8), (2500.0, 0.9)]
    found = measures.smooth(curve)
    assert [measures.at(found, x) for x, _ in curve] == pytest.approx([y for _, y in curve], abs=1e-12)
    assert all(high >= low - 1e-12 for (_, low), (_, high) in pairwise(found))
    # scipy.interpolate.PchipInterpolator of the same points: its values, and its mean over [0, 2500].
    assert measures.at(found, 250.0) == pytest.approx(0.5519087809, abs=1e-6)
    assert measures.at(found, 900.0) == pytest.approx(0.7729074890, abs=1e-6)
    assert measures.mean_up_to(found, 2500.0) == pytest.approx(0.7434469907, abs=1e-5)
    line = [(0.0, 0.0), (10.0, 1.0), (30.0, 3.0)]
    assert all(y == pytest.approx(x / 10) for x, y in measures.smooth(line))
    assert measures.smooth([(0.0, 1.0), (4.0, 3.0)])[-1] == (4.0, 3.0)


def test_the_mean_up_to_a_budget_is_the_area_under_straight_lines():
    curve = [(0.0, 0.0), (10.0, 1.0), (30.0, 0.5)]
    assert measures.mean_up_to(curve, 10.0) == pytest.approx(0.5)
    assert measures.mean_up_to(curve, 20.0) == pytest.approx((5 + 8.75) / 20)  # 1 to 0.75 over the second ten
    assert measures.mean_up_to(curve, 30.0) == pytest.approx((5 + 15) / 30)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2), "as expected"),
        ((-0.1, -0.2, -0.3, -0.1, -0.2, -0.3, -0.1, -0.2), "opposite"),
        ((-0.1, 0.2, -0.1, 0.2, -0.1, 0.2, -0.1, -0.1), "not shown"),
        ((0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1), "not shown: 7 of 8 pairs"),
        ((0.4,), "not shown: 1 of 8 pairs"),
        ((), "not shown: 0 of 8 pairs"),
    ],
)
def test_a_difference_is_shown_only_by_eight_pairs_whose_whole_interval_is_on_one_side(differences, verdict):
    first = dict.fromkeys(range(len(differences)), 0.5)
    second = {seed: 0.5 + difference for seed, difference in enumerate(differences)}
    assert measures.paired(first, second, is_more_expected=True)["verdict"] == verdict
    answer = measures.paired(first | {9: 0.1}, second, is_more_expected=False)
    assert answer["num_pairs"] == len(differences)  # a seed without a pair is left out
    if differences:
        assert answer["mean"] == pytest.approx(sum(differences) / len(differences))


@pytest.mark.parametrize("letter", sorted(trends.TRENDS))
def test_the_arms_that_are_compared_are_those_of_the_sweep(letter):
    trend = trends.TRENDS[letter]
    sweep = load_sweep(trends.SWEEPS / f"{trend.name}.toml")
    assert {name for each in trend.comparisons for name in (each.first, each.second)} == {arm.name for arm in sweep.arms}
    assert len(sweep.file.seeds) >= 8
    assert trends.PILOT_SEED not in sweep.file.seeds


@pytest.mark.parametrize("letter", [letter for letter, trend in sorted(trends.TRENDS.items()) if trend.begins_as])
def test_trends_that_begin_alike_share_their_cold_start(letter):
    trend = trends.TRENDS[letter]
    sweep, other = (load_sweep(trends.SWEEPS / f"{name}.toml") for name in (trend.name, trend.begins_as))
    assert trend.begins_as < trend.name  # which is run first
    (one, *_), (before, *_) = sweep.arms, other.arms
    for seed in sweep.file.seeds:
        recipe, made = (arm.recipes[seed] for arm in (one, before))
        assert list(recipe.stages)[: num_common(recipe, made)] == ["base", "sft", "before"]


def test_a_cold_start_that_is_there_is_taken_over(tmp_path):
    sweep = load_sweep(trends.SWEEPS / "e-overlong.toml")
    source = RunDirectory(tmp_path / "d-drgrpo" / "grpo-seed-3")
    made = load_sweep(trends.SWEEPS / "d-drgrpo.toml").arms[0].recipes[3].model_dump(mode="json")
    write_json(source.manifest, {"recipe": made})
    for path in (source.metrics, source.events):
        write_text(path, '{"stage": "sft", "step": 1}\n{"stage": "rl", "step": 1}\n')
    for stage in ("base", "sft", "before", "rl"):
        write_json(source.stage(stage).done, {"summary": f"{stage} of grpo", "time_s": 1.0})
    trends.take_over_starts(sweep, tmp_path / "e-overlong", tmp_path / "d-drgrpo", command="")
    for arm in ("filter_off", "filter_on"):
        run = RunDirectory(tmp_path / "e-overlong" / f"{arm}-seed-3")
        assert [stage for stage in ("base", "sft", "before", "rl") if run.stage(stage).done.exists()] == [
            "base",
            "sft",
            "before",
        ]
        assert [line["stage"] for line in read_lines(run.metrics)] == ["sft"]
        assert not (tmp_path / "e-overlong" / f"{arm}-seed-4").exists()


def test_hard_and_soft_credit_are_compared_with_at_least_four_updates_a_step():
    for arm in load_sweep(trends.SWEEPS / "c-credit.toml").arms:
        stage = arm.recipes[0].stages["rl"].config
        assert stage.updates_per_step * stage.epochs >= 4


def run_with(path, *, accuracy, num_calls):
    """A run of one step, validated after it."""
    run = RunDirectory(path)
    for stage in ("before", "after"):
        write_json(run.stage(stage).evaluation, {"accuracy": accuracy if stage == "after" else 0.2, "tool_calls_mean": 1.0})
    rollout = {"key": key(0), "prompt_ids": [0], "turns": [turn(3, 1, cached=0)] * num_calls, "forked_at": 0}
    path = run.stage("rl").rollouts(1)
    write_text(path, json.dumps({"rollout": {"trajectory": rollout}}) + "\n")
    write_text(path.with_suffix(".ledger.jsonl"), "".join(json.dumps(opened(1, number)) + "\n" for number in range(num_calls)))
    write_json(run.stage("rl").selection(1), {"step": 1, "groups": [{"rollouts": [{"key": key(0)}]}]})
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
    assert results["figures"]["flat_prefilled_tokens at the budget"] == {"grpo": {0: 3.5}, "arpo": {0: 3}}  # half of 1 + 3 x 2
