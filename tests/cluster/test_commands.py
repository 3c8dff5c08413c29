"""What starts Ray on other people's machines is run on those of this one."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from networks import Machines
from strop.cli import app
from strop.cluster.start import _RAY_VERSION
from strop.errors import UserError

ROOT = Path(__file__).parents[2]
TINY = """
name = "tiny"

[stages.base]
kind = "model"
prompt = "plain"
demonstrator = { kind = "arithmetic" }
tiny = { hidden_size = 32, num_layers = 1, num_heads = 2, intermediate_size = 64, vocab_size = 384 }

[stages.sft]
kind = "sft"
init = "base"
prompt = "plain"
demonstrator = { kind = "arithmetic" }
num_demonstrations = 64
steps = 2
batch_size = 8
trainer = { workers = 2, device = "cpu" }

[cluster]
trainer_nodes = 2

[sandbox]
level = "confined"

[tasks]
kind = "arithmetic"
"""
RL = """
[stages.rl]
kind = "rl"
init = "base"
steps = 2
tasks_per_step = 2
group_size = 2
method = { kind = "grpo" }
trainer = { workers = 16 }

[engine]
kind = "vllm"
python = "python"
replicas = 12
tensor_parallel = 4
"""
# A machine of SLURM: processes and Ray's directory of its own, so that `ray stop` ends no other Ray.
SRUN = """
for machine in {machines}; do
    ip netns exec $machine unshare --mount-proc --pid --fork --kill-child \\
        sh -c 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && "$@"; exit $?' sh "$@" &
    ranks="$ranks $!"
