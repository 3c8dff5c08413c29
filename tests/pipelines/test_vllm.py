"""A recipe whose engine is a vLLM server, from the command line to the last step. Run by `make test-vllm`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.analysis.read import read_analysis
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop.ledger import read_rollouts

TINY = Path(__file__).with_name("tiny.toml")
PYTHON = Path(os.environ.get("STROP_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()


def train(folder, *settings):
    """The metrics of two RL steps of the tiny recipe on vLLM."""
    text = TINY.read_text(encoding="utf-8")
    before, after = text.index("[stages.before]"), text.index("[stages.after]")
    recipe = folder / "recipe.toml"
    recipe.write_text(text[:before] + text[text.index("[stages.rl]") : after], encoding="utf-8")
    settings = ("engine.kind=vllm", f'engine.python="{PYTHON}"', "engine.eager=true", "stages.rl.steps=2", *settings)
    command = [sys.executable, "-m", "strop.cli", "train", str(recipe), "--name", "run", "--runs", str(folder)]
    subprocess.run([*command, *(word for each in settings for word in ("--set", each))], check=True, timeout=380)
    steps = [line for line in read_lines(folder / "run" / "metrics.jsonl") if line["stage"] == "rl"]
    assert [line["step"] for line in steps] == [1, 2]
    return steps


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_two_steps_are_trained_on_what_a_server_samples_from_the_weights_of_the_step_before(tmp_path):
    for line in train(tmp_path, "stages.rl.log_entropies=true"):
        assert line["rollout/void_fraction"] == 0
        assert line["update/grad_norm"] > 0
        assert line["tokens/forking_fraction"] > 0  # by the trainer's entropies: the server reports none
        assert line["policy/logprob_gap_max"] < 1e-3  # the second step's are those of weights that the first one published
    assert (tmp_path / "run" / "stages" / "rl" / "model" / "model.safetensors").exists()
    assert read_json(tmp_path / "run" / "stages" / "rl" / "done.json")
    assert read_analysis(RunDirectory(tmp_path / "run"), stage="rl").total.num_rollouts > 0


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_rollouts_are_in_flight_over_a_publication_and_no_token_is_older_than_k(tmp_path):
    """One conversation at a time, so that those of the second step outlast the update on the first by far."""
    ahead = "stages.rl.async_rollouts={max_staleness=1, partial=true}"
    for line in train(tmp_path, ahead, "engine.slots=1", "stages.rl.updates_per_step=1"):
        step = line["step"]
        assert line["rollout/void_fraction"] == 0
        assert line["update/grad_norm"] > 0
        rollouts = read_rollouts(RunDirectory(tmp_path / "run").stage("rl").rollouts(step))
        completions = [turn.completion for scored in rollouts for turn in scored.trajectory.turns]
        versions = {version for completion in completions for version, _ in completion.spans}
        assert all(sum(num for _, num in completion.spans) == len(completion.logprobs) for completion in completions)
        assert versions == set(range(step))


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_an_adapter_is_sampled_with_while_the_next_is_trained(tmp_path):
    """With few slots, as above. Which turns of the second step begin before the publication is a matter of time."""
    ahead = "stages.rl.async_rollouts={max_staleness=1, partial=true}"
    lora = "stages.rl.trainer.lora={rank=4, alpha=8}"
    for line in train(tmp_path, ahead, lora, "engine.slots=4", "stages.rl.updates_per_step=1"):
        assert line["rollout/void_fraction"] == 0
        assert line["update/grad_norm"] > 0
        rollouts = read_rollouts(RunDirectory(tmp_path / "run").stage("rl").rollouts(line["step"]))
        completions = [turn.completion for scored in rollouts for turn in scored.trajectory.turns]
        assert {len(completion.spans) for completion in completions} == {1}  # a turn keeps its adapter
        assert {version for completion in completions for version, _ in completion.spans} <= set(range(line["step"]))
    [log] = (tmp_path / "run" / "stages" / "rl" / "logs").glob("engine-0*.log")
    assert log.read_text(encoding="utf-8").count("Loaded new LoRA adapter") >= 2
    assert (tmp_path / "run" / "stages" / "rl" / "adapter").exists()


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_rollouts_of_arpo_branch_by_entropies_that_are_estimated(tmp_path):  # "top10": recipes/test_presets_run.py
    branching = 'stages.rl.branching={initial_rollouts=3, base_probability=0.9, scale="sum"}'
    for line in train(tmp_path, 'stages.rl.method="arpo"', branching):
        assert line["rollout/void_fraction"] == 0
        assert line["policy/logprob_gap_max"] < 1e-3
        assert line["branching/decisions"] > 0
        assert line["branching/branches_per_task"] > 0
        assert line["branching/tokens_shared"] > 0
        assert line["branching/weighted_delta_h_abs_max"] > 0
