"""A recipe whose engine is a vLLM server, from the command line to the last step. Run by `make test-vllm`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.run_directory import read_json, read_lines

TINY = Path(__file__).with_name("tiny.toml")
PYTHON = Path(os.environ.get("STROP_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_two_steps_are_trained_on_what_a_server_samples_from_the_weights_of_the_step_before(tmp_path):
    text = TINY.read_text(encoding="utf-8")
    before, after = text.index("[stages.before]"), text.index("[stages.after]")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text[:before] + text[text.index("[stages.rl]") : after], encoding="utf-8")
    settings = ("kind=vllm", f'python="{PYTHON}"', "eager=true")
    words = [word for setting in settings for word in ("--set", f"engine.{setting}")]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "strop.cli",
            "train",
            str(recipe),
            "--name",
            "run",
            "--runs",
            str(tmp_path),
            "--set",
            "stages.rl.steps=2",
            *words,
        ],
        check=True,
        timeout=380,
    )
    steps = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["stage"] == "rl"]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["rollout/void_fraction"] == 0
        assert line["update/grad_norm"] > 0
        assert line["policy/logprob_gap_max"] < 1e-3  # the second step's are those of weights that the first one published
    assert (tmp_path / "run" / "stages" / "rl" / "model" / "model.safetensors").exists()
    assert read_json(tmp_path / "run" / "stages" / "rl" / "done.json")