done
for rank in $ranks; do wait $rank || code=$?; done
exit ${{code:-0}}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def said(*words):
    result = CliRunner().invoke(app, ["cluster", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def manifest_of(recipe, *words):
    return yaml.safe_load(said("kuberay", recipe, "--image", "strop:1", "--claim", "work", *words))


def with_commands(directory, commands):
    """Write shell scripts; return the PATH with them."""
    for name, text in commands.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / name).chmod(0o755)
    return os.pathsep.join([str(directory), str(Path(sys.executable).parent), os.environ["PATH"]])


def asked(script):
    """The nodes and the GPUs of each that a script for SLURM asks for."""
    found = (re.search(rf"^#SBATCH --{key}=(\d+)$", script, re.MULTILINE) for key in ("nodes", "gpus-per-node"))
    return tuple(int(each[1]) if each else 0 for each in found)


def test_the_script_for_slurm_asks_for_the_nodes_and_keeps_the_token_on(recipe):
    script = said("slurm", recipe, "--nodes", 8, "--gpus", 4)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert asked(script) == (8, 4)
    assert "export RAY_AUTH_MODE=token\n" in script


@pytest.mark.parametrize("code", [0, 7])
def test_the_job_ends_with_the_exit_code_of_its_command(recipe, tmp_path, code):
    """symmetric-run of Ray 2.60 ends with 1: its own connection breaks when it ends Ray."""
    commands = {
        "srun": 'while [ "$1" != -- ]; do shift; done; shift; "$@"; exit 1',
        "scontrol": "echo 10.0.0.1",
        "ray": "echo token",
        "strop": f"exit {code}",
    }
    path = with_commands(tmp_path, commands)
    environment = {**os.environ, "PATH": path, "SLURM_JOB_NODELIST": "10.0.0.1"}
    assert subprocess.run(["bash", "-c", said("slurm", recipe)], env=environment, check=False).returncode == code


def test_a_recipe_says_how_many_nodes_it_needs(recipe):
    assert asked(said("slurm", recipe)) == (2, 0)
    assert asked(said("slurm", ROOT / "recipes/presets/rstar2-stage1.toml")) == (8, 8)  # of its `hardware`
    assert asked(said("slurm", ROOT / "recipes/presets/rstar2-stage1.toml", "--gpus", 4)) == (16, 4)
    recipe.write_text(TINY.replace("trainer_nodes = 2", "trainer_nodes = 2\nsandbox_nodes = 4") + RL)
    assert asked(said("slurm", recipe)) == (8, 8)  # two for the ranks, two engines on each of six
    assert manifest_of(recipe)["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 7
    with pytest.raises(UserError, match="There are 7 nodes: node 1 with 8 GPUs"):
        said("slurm", recipe, "--nodes", 7)
    with pytest.raises(UserError, match="12 engines with 4 GPUs each on one node"):
        said("slurm", recipe, "--gpus", 2)


def test_keys_that_are_set_count_for_the_size_and_are_set_in_the_job(recipe):
    keys = ["stages.sft.trainer.workers=3", "cluster.trainer_nodes=3", """description="it's #1: {x}" """]
    words = [word for key in keys for word in ("--set", key)]
    command = ["strop", "train", str(recipe), *words, "--cluster", "auto"]
    script = said("slurm", recipe, *words)
    assert asked(script) == (3, 0)
    [line] = [line for line in script.splitlines() if "strop train" in line]
    assert shlex.split(line)[-len(command) - 2 : -2] == command  # before `|| true`
    manifest = manifest_of(recipe, *words)
    assert shlex.split(manifest["spec"]["entrypoint"]) == command
    assert manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 2


def test_the_manifest_for_kubernetes_has_all_nodes_and_a_token_for_each_pod(recipe):
    manifest = manifest_of(recipe, "--nodes", 8, "--gpus", 8)
    assert manifest["metadata"]["name"] == "strop-tiny"
    spec = manifest["spec"]["rayClusterSpec"]
    # With it KubeRay gives a token to all pods, also to the one of `ray job submit`, which has no variables of ours.
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == _RAY_VERSION
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cluster"]
    assert _RAY_VERSION.startswith(extra[0].removeprefix("ray>="))
    [workers] = spec["workerGroupSpecs"]
    assert workers["replicas"] == 7
    for group in (spec["headGroupSpec"], workers):
        [container] = group["template"]["spec"]["containers"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" not in variables
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_for_slurm_trains_on_two_machines(recipe, tmp_path):
    """Everything but `srun` and `scontrol` is real; `srun` runs its command on each machine."""
    with Machines(2) as machines:
        commands = {
            "srun": SRUN.format(machines=" ".join(machines.names)),
            "scontrol": f"printf '%s\\n' {' '.join(node.address for node in machines.nodes)}",
        }
        environment = {**os.environ, "PATH": with_commands(tmp_path, commands), "SLURM_JOB_NODELIST": "machine[1-2]"}
        script = subprocess.Popen(
            ["bash", "-c", said("slurm", recipe)],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = script.communicate(timeout=280)
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 0, output[-5000:]
    assert "sft on 198.18.0.1: 1 trainer rank; 198.18.0.2: 1 trainer rank" in output
    assert "sft: 2 updates" in output


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_entrypoint_of_the_manifest_trains_on_local_nodes(recipe, tmp_path):
    """A job of Ray runs it with the variable RAY_ADDRESS."""
    entrypoint = shlex.split(manifest_of(recipe)["spec"]["entrypoint"])
    up = subprocess.Popen(
        [sys.executable, "-m", "strop.cli", "cluster", "up", "--local", "2"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        address = re.search(r" at (\S+)\. Use them", up.stdout.readline())[1]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "RAY_ADDRESS": address}
        done = subprocess.run(entrypoint, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        assert "sft: 2 updates" in done.stdout
        up.terminate()
        assert up.wait(30) == 0
        left = subprocess.run(["pgrep", "-f", address], capture_output=True, text=True, check=False)
        assert not left.stdout, left.stdout
    finally:
        up.kill()
        up.wait()


@pytest.mark.parametrize("is_ci", [False, True])
def test_machines_that_cannot_be_made_are_skipped_and_in_ci_fail(monkeypatch, is_ci):
    monkeypatch.setattr("networks.shutil.which", lambda name: None)
    monkeypatch.delenv("STROP_NEEDS_MACHINES", raising=False)
    if is_ci:
        monkeypatch.setenv("STROP_NEEDS_MACHINES", "1")
    outcome = pytest.fail.Exception if is_ci else pytest.skip.Exception
    with pytest.raises(outcome, match="need root and iproute2"):
        Machines(2).__enter__()
