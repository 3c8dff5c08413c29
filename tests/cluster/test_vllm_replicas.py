"""Two vLLM servers on two nodes: each takes every publication and proves it, and one damaged byte is refused and named."""

import re
import subprocess
import sys

import pytest

from networks import ROOT, Machines, environment
from strop.cluster.start import LocalCluster
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop.ledger import read_rollouts

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make .venv-vllm/.ready` sets up vLLM"),
]
# `strop` where one byte of "model.norm.weight" changes on its way to the other node, in the third publication.
DAMAGING = """
import json, struct, sys
from strop.cli import main
from strop.engine import published_files

collect, copies = published_files.collect, []

def collect_damaged(written, node, num_bytes):
    whole = collect(written, node, num_bytes)
    copies.append(node)
    if node is not None and copies.count(node) == 3:
        [path] = whole.directory.glob("*.safetensors")  # the machines share their disks
        with path.open("r+b") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            start, end = json.loads(file.read(length))["model.norm.weight"]["data_offsets"]
            file.seek(8 + length + end - 1)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
    return whole

published_files.collect = collect_damaged
main()
"""


def steps_of_a_run(place, program, *keys):
    """Run SFT and RL with two vLLM servers on two nodes by `strop` or a program like it. Yield each step of RL: its line, the
    completions and the names of the engines that were busy."""
    text = (ROOT / "tests" / "pipelines" / "tiny.toml").read_text()
    before, after = text.index("[stages.before]"), text.index("[stages.after]")
    (place / "tiny.toml").write_text(text[:before] + text[text.index("[stages.rl]") : after])
    vllm = ["engine.kind=vllm", f'engine.python="{PYTHON}"', "engine.eager=true", "engine.replicas=2"]
    small = [
        "engine.slots=8",
        "stages.sft.steps=30",
        "stages.sft.checkpoint_every=30",
        "stages.rl.updates_per_step=1",
        "sandbox.level=confined",
    ]
    sets = [word for each in (*vllm, *small, *keys) for word in ("--set", each)]
    with Machines(2) as machines, LocalCluster(machines.nodes, cpus=1) as ray:
        words = ["train", place / "tiny.toml", "--runs", place, "--name", "run", "--cluster", ray.address, *sets]
        command = [*machines.nodes[0].prefix, sys.executable, *program, *words]
        subprocess.run(command, check=True, timeout=350, cwd=ROOT, env=environment())
    run = RunDirectory(place / "run")
    for line in [line for line in read_lines(run.metrics) if line["stage"] == "rl"]:
        rollouts = read_rollouts(run.stage("rl").rollouts(line["step"]))
        engines = read_json(run.stage("rl").timeline(line["step"]))["engines"]
        busy = {each["name"] for each in engines if max(each["rows"]) > 0}
        yield line, [turn.completion for each in rollouts for turn in each.trajectory.turns], busy


def check_step(line, completions):
    assert {version for completion in completions for version, _ in completion.spans} == {line["step"] - 1}
    assert line["policy/logprob_gap_max"] < 1e-3  # the servers hold the weights of the trainer
    assert line["update/grad_norm"] > 0


def test_two_replicas_take_the_adapter_of_two_ranks(tmp_path):
    ranks = [
        "stages.rl.steps=2",
        "stages.rl.trainer.workers=2",
        "cluster.trainer_nodes=2",
        "stages.rl.trainer.lora={rank=4, alpha=8}",
    ]
    for line, completions, busy in steps_of_a_run(tmp_path, ["-m", "strop.cli"], *ranks):
        check_step(line, completions)
        assert busy == {"engine-0", "engine-1"}
    run = RunDirectory(tmp_path / "run")
    placed = [event["nodes"] for event in read_lines(run.events) if event["event"] == "placed"]
    assert placed[-1] == ["198.18.0.1: 1 trainer rank, 1 engine", "198.18.0.2: 1 trainer rank, 1 engine"]
    for number in range(2):
        [log] = (run.stage("rl").path / "logs").glob(f"engine-{number}-server.log")
        assert log.read_text(encoding="utf-8").count("Loaded new LoRA adapter") == 3  # before the two steps, and after each
    assert (run.stage("rl").path / "adapter" / "adapter_config.json").exists()


def test_two_replicas_on_two_nodes_take_publications_and_a_damaged_byte_is_refused_and_named(tmp_path):
    (tmp_path / "damaging.py").write_text(DAMAGING)
    steps = list(steps_of_a_run(tmp_path, [tmp_path / "damaging.py"]))
    run = RunDirectory(tmp_path / "run")
    [placed] = [event["nodes"] for event in read_lines(run.events) if event["event"] == "placed"]
    assert placed == ["198.18.0.1: 1 engine", "198.18.0.2: 1 engine"]
    [lost] = [event["reason"] for event in read_lines(run.events) if event["event"] == "engine_lost"]
    engine, node, tensor = r"engine engine-1 \(process \d+", r" on 198\.18\.0\.2\)", r"model\.norm\.weight\."
    assert re.fullmatch(
        f"{engine}{node}: the published weights are not proven: .* were damaged after they were written: {tensor}", lost
    )
    for line, completions, busy in steps:
        check_step(line, completions)
        assert busy >= {"engine-0", "engine-1"} if line["step"] < 3 else "engine-1" not in busy
