"""Claims at small scale: what they measure, and that every sweep compares what its hypothesis names."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scripted_runs import make_recipe, run_recipe
from strop.pipeline.sweep_file import load_sweep
from strop.run_directory import RunDirectory, read_json, read_lines, write_json, write_text
from strop.runs.lineage import num_common

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import faithful  # noqa: E402  (an experiment, found on the path)
import faithful_measures as measures  # noqa: E402  (likewise)


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


def test_the_mean_up_to_a_budget_is_the_area_under_straight_lines():
    curve = [(0.0, 0.0), (10.0, 1.0), (30.0, 0.5)]
    assert measures.mean_up_to(curve, 10.0) == pytest.approx(0.5)
    assert measures.mean_up_to(curve, 20.0) == pytest.approx((5 + 8.75) / 20)  # 1 to 0.75 over the second ten
    assert measures.mean_up_to(curve, 30.0) == pytest.approx((5 + 15) / 30)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.1, 0.2, 0.3), "not shown"),  # 0.2 ± 4.303 x 0.1 / sqrt(3), which holds 0
        ((0.1, 0.2, 0.1, 0.2), "as expected"),
        ((-0.1, -0.2, -0.1, -0.2), "opposite"),
        ((0.4, 0.4), "not shown: 2 of 3 pairs"),
        ((), "not shown: 0 of 3 pairs"),
    ],
)
def test_a_difference_is_shown_only_by_three_pairs_whose_interval_is_on_one_side(differences, verdict):
    first = dict.fromkeys(range(len(differences)), 0.5)
    second = {seed: 0.5 + difference for seed, difference in enumerate(differences)}
    assert measures.paired(first, second, is_more_expected=True)["verdict"] == verdict
    answer = measures.paired(first | {9: 0.1}, second, is_more_expected=False)
    assert answer["num_pairs"] == len(differences)  # a seed without a pair is left out
    if differences:
        assert answer["mean"] == pytest.approx(sum(differences) / len(differences))


def test_the_difference_that_pairs_would_have_shown_is_found_by_four_in_five_experiments():
    values = [0.02, 0.04, 0.06, 0.08, 0.1, 0.04, 0.06, 0.08]
    answer = measures.paired(dict.fromkeys(range(8), 0.0), dict(enumerate(values)), is_more_expected=True)
    draw = np.random.default_rng(0)
    samples = answer["detectable"] + answer["spread"] * draw.standard_normal((4000, 8))
    low = samples.mean(axis=1) - 2.365 * samples.std(axis=1, ddof=1) / 8**0.5
    assert (low > 0).mean() == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("name", sorted(faithful.CLAIMS))
def test_the_arms_that_are_compared_are_those_of_the_sweep(name):
    claim = faithful.CLAIMS[name]
    sweep = load_sweep(faithful.SWEEPS / f"{name}.toml")
    arms = {arm.name for arm in sweep.arms}
    compared = {arm for each in claim.comparisons for arm in (each.first, each.second)}
    assert compared == ({"before", "after"} if name == "r1-zero" else arms)
    assert len(sweep.file.seeds) >= 3
    assert faithful.PILOT_SEED not in sweep.file.seeds


def test_every_sweep_of_a_claim_is_run_and_has_its_hypothesis():
    assert {path.stem for path in faithful.SWEEPS.glob("*.toml")} == set(faithful.CLAIMS)
    written = (ROOT / "experiments" / "hypotheses" / "faithful.md").read_text(encoding="utf-8")
    assert [name for name in faithful.CLAIMS if f"## {name}:" not in written] == []


@pytest.mark.parametrize("name", faithful.SCRIPTS)
def test_a_script_has_its_results_under_its_name_and_command(name):
    script = faithful.SCRIPTS[name][0]
    assert (ROOT / "experiments" / script).exists()
    results = read_json(ROOT / "experiments" / "results" / f"faithful-{name}.json")
    assert results["command"] == f"make experiments-faithful ONLY={name}"


@pytest.mark.parametrize("name", [name for name, claim in faithful.CLAIMS.items() if claim.begins_as])
def test_claims_that_begin_alike_share_their_cold_start(name):
    claim = faithful.CLAIMS[name]
    sweep, other = (load_sweep(faithful.SWEEPS / f"{each}.toml") for each in (name, claim.begins_as))
    (one, *_), (before, *_) = sweep.arms, other.arms
    for seed in sweep.file.seeds:
        recipe, made = (arm.recipes[seed] for arm in (one, before))
        assert list(recipe.stages)[: num_common(recipe, made)] == ["base", "sft", "before"]


def test_a_cold_start_that_is_there_is_taken_over(tmp_path):
    sweep = load_sweep(faithful.SWEEPS / "overlong.toml")
    source = RunDirectory(tmp_path / "drgrpo" / "grpo-seed-3")
    made = load_sweep(faithful.SWEEPS / "drgrpo.toml").arms[0].recipes[3].model_dump(mode="json")
    write_json(source.manifest, {"recipe": made})
    for path in (source.metrics, source.events):
        write_text(path, '{"stage": "sft", "step": 1}\n{"stage": "rl", "step": 1}\n')
    for stage in ("base", "sft", "before", "rl"):
        write_json(source.stage(stage).done, {"summary": f"{stage} of grpo", "time_s": 1.0})
    faithful.take_over_starts(sweep, tmp_path / "overlong", tmp_path / "drgrpo", command="")
    for arm in ("filter_off", "filter_on"):
        run = RunDirectory(tmp_path / "overlong" / f"{arm}-seed-3")
        assert [stage for stage in ("base", "sft", "before", "rl") if run.stage(stage).done.exists()] == [
            "base",
            "sft",
            "before",
        ]
        assert [line["stage"] for line in read_lines(run.metrics)] == ["sft"]
        assert not (tmp_path / "overlong" / f"{arm}-seed-4").exists()


def test_hard_and_soft_credit_are_compared_with_at_least_four_updates_a_step():
    for arm in load_sweep(faithful.SWEEPS / "credit.toml").arms:
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
    figures, _ = faithful.by_tool_calls(runs)
    assert figures[faithful.BUDGET] == {"grpo": {0: pytest.approx(0.4)}, "arpo": {0: 0.8}}
    assert figures[faithful.ON_THE_WAY] == {"grpo": {0: pytest.approx(0.3)}, "arpo": {0: pytest.approx(0.5)}}
    assert figures["generated_tokens at the budget"] == {"grpo": {0: 6}, "arpo": {0: 6}}
    assert figures["flat_prefilled_tokens at the budget"] == {"grpo": {0: 3.5}, "arpo": {0: 3}}  # half of 1 + 2 x 3


def test_the_start_and_the_end_of_a_run_are_compared_by_seed(tmp_path):
    run = run_with(tmp_path / "base", accuracy=0.6, num_calls=1)
    for stage, length in (("before", 40.0), ("after", 50.0)):
        path = run.stage(stage).evaluation
        write_json(path, read_json(path) | {"length_tokens_mean": length})
    claim = faithful.CLAIMS["r1-zero"]
    results = faithful.summarise(claim, {"base": {0: run}}, command="")
    assert [each["by_seed"] for each in results["comparisons"]] == [{0: pytest.approx(0.4)}, {0: 10.0}]
    assert [bar["holds"] for bar in results["bars"].values()] == [False, False]  # of one seed
    assert "not shown: 1 of 3 pairs" in faithful.table("r1-zero", results)
