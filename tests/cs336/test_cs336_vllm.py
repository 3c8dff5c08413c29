"""The hand-out's layout of section 3: a policy in one process, and a `vllm.LLM` that gets its weights."""

import ast
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("STROP_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
PROGRAM = """
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.cs336 import init_vllm, load_policy_into_vllm_instance


def main(model):
    llm = init_vllm(model, "cpu", seed=1, gpu_memory_utilization=0.1, enforce_eager=True, max_model_len=256)
    from vllm import SamplingParams

    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(model)
    question = "The capital of France is"
    prompt = tokenizer(question, return_tensors="pt").input_ids

    def both():
        said = llm.generate([question], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids
        whole = policy.generate(prompt, do_sample=False, max_new_tokens=8, min_new_tokens=8)
        return list(said), whole[0, prompt.shape[1]:].tolist()

    first = both()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.ndim == 2:
                weight.add_(0.02 * torch.randn_like(weight))
    load_policy_into_vllm_instance(policy, llm)
    print("SAID", [first, both()])


if __name__ == "__main__":
    main(sys.argv[1])
"""


def test_an_engine_says_what_the_policy_says_before_and_after_an_update(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [PYTHON, program, ROOT / "models/smollm2-135m"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    [said] = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]
    before, after = ast.literal_eval(said)
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert before != after
