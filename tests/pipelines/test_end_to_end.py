"""A whole recipe in seconds, on a scripted engine: what a run leaves on disk, and that it learned."""

import json
import shutil

import pytest
import transformers
from killing import open_tool_calls
from safetensors.torch import load_file

from scripted_runs import assert_same_training, falling, lines_of, make_recipe, run_recipe, untimed
from strop.recipe.load import recipe_of
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop.ledger import read_rollouts
from strop.types import StopReason, ToolOutcome

COST_KEYS = {
    "update/tokens_per_s",
    "update/flops_per_s",
    "update/distinct_token_share",
    "machine/flop_utilisation",
    "machine/peak_memory_mib",
}
ROLLOUT_KEYS = {
    *COST_KEYS,
    "rollout/reward_mean",
    "rollout/accuracy",
    "rollout/tool_error_rate",
    "rollout/tool_error_rate_correct",
    "rollout/tool_calls_mean",
    "rollout/tool_calls_dispatched",
    "rollout/length_tokens_mean",
    "rollout/turns_mean",
    "rollout/truncated_fraction",
    "rollout/void_fraction",
    "rollout/tokens_per_s",
    "groups/all_right",
    "groups/all_wrong",
    "groups/used",
    "groups/rollouts_used",
    "reward/accuracy_mean",
    "reward/format_mean",
    "reward/called_mean",
    "update/loss",
    "update/grad_norm",
    "update/learning_rate",
    "update/skipped",
    "update/stuck_steps",
    "policy/entropy_nats",
    "policy/ratio",
    "policy/ratio_p01",
    "policy/ratio_p99",
    "policy/ratio_max",
    "policy/clip_fraction_low",
    "policy/clip_fraction_high",
    "policy/old_kl_nats",
    "policy/sampler_kl_nats",
    "rollout/length_tokens_mean_correct",
    "rollout/length_tokens_mean_wrong",
    "policy/logprob_gap_mean",
    "policy/logprob_gap_max",
    "time/rollout_s",
    "time/score_s",
    "time/update_s",
    "time/publish_s",
    "time/tool_latency_mean_s",
    "time/tool_latency_p50_s",
    "time/tool_latency_p95_s",
    "time/step_s",
    "time/elapsed_s",
}


def test_a_run_leaves_a_directory_that_other_programs_can_read(scripted_run):
    run = scripted_run.run
    assert {entry.name for entry in run.path.iterdir()} == {
        ".lock",
        "manifest.json",
        "metrics.jsonl",
        "updates.jsonl",
        "events.jsonl",
        "report.html",
        "stages",
    }
    assert run.report.stat().st_size > 0
    for name in ("base", "sft", "rl"):
        model = run.stage(name).model
        transformers.AutoModelForCausalLM.from_pretrained(model)
        assert transformers.AutoTokenizer.from_pretrained(model).chat_template
        assert read_json(run.stage(name).done)["model"] == f"stages/{name}/model"
    assert not list(run.path.rglob("*.tmp"))
    assert [name for name, _ in scripted_run.progress.stages] == ["base", "sft", "before", "rl", "after"]
    started = [line["stage"] for line in read_lines(run.events) if line["event"] == "stage_started"]
    finished = [line["stage"] for line in read_lines(run.events) if line["event"] == "stage_finished"]
    assert started == finished == ["base", "sft", "before", "rl", "after"]


def test_the_manifest_says_what_was_run_and_is_enough_to_run_it_again(scripted_run):
    manifest = read_json(scripted_run.run.manifest)
    assert manifest["format"] == 1
    assert (manifest["name"], manifest["seed"], manifest["command"]) == ("scripted", 0, "strop train scripted.toml")
    assert set(manifest["versions"]) == {"strop", "python", "torch", "transformers", "machine", "threads"}
    assert manifest["versions"]["threads"] == "1"
    assert manifest["stages"] == {
        "base": {"kind": "model", "inputs": {}},
        "sft": {"kind": "sft", "init": "base", "inputs": {"init": ["base"]}},
        "before": {"kind": "eval", "init": "sft", "inputs": {"init": ["sft"]}},
        "rl": {"kind": "rl", "init": "sft", "inputs": {"init": ["sft"]}},
        "after": {"kind": "eval", "init": "rl", "inputs": {"init": ["rl"]}},
    }
    assert recipe_of(scripted_run.run) == make_recipe()


def test_every_step_is_one_line_of_metrics(scripted_run):
    lines = read_lines(scripted_run.run.metrics)
    assert [(line["stage"], line["step"]) for line in lines] == [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2)]
    assert set(lines[0]) == {
        "stage",
        "step",
        "sft/loss",
        "sft/tokens_per_s",
        "update/grad_norm",
        "update/learning_rate",
        "update/skipped",
        "policy/entropy_nats",
        "time/step_s",
        "time/elapsed_s",
        *COST_KEYS,
    }
    for line in lines[2:]:
        assert set(line) >= ROLLOUT_KEYS
        assert 0 < line["rollout/accuracy"] < 1
        assert 0 < line["rollout/tool_error_rate"] < 1
        assert line["groups/used"] >= 1
        assert line["update/grad_norm"] > 0
        assert line["update/stuck_steps"] == 0
        assert line["update/tokens_per_s"] > 0
        assert line["machine/flop_utilisation"] > 0
        assert line["machine/peak_memory_mib"] > 100


