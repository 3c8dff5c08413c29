"""The demo's stages on machines in network namespaces: trained over two of them, cut off, and resumed."""

import gzip
import json
import time

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]
SMALL = [
    "stages.base.tiny.num_layers=1",
    "stages.sft.num_demonstrations=400",
    "stages.sft.steps=24",
    "stages.sft.checkpoint_every=8",
    "stages.sft.trainer.optimizer.warmup_updates=4",
    "stages.sft.batch_size=16",
    "sandbox.level=confined",
]
ON_TWO = ["trainer.workers=2", "cluster.trainer_nodes=2"]


def sets(*overrides):
    return [word for override in overrides for word in ("--set", override)]


def weights(run, stage):
    return load_file(run / "stages" / stage / "model" / "model.safetensors")


def losses(run):
    return [json.loads(line)["sft/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run):
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def train(cluster, runs, name, *overrides, **how):
    words = ["train", "recipes/demo.toml", "--runs", runs, "--name", name, "--until", "sft", "--cluster", cluster.address]
    return cluster.run(*words, *sets(*SMALL, *overrides), **how)


@pytest.fixture(scope="module")
def divided(cluster, tmp_path_factory):
    """SFT over two machines."""
    runs = tmp_path_factory.mktemp("divided")
    train(cluster, runs, "divided", *ON_TWO)
    return runs / "divided"


def test_training_over_two_machines_and_by_two_ranks_of_one_is_training_in_one_process(cluster, divided, tmp_path):
    words = ["train", "recipes/demo.toml", "--runs", tmp_path, "--until", "sft"]
    cluster.run(*words, "--name", "whole", *sets(*SMALL))
    cluster.run(*words, "--name", "ranks", *sets(*SMALL, "trainer.workers=2"))  # by a Ray of their own
    whole, expected = tmp_path / "whole", losses(tmp_path / "whole")
    for run in (divided, tmp_path / "ranks"):
        assert losses(run) == pytest.approx(expected, abs=1e-3)
        for name, tensor in weights(run, "sft").items():
            assert torch.allclose(tensor, weights(whole, "sft")[name], atol=2e-3), name


def _rollouts(run):
    """The tokens and the reward of each rollout of the first step."""
    [path] = (run / "stages" / "rl" / "rollouts").glob("step-000001.jsonl*")
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    found = [json.loads(line)["rollout"] for line in lines]
    return {
        json.dumps(each["trajectory"]["key"]): (
            [turn["completion"]["ids"] for turn in each["trajectory"]["turns"]],
            each["reward"],
        )
        for each in found
    }


def test_ranks_engines_and_code_services_on_three_machines_play_what_one_process_plays(cluster, tmp_path):
    words = ["train", "recipes/demo.toml", "--runs", tmp_path, "--until", "rl"]
    shorter = 'stages.rl.reward={kind="sum", parts={length={kind="soft_overlong", max_tokens=60, cache_tokens=50}}}'
    rollouts = ["stages.rl.steps=3", "stages.rl.tasks_per_step=4", "stages.rl.group_size=4"]
    small = [*SMALL, "stages.before.num_tasks=4", *rollouts, shorter]  # so soon no answer is right
    cluster.run(*words, "--name", "whole", *sets(*small))
    layout = ["stages.rl.trainer.workers=2", "engine.replicas=2", "cluster.trainer_nodes=2", "cluster.sandbox_nodes=2"]
    cluster.run(*words, "--name", "spread", "--cluster", cluster.address, *sets(*small, *layout))
    whole, spread = (_rollouts(tmp_path / name) for name in ("whole", "spread"))
    assert len(whole) == 32  # twice the group, of which GRPO-RoC keeps half
    assert whole == spread
    expected, before = (weights(tmp_path / "whole", stage) for stage in ("rl", "sft"))
    for name, tensor in weights(tmp_path / "spread", "rl").items():
        assert not torch.allclose(before[name], expected[name], atol=1e-4), name
        assert torch.allclose(tensor, expected[name], atol=1e-4), name
    for run in (tmp_path / "whole", tmp_path / "spread"):
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rewards = [line["rollout/reward_mean"] for line in steps if line["stage"] == "rl"]
        assert rewards[0] + 0.05 < rewards[-1]
    placed = [event["nodes"] for event in events(tmp_path / "spread") if event["event"] == "placed" and event["stage"] == "rl"]
    assert placed == [
        [
            "198.18.0.1: 1 trainer rank, 1 engine",
            "198.18.0.2: 1 trainer rank, 1 code service",
            "198.18.0.3: 1 engine, 1 code service",
        ]
    ]
    assert not [event for event in events(tmp_path / "spread") if event["event"] == "engine_lost"]


def _losses(run):
    return [event for event in events(run) if event["event"] == "stage_restarted"]


def test_a_rank_that_is_cut_off_is_named_and_training_goes_on_from_the_checkpoint(cluster, divided, tmp_path):
    """Killed and stopped ones are in test_lost_machines.py."""
    words = ["--runs", tmp_path, "--name", "lost", "--until", "sft", "--cluster", cluster.address]
    process = cluster.strop("train", "recipes/demo.toml", *words, *sets(*SMALL, *ON_TWO))
    try:
        checkpoint = tmp_path / "lost" / "stages" / "sft" / "checkpoints" / "step-000008"
        deadline = time.monotonic() + 150
        while not checkpoint.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.05)
        happened = time.time()
        cluster.machines.cut(1)
        said, _ = process.communicate(timeout=250)
    finally:
        process.kill()
        cluster.machines.mend(1)
    assert process.returncode == 0, said
    [loss] = _losses(tmp_path / "lost")
    assert "rank 1 of 2 of the trainer (process" in loss["reason"]
    assert f"on {cluster.machines.nodes[1].address})" in loss["reason"]
    assert loss["from_step"] >= 8
    assert loss["time"] - happened < 15  # it names it in 5 s; the rest is the end of the other ranks
    for name, tensor in weights(tmp_path / "lost", "sft").items():
        assert torch.allclose(tensor, weights(divided, "sft")[name], atol=1e-6), name
