"""A KL penalty in the reward of a group method, in a run."""

import pytest

from scripted_runs import lines_of, make_recipe, run_recipe
from strop.run_directory import read_json

METHOD = {"kind": "grpo", "advantage": "mean_centered", "kl_coefficient": 0.5, "kl_in": "reward"}


def test_advantages_are_those_of_rewards_less_the_penalty(tmp_path):
    run = run_recipe(tmp_path / "run", make_recipe(method=METHOD, steps=3, trainer={"optimizer": {"lr": 3e-2}})).run
    for step in (1, 2, 3):
        gaps = []
        for group in read_json(run.stage("rl").selection(step))["groups"]:
            kept = [each for each in group["rollouts"] if each["is_kept"]]
            mean = sum(each["reward"] for each in kept) / len(kept)
            gaps += [abs(each["advantage"] - (each["reward"] - mean)) for each in kept]
        if step == 1:
            assert max(gaps) == pytest.approx(0, abs=1e-5)  # the policy still is its reference
        else:
            assert max(gaps) > 1e-3
    assert lines_of(run)[-1]["policy/reference_kl_nats"] > 0