def test_calls_and_their_latency_are_those_of_the_rollouts_on_disk(scripted_run):
    lines = lines_of(scripted_run.run)
    for line in lines:
        rollouts = read_rollouts(scripted_run.run.stage("rl").rollouts(line["step"]))
        latencies = [call.duration_s for scored in rollouts for call in scored.trajectory.calls if call.outcome.is_dispatched]
        assert line["rollout/tool_calls_dispatched"] == len(latencies) > 0
        assert line["time/tool_latency_mean_s"] == pytest.approx(sum(latencies) / len(latencies))
        assert line["time/tool_latency_p50_s"] <= line["time/tool_latency_p95_s"] <= max(latencies) < line["time/rollout_s"]
        in_buckets = {key: count for key, count in line.items() if key.startswith("time/tool_calls/")}
        assert {key.split("/")[2] for key in in_buckets} == {"python"}
        assert sum(in_buckets.values()) == len(latencies)


def test_every_rollout_is_written_down_with_what_became_of_it(scripted_run):
    stage = scripted_run.run.stage("rl")
    for step in (1, 2):
        rollouts = {scored.trajectory.key: scored for scored in read_rollouts(stage.rollouts(step))}
        assert len(rollouts) == 3 * 6
        outcomes = {call.outcome for scored in rollouts.values() for call in scored.trajectory.calls}
        assert outcomes == {ToolOutcome.STDOUT, ToolOutcome.ERROR}
        assert {scored.trajectory.stop_reason for scored in rollouts.values()} <= {StopReason.ANSWERED, StopReason.TURN_LIMIT}
        assert open_tool_calls(stage.rollouts(step).with_suffix(".ledger.jsonl")) == 0
        assert {turn.completion.policy_version for s in rollouts.values() for turn in s.trajectory.turns} == {step - 1}
        selection = read_json(stage.selection(step))
        assert selection["step"] == step
        assert [group["task_index"] for group in selection["groups"]] == [3 * step - 3, 3 * step - 2, 3 * step - 1]
        for group in selection["groups"]:
            assert len(group["rollouts"]) == 6
            rewards = [record["reward"] for record in group["rollouts"]]
            for record in group["rollouts"]:
                scored = next(s for key, s in rollouts.items() if vars_of(key) == record["key"])
                assert scored.reward == record["reward"]
                assert record["reason"]
                if record["is_kept"] and len(set(rewards)) > 1:  # above the mean is good, below is bad
                    assert (record["advantage"] > 0) == (record["reward"] > sum(rewards) / 6)
                else:
                    assert record["advantage"] == 0


def vars_of(key):
    return {"task_index": key.task_index, "attempt": key.attempt, "branch": key.branch}


def test_training_moves_the_weights_and_publishes_every_policy(scripted_run):
    run = scripted_run.run
    base, sft, rl = (load_file(run.stage(name).model / "model.safetensors") for name in ("base", "sft", "rl"))
    assert set(base) == set(sft) == set(rl)
    for name in base:
        assert not base[name].equal(sft[name]), name
        assert not sft[name].equal(rl[name]), name
    _, engine, _ = scripted_run.engines  # of the two evaluations and of RL between them
    assert engine.policy_version == 2
    published = {name.removeprefix("model."): tensor for name, tensor in engine.weights.items()}
    assert all(tensor.equal(published[name.removeprefix("model.")]) for name, tensor in rl.items())
    assert engine._holds == {}  # every conversation was given back


def test_evaluations_have_intervals_and_compare_the_same_tasks(scripted_run):
    before, after = scripted_run.result.evaluations
    for figures, stage in ((before, "before"), (after, "after")):
        assert figures == read_json(scripted_run.run.stage(stage).evaluation)
        assert figures["stage"] == stage
        assert (figures["num_tasks"], figures["k"], figures["num_tasks_void"]) == (3, 2, 0)
        assert figures["accuracy_low"] <= figures["accuracy"] <= figures["accuracy_high"]
    tasks = [
        {s.trajectory.task_id for s in read_rollouts(scripted_run.run.stage(stage).rollouts(0))}
        for stage in ("before", "after")
    ]
    assert tasks[0] == tasks[1]


def test_the_same_command_on_a_finished_run_does_nothing_but_report(scripted_run):
    before = {path: path.read_bytes() for path in scripted_run.run.path.rglob("*.json*") if path.is_file()}
    again = run_recipe(scripted_run.run.path)
    assert again.engines == []
    assert all(summary.endswith("(done before)") for _, summary in again.progress.stages)
    assert {path: path.read_bytes() for path in before} == before
    assert [json.dumps(each) for each in again.result.evaluations] == [
        json.dumps(each) for each in scripted_run.result.evaluations
    ]


def test_a_run_may_be_copied_and_goes_on_from_there(scripted_run, tmp_path):
    copy = RunDirectory(shutil.copytree(scripted_run.run.path, tmp_path / "copy"))
    shutil.rmtree(copy.stage("after").path)
    again = run_recipe(copy.path)
    assert len(again.engines) == 1
    assert untimed(again.result.evaluations[1]) == untimed(scripted_run.result.evaluations[1])


@pytest.mark.parametrize("fall", [{"before": 2}, {"after": 1}], ids=["before its checkpoint", "after its checkpoint"])
def test_a_step_counts_once_whether_it_fell_before_or_after_its_checkpoint(tmp_path, fall):
    recipe = make_recipe(steps=3)
    whole = run_recipe(tmp_path / "whole", recipe).run
    with falling("rl", **fall):
        run_recipe(tmp_path / "run", recipe)
    again = run_recipe(tmp_path / "run", recipe)
    assert_same_training(again.run, whole)
    num_played = sum(request.id.endswith("/0") for request in again.engines[0].requests)
    assert num_played == (18 if "before" in fall else 36)  # of the steps after the last that was played


def test_keys_that_change_no_result_may_change_between_two_tries(scripted_run):
    assert run_recipe(scripted_run.run.path, make_recipe(give_up_after=7, checkpoint_every=2)).engines == []
