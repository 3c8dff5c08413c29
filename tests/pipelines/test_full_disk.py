"""A full disk costs the step it falls into, and nothing that was written before."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripted_runs import untimed
from strop.run_directory import read_lines

HERE = Path(__file__).parent
UNSHARE = ["unshare", "--map-root-user", "--user", "--mount"] if os.getuid() else ["unshare", "--mount"]


def on_a_small_disk(directory, size, script):
    """Run a shell script where `directory` is a disk of `size` of its own."""
    directory.mkdir()
    mount = f"mount -t tmpfs -o size={size} small {directory}"
    attempt = subprocess.run([*UNSHARE, "sh", "-c", mount], capture_output=True, text=True, check=False)
    if attempt.returncode:
        pytest.skip(f"this machine allows no small disk to be mounted: {attempt.stderr.strip()}")
    command = [*UNSHARE, "sh", "-c", f"{mount} && {script}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_a_full_disk_at_any_moment_loses_nothing_and_the_run_goes_on_to_the_same_end(scripted_run, tmp_path):
    disk = tmp_path / "disk"
    done = on_a_small_disk(disk, "4m", f"{sys.executable} {HERE / 'full_disk.py'} {disk}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["told"]) >= 12
    # A try writes under a name of its own: `.step-000001.f71cd563.tmp`.
    told = [re.sub(r"(/\.step-\d+)\.\w+\.tmp", r"\1.tmp", message) for message in found["told"]]
    for message in told:
        assert f"{disk / 'run'}" in message
        assert "cannot be written: No space left on device. What was written before is intact. Free space there" in message
    for place in (
        "stages/base/model",
        "metrics.jsonl",
        "stages/sft/checkpoints/.step-000001.tmp/model",  # safetensors
        "stages/sft/checkpoints/.step-000001.tmp/state",  # moments
        "stages/before/rollouts/step-000000.ledger.jsonl",
        "stages/rl/rollouts/step-000001.jsonl",
        "stages/rl/checkpoints/.step-000001.tmp/state",
    ):
        assert any(f"{disk / 'run' / place}: cannot" in message for message in told), place
    assert found["lost"] == []
    assert found["left"] == []
    assert found["metrics"] == [untimed(line) for line in read_lines(scripted_run.run.metrics)]
    assert found["evaluations"] == [untimed(each) for each in scripted_run.result.evaluations]


@pytest.mark.slow
def test_the_command_on_a_full_disk_exits_with_2_and_goes_on_when_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    strop = f"{sys.executable} -m strop.cli train {HERE / 'tiny.toml'} --runs {disk}"
    script = f"{strop}; echo first $?; mount -o remount,size=64m {disk}; {strop}; echo second $?"
    done = on_a_small_disk(disk, "2m", script)
    assert "first 2" in done.stdout
    assert "second 0" in done.stdout
    assert done.stderr.count("error: ") == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
