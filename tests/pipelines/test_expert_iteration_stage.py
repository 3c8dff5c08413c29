"""Expert iteration on a scripted engine: what a step keeps, imitates and writes down; when it gives up; how it goes on."""

from __future__ import annotations

import dataclasses

import pytest
import transformers
from safetensors.torch import load_file

from scripted_runs import (
    RECIPE,
    RecordingEngine,
    Watching,
    answer,
    assert_same_training,
    falling,
    lines_of,
    recipe_of,
    run_recipe,
)
from strop.config import validate
from strop.errors import CannotLearnError, ConfigError, MachineError
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.conversations import as_demonstration
from strop.stages.expert_iteration import ExpertIteration
from strop.stages.loop import checkpoints
from strop.stages.loop.ledger import read_rollouts
from strop.training.sft import pack_demonstrations

STAGE = {
    "kind": "expert_iteration",
    "init": "base",
    "steps": 2,
    "tasks_per_step": 3,
    "group_size": 4,
    "epochs": 2,
    "batch_size": 3,
    "sampling": {"min_tokens": 4},
    "trainer": {"optimizer": {"lr": 1e-2}},
}


def make_recipe(**keys):
    return recipe_of({"base": RECIPE["stages"]["base"], "ei": STAGE | keys})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("expert") / "run", make_recipe())


def test_a_step_imitates_what_is_right_and_publishes_the_policy_that_this_gives(finished):
    run, [engine] = finished.run, finished.engines
    assert {request.min_tokens for request in engine.requests} == {4}
    transformers.AutoModelForCausalLM.from_pretrained(run.stage("ei").model)
    base, trained = (load_file(run.stage(name).model / "model.safetensors") for name in ("base", "ei"))
    assert all(not base[name].equal(trained[name]) for name in base)
    assert engine.policy_version == 2
    published = {name.removeprefix("model."): tensor for name, tensor in engine.weights.items()}
    assert all(tensor.equal(published[name.removeprefix("model.")]) for name, tensor in trained.items())


