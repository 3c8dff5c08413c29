"""PPO as a stage: what a critic changes in a run, and that it is resumed with the run."""

import asyncio
import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from scripted_runs import RECIPE as SCRIPTED
from scripted_runs import Watching, answer, assert_same_training, falling, lines_of, make_recipe, recipe_of, run_recipe
from strop.errors import CannotLearnError
from strop.pipeline.run import train
from strop.recipe.load import load_recipe
from strop.reports.trackers import Progress
from strop.run_directory import read_json, read_lines

RECIPE_STAGES = SCRIPTED["stages"]
METHOD = {"kind": "ppo", "kl_coefficient": 0.01}
CRITIC = {"alone_steps": 1, "optimizer": {"lr": 1e-2, "schedule": "cosine"}}
RECIPE = {
    "method": METHOD,
    "steps": 3,
    "keep_checkpoints": 2,
    "tasks_per_step": 4,
    "group_size": 2,
    "updates_per_step": 2,
    "trainer": {"optimizer": {"lr": 1e-2}, "critic": CRITIC},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("ppo") / "run", make_recipe(**RECIPE)).run


def test_the_critic_has_the_first_steps_to_itself(whole):
    first, *later = lines_of(whole)
    assert "update/loss" not in first
    assert later[-1]["critic/value"] != 0
    assert all(line["update/grad_norm"] > 0 for line in later)
    assert all(line["critic/skipped"] == 0 and math.isfinite(line["critic/loss"]) for line in [first, *later])
    assert {"critic/explained_variance", "critic/clip_fraction", "critic/return", "policy/reference_kl_nats"} <= later[
        -1
    ].keys()
    counted = [read_json(whole.stage("rl").checkpoint(step) / "trainer.json") for step in (1, 2)]
    assert [(each["num_updates"], each["critic"]["num_updates"]) for each in counted] == [(0, 2), (2, 4)]


def test_each_update_of_the_critic_has_a_row_of_its_own(whole):
    rows = [row for row in read_lines(whole.updates) if row["role"] == "critic"]
    assert [(row["step"], row["place"], row["update"]) for row in rows] == [
        (step, place, 2 * (step - 1) + place) for step in (1, 2, 3) for place in (1, 2)
    ]
    assert not [row for row in read_lines(whole.updates) if row["role"] == "policy" and row["step"] == 1]
    for line in lines_of(whole):
        mine = [row["critic/loss"] for row in rows if row["step"] == line["step"]]
        assert sum(mine) / 2 == pytest.approx(line["critic/loss"])


def test_rollouts_are_shown_with_the_advantages_that_the_critic_left(whole):
    groups = read_json(whole.stage("rl").selection(3))["groups"]
    advantages = [rollout["advantage"] for group in groups for rollout in group["rollouts"]]
    assert len(set(advantages)) > 2  # rewards are 0 and 1, and values differ
    assert min(advantages) < 0 < max(advantages)


def test_a_run_with_a_critic_resumes_bit_for_bit(whole, tmp_path):
    with falling("rl", before=2):
        run_recipe(tmp_path / "run", make_recipe(**RECIPE))
    assert_same_training(run_recipe(tmp_path / "run", make_recipe(**RECIPE)).run, whole)


def test_a_critic_starts_from_the_reward_model_that_a_stage_trained(tmp_path):
    words = [("yes", "no"), ("right", "wrong"), ("true", "false"), ("sure", "never")]
    pairs = [{"prompt": f"Is it so, {number}?", "chosen": good, "rejected": bad} for number, (good, bad) in enumerate(words)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, pairs)) + "\n")
    helpful = {"kind": "reward_model", "init": "base", "path": str(path), "judged_on": "response", "test_share": 0.25}
    helpful |= {"trainer": {"optimizer": {"lr": 1e-2}}, "epochs": 4, "batch_size": 3}
    rl = RECIPE | {"steps": 2, "critic_init": "helpful", "trainer": {"critic": {"alone_steps": 1}}}
    stages = {"base": RECIPE_STAGES["base"], "helpful": helpful, **{name: RECIPE_STAGES[name] for name in ("sft", "before")}}
    stages |= {"rl": RECIPE_STAGES["rl"] | rl}
    recipe = recipe_of(stages)
    assert "helpful" in [each.stage for each in recipe.stages["rl"].inputs()]
    first, _ = lines_of(run_recipe(tmp_path / "run", recipe).run)
    assert first["critic/value"] != 0  # before its first update a critic with a new head expects nothing


def test_a_critic_to_start_from_wants_a_method_with_one():
    with pytest.raises(ValidationError, match=r"critic_init is set, but method 'grpo' has no critic"):
        make_recipe(critic_init="sft")
    with pytest.raises(ValidationError, match="critic_init"):
        make_recipe(**RECIPE | {"critic_init": "before"})  # makes an evaluation


def test_a_run_whose_rewards_are_all_zero_gives_up_although_a_critic_errs(tmp_path):
    progress = Watching()
    with pytest.raises(CannotLearnError, match="all 8 rewards are 0"):
        run_recipe(
            tmp_path / "run",
            make_recipe(**RECIPE | {"give_up_after": 2}),
            say=lambda conversation, draw: answer(draw.randrange(1000, 9999)),
            progress=progress,
        )
    assert len(progress.warnings) == 2


def test_one_rollout_a_task_and_one_update_a_step_will_do(tmp_path):
    """With KL in the reward, old log-probs are needed before the one update."""
    settings = {"steps": 1, "group_size": 1, "updates_per_step": 1, "trainer": {"critic": {"optimizer": {"lr": 1e-2}}}}
    [line] = lines_of(run_recipe(tmp_path / "run", make_recipe(**RECIPE | settings)).run)
    assert (line["policy/ratio"], line["groups/used"]) == (1.0, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": {"critic": {"alone_steps": 3}}}, r"trainer\.critic\.alone_steps is 3, but the stage has 3 steps"),
        (
            {"trainer": {"critic": {"optimizer": {"schedule": "cosine", "warmup_updates": 6}}}},
            r"trainer\.critic\.optimizer\.warmup_updates is 6, but the stage has 6 updates",
        ),
    ],
)
def test_steps_that_do_not_add_up_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_recipe(**RECIPE | settings)
    make_recipe(**RECIPE | settings | {"method": "grpo"})  # which has no critic


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_recipe_of_ppo_learns_and_its_critic_foresees_some_of_it(tmp_path):
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "ppo.toml", ["seed=1"])
    result = asyncio.run(train(recipe, tmp_path / "run", progress=Progress()))
    before, after = result.evaluations
    assert after["accuracy_low"] > before["accuracy_high"]
    lines = lines_of(result.run)

    def mean(key, part):
        return sum(line[key] for line in part) / len(part)

    assert mean("rollout/reward_mean", lines[-5:]) > mean("rollout/reward_mean", lines[:5]) + 0.2
    assert lines[0]["critic/explained_variance"] <= 0  # the first critic is a constant
    assert mean("critic/explained_variance", lines[-10:]) > 0.03
    assert mean("critic/value", lines[-5:]) == pytest.approx(mean("critic/return", lines[-5:]), abs=0.15)
