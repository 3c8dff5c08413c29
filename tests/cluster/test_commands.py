"""What starts Ray on other people's machines is what runs on the nodes of this one."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from strop.cli import app

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
trainer = { workers = 2 }

[sandbox]
level = "confined"

[tasks]
kind = "arithmetic"
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def said(*words):
    result = CliRunner().invoke(app, ["cluster", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_script_for_slurm_asks_for_the_nodes_and_keeps_the_token_on(recipe):
    script = said("slurm", recipe, "--nodes", 8)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "#SBATCH --nodes=8\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "export RAY_AUTH_MODE=token\n" in script
    assert "gpus" not in said("slurm", recipe, "--nodes", 2, "--gpus", 0)


def test_the_manifest_for_kubernetes_has_all_nodes_and_a_token(recipe):
    manifest = yaml.safe_load(said("kuberay", recipe, "--nodes", 8, "--image", "strop:1", "--claim", "work"))
    spec = manifest["spec"]["rayClusterSpec"]
    [workers] = spec["workerGroupSpecs"]
    assert workers["replicas"] == 7
    for group in (spec["headGroupSpec"], workers):
        [container] = group["template"]["spec"]["containers"]
        variables = {each["name"]: each for each in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "tiny-ray", "key": "token"}
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_slurm_and_kubernetes_run_trains_on_local_nodes(recipe, tmp_path):
    """Ray starts on each machine by SLURM's and KubeRay's own commands; here it is `strop cluster up`."""
    script = said("slurm", recipe, "--nodes", 2, "--gpus", 0)
    in_slurm = re.search(r"-- (strop train .*)$", script, re.MULTILINE)[1]
    manifest = yaml.safe_load(said("kuberay", recipe, "--nodes", 2, "--gpus", 0, "--image", "strop:1", "--claim", "work"))
    assert manifest["spec"]["entrypoint"] == in_slurm
    up = subprocess.Popen(
        [sys.executable, "-m", "strop.cli", "cluster", "up", "--local", "2"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        address = re.search(r" at (\S+)\. Use them", up.stdout.readline())[1]
        words = shlex.split(in_slurm.replace("--cluster auto", f"--cluster {address}"))
        command = [sys.executable, "-m", "strop.cli", *words[1:], "--runs", str(tmp_path / "runs")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        assert "sft: 2 updates" in done.stdout
        up.terminate()
        assert up.wait(30) == 0
    finally:
        up.kill()
    time.sleep(1)
    left = subprocess.run(["pgrep", "-f", address], capture_output=True, text=True, check=False)
    assert not left.stdout, left.stdout