def test_the_log_tells_what_was_kept_how_long_it_was_and_how_sure_the_policy_is(finished):
    run = finished.run
    num_updates = 0
    for line in lines_of(run, "ei"):
        rollouts = read_rollouts(run.stage("ei").rollouts(line["step"]))
        right = [scored for scored in rollouts if scored.reward_parts["accuracy"] > 0]
        wrong = [scored for scored in rollouts if scored.reward_parts["accuracy"] == 0]
        assert 0 < len(right) < len(rollouts) == 12
        assert line["rollout/kept_fraction"] == line["rollout/accuracy"] == len(right) / 12
        assert line["groups/rollouts_used"] == len(right)
        for name, of in (("correct", right), ("wrong", wrong)):
            lengths = [scored.trajectory.num_response_tokens for scored in of]
            assert line[f"rollout/length_tokens_mean_{name}"] == pytest.approx(sum(lengths) / len(lengths))
        assert line["rollout/entropy_nats"] == 0.0  # of a script, which is certain of what it says
        assert line["policy/entropy_nats"] > 1  # of the trainer's model, which is not
        assert line["update/loss"] == pytest.approx(-line["policy/logprob_nats"], rel=1e-4)  # no token was masked
        assert line["update/grad_norm"] > 0
        assert (line["update/skipped"], line["update/stuck_steps"]) == (0, 0)
        num_updates += 2 * -(-len(right) // 3)  # epochs x batches of 3
    assert finished.progress.stages[-1] == ("ei", finished.progress.stages[-1][1])
    assert f"2 steps of expert iteration, {num_updates} updates" in finished.progress.stages[-1][1]


def test_the_selection_says_why_each_rollout_was_kept_or_dropped(finished):
    for step in (1, 2):
        for group in read_json(finished.run.stage("ei").selection(step))["groups"]:
            for record in group["rollouts"]:
                assert record["is_kept"] == (record["reward"] == 1.0)
                assert record["advantage"] == float(record["is_kept"])
                assert record["reason"] == ("kept: it is right" if record["is_kept"] else "dropped: it is wrong")


def test_only_tokens_that_the_policy_chose_are_imitated(finished):
    [scored, *_] = read_rollouts(finished.run.stage("ei").rollouts(1))
    trajectory = scored.trajectory
    first = trajectory.turns[0]
    completion = dataclasses.replace(first.completion, is_forced=(True, *first.completion.is_forced[1:]))
    first = dataclasses.replace(first, completion=completion)
    trajectory = dataclasses.replace(trajectory, turns=(first, *trajectory.turns[1:]))
    demonstration = as_demonstration(trajectory)
    assert demonstration.ids == trajectory.ids
    assert demonstration.loss_mask == trajectory.loss_mask
    assert not demonstration.loss_mask[len(trajectory.prompt_ids)]
    assert pack_demonstrations([demonstration]).loss_mask[0].tolist() == trajectory.loss_mask


def wrong(conversation, draw):
    return answer(1000)


def test_steps_with_nothing_right_are_counted_told_and_end_the_run_with_its_state_saved(tmp_path):
    progress = Watching()
    recipe = make_recipe(steps=9, give_up_after=2, checkpoint_every=5)
    with pytest.raises(CannotLearnError, match=r"2 steps in a row .* none of 12 rollouts is right"):
        run_recipe(tmp_path / "run", recipe, say=wrong, progress=progress)
    run = RunDirectory(tmp_path / "run")
    lines = lines_of(run, "ei")
    assert [line["update/stuck_steps"] for line in lines] == [1, 2]
    for line in lines:
        assert line["rollout/kept_fraction"] == 0
        assert line["update/skipped"] == recipe.stages["ei"].config.epochs
        assert not {"update/loss", "update/grad_norm", "rollout/length_tokens_mean_correct"} & line.keys()
    assert all("nothing to imitate" in row["why_skipped"] for row in read_lines(run.updates) if row["stage"] == "ei")
    assert [warning for warning in progress.warnings if "nothing to imitate" in warning] == [
        f"step {step} cannot learn: none of 12 rollouts is right, so there is nothing to imitate." for step in (1, 2)
    ]
    assert checkpoints.latest_step(run.stage("ei")) == 2


def test_a_stage_that_gave_up_goes_on_from_there(tmp_path):
    with pytest.raises(CannotLearnError):
        run_recipe(tmp_path / "run", make_recipe(steps=3, give_up_after=1), say=wrong)
    again = run_recipe(tmp_path / "run", make_recipe(steps=3, give_up_after=3))
    assert [line["update/stuck_steps"] for line in lines_of(again.run, "ei")] == [1, 0, 0]


class FallingEngine(RecordingEngine):
    """Cannot answer some attempts, whoever asks and however often."""

    async def complete(self, request):
        if request.id.split("/")[2] in ("1", "4"):
            raise MachineError("this attempt is never answered")
        return await super().complete(request)


def test_void_rollouts_are_neither_kept_nor_counted_as_wrong(tmp_path):
    done = run_recipe(tmp_path / "run", make_recipe(steps=1), make_engine=FallingEngine)
    [line] = lines_of(done.run, "ei")
    rollouts = read_rollouts(done.run.stage("ei").rollouts(1))
    assert line["rollout/void_fraction"] > 0
    assert not {scored.trajectory.key.attempt for scored in rollouts} & {1, 4}
    assert line["rollout/kept_fraction"] == sum(scored.reward for scored in rollouts) / len(rollouts)


def test_a_step_that_fell_before_its_checkpoint_counts_once(finished, tmp_path):
    with falling("ei", before=1):
        run_recipe(tmp_path / "run", make_recipe())
    again = run_recipe(tmp_path / "run", make_recipe())
    assert_same_training(again.run, finished.run, "ei")
    num_played = sum(request.id.endswith("/0") for request in again.engines[0].requests)
    assert num_played == 12  # of step 2; those of step 1 were finished


def keys_of(stage):
    return {key: value for key, value in stage.items() if key != "kind"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sampling": {"temperature": 0.0}}, "all 4 rollouts of a task would be the same"),
        ({"trainer": {"optimizer": {"schedule": "cosine"}}}, "Set schedule = 'constant'"),
        ({"trainer": {"optimizer": {"warmup_fraction": 0.1}}}, "warmup_updates if there is to be a warm-up"),
        ({"epochs": 0}, "greater than or equal to 1"),
        ({"keep": 2}, "unknown key"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_a_remedy(keys, message):
    tree = {"tasks": RECIPE["tasks"]} | STAGE | keys
    with pytest.raises(ConfigError, match=message):
        validate(ExpertIteration.Config, keys_of(tree), place="recipe")
