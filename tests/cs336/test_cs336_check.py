"""`strop cs336 check`: a student's functions against strop's."""

import inspect
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strop.cli import app
from strop.cs336 import adapters
from strop.cs336.check import check_module
from strop.errors import ConfigError, UserError

SIGNATURES = {  # of the course's tests/adapters.py
    "run_tokenize_prompt_and_output": "prompt_strs, output_strs, tokenizer",
    "run_compute_group_normalized_rewards": "reward_fn, rollout_responses, repeated_ground_truths, group_size, advantage_eps,"
    " normalize_by_std",
    "run_compute_entropy": "logits",
    "run_get_response_log_probs": "model, input_ids, labels, return_token_entropy",
    "run_compute_naive_policy_gradient_loss": "raw_rewards_or_advantages, policy_log_probs",
    "run_compute_grpo_clip_loss": "advantages, policy_log_probs, old_log_probs, cliprange",
    "run_compute_policy_gradient_loss": "policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange",
    "run_masked_mean": "tensor, mask, dim",
    "run_sft_microbatch_train_step": "policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant",
    "run_grpo_microbatch_train_step": "policy_log_probs, response_mask, gradient_accumulation_steps, loss_type, raw_rewards,"
    " advantages, old_log_probs, cliprange",
    "run_masked_normalize": "tensor, mask, dim, normalize_constant",
    "get_packed_sft_dataset": "tokenizer, dataset_path, seq_length, shuffle",
    "run_iterate_batches": "dataset, batch_size, shuffle",
    "run_parse_mmlu_response": "mmlu_example, model_output",
    "run_parse_gsm8k_response": "model_output",
    "run_compute_per_instance_dpo_loss": "lm, lm_ref, tokenizer, beta, prompt, response_chosen, response_rejected",
}


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    """The directories of the modules that are checked are found by no later test, nor by its processes."""
    monkeypatch.setattr(sys, "path", sys.path.copy())


def check(path, *options):
    result = CliRunner().invoke(app, ["cs336", "check", str(path), *options])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def written(directory, source, name="mine"):  # written twice in a second, the bytecode of the first source may run
    path = directory / f"{name}.py"
    path.write_text("import torch\nfrom strop import cs336\n\n\n" + source, encoding="utf-8")
    return path


def test_the_adapters_are_all_functions_of_the_courses_file_with_its_arguments():
    assert set(adapters.__all__) == set(SIGNATURES)
    for name, expected in SIGNATURES.items():
        names = list(inspect.signature(getattr(adapters, name)).parameters)
        assert names[: len(expected.split(", "))] == expected.split(", ")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_strops_own_functions_have_no_difference(seed):
    printed = check(Path(adapters.__file__), "--seed", str(seed))
    assert "all 15 functions are equal to strop's" in printed


@pytest.mark.parametrize(
    ("source", "difference"),
    [
        (
            "def compute_entropy(logits):\n    p = logits.softmax(-1)\n    return -(p * p.log()).sum(-1)\n",
            "compute_entropy, logits of 1000, whose exponential overflows: the result\\[0\\] is nan, expected 0.693147",
        ),
        (
            "def run_masked_mean(tensor, mask, dim=None):\n    return (tensor * mask).sum(dim) / mask.shape[dim or 0]\n",
            "masked_mean, dim=None: the result is ",
        ),
        (
            "def masked_normalize(tensor, mask, normalize_constant, dim=None):\n"
            "    return cs336.masked_normalize(tensor, mask, 2 * normalize_constant, dim)\n",
            "masked_normalize, dim=None: the result is ",
        ),
        (
            "def compute_group_normalized_rewards(**given):\n"
            "    return cs336.compute_group_normalized_rewards(**{**given, 'advantage_eps': 0.1})\n",
            r"compute_group_normalized_rewards, random rewards, normalize_by_std=True: the result\[0\]\[0\] is ",
        ),
        (
            "def sft_microbatch_train_step(policy_log_probs, response_mask, gradient_accumulation_steps, **rest):\n"
            "    return -cs336.masked_normalize(policy_log_probs, response_mask, 1.0, -1).mean()"
            " / gradient_accumulation_steps, {}\n",
            r"sft_microbatch_train_step, normalize_constant=1.0: the result\['gradient'\] is None, expected a tensor of shape",
        ),
        (
            "def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):\n"
            "    joined = [prompt + output for prompt, output in zip(prompt_strs, output_strs)]\n"
            "    return cs336.tokenize_prompt_and_output([''] * 2, joined, tokenizer)\n",
            r"tokenize_prompt_and_output, prompts and outputs of several lengths: the result\['response_mask'\]",
        ),
        (
            "def compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange):\n"
            "    return -(policy_log_probs - old_log_probs).exp() * advantages, {}\n",
            "compute_grpo_clip_loss, ratios within and beyond the clip range, advantages of both signs: the result",
        ),
        ("def compute_entropy(logits):\n    raise NotImplementedError\n", "compute_entropy, is not written yet"),
        (
            "def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):\n    pass\n",
            "tokenize_prompt_and_output, prompts and outputs of several lengths: the result is None, expected a dict",
        ),
        (
            "def compute_entropy(logits):\n    return logits.sot(-1)\n",
            "compute_entropy, random logits: it raised AttributeError",
        ),
    ],
)
def test_the_first_difference_is_named(tmp_path, source, difference):
    with pytest.raises(UserError, match=f"1 of 1 functions differ. {difference}"):
        check(written(tmp_path, source))


def test_a_module_without_such_functions_and_one_that_cannot_be_imported_are_named(tmp_path):
    with pytest.raises(ConfigError, match="has none of the functions of the assignment: tokenize_prompt_and_output, "):
        check(written(tmp_path, "x = 1\n"))
    with pytest.raises(ConfigError, match="is no Python file"):
        check(tmp_path / "none.py")
    with pytest.raises(ConfigError, match=r"broken.py, line 5\) raised ZeroDivisionError: division by zero while"):
        check(written(tmp_path, "1 / 0\n", name="broken"))
    with pytest.raises(ConfigError, match=r"unclosed.py, line 5: SyntaxError: '\(' was never closed while .* was imported"):
        check(written(tmp_path, "x = (\n", name="unclosed"))


def test_a_product_with_the_mask_is_a_right_solution(tmp_path):
    source = "def run_masked_mean(tensor, mask, dim=None):\n    return (tensor * mask).sum(dim) / mask.sum(dim)\n"
    assert "all 1 functions are equal" in check(written(tmp_path, source))


def test_the_tutorial_says_what_is_checked(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError) as told:
        check_module(tmp_path / "empty.py")
    checked = set(re.search(r"assignment: (.*)\. Give", str(told.value))[1].split(", "))
    rows = (Path(__file__).parents[2] / "docs" / "guides" / "cs336.md").read_text().splitlines()
    named, others = set(), set()
    for problem, functions, *_, by in (row.strip("| ").split(" | ") for row in rows if "`strop cs336 check`" in row):
        names = set(re.findall(r"`(\w+)`", problem + functions))
        named, others = named | names, others | names.intersection(re.findall(r"`(\w+)`", by))
    assert named - others == checked


def test_a_module_of_a_package_with_a_dataclass_is_imported_as_python_would(tmp_path):
    package = tmp_path / "alignment_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "entropy.py").write_text("from strop.cs336 import compute_entropy\n", encoding="utf-8")
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n{}\n\n"
    source += "@dataclass\nclass Settings:\n    eps: float\n"
    (package / "grpo.py").write_text(source.format("from .entropy import compute_entropy"), encoding="utf-8")
    alone = tmp_path / "torch.py"  # hides no module of that name
    alone.write_text(source.format("from strop.cs336 import compute_entropy"), encoding="utf-8")
    for path in (package / "grpo.py", alone):
        assert "all 1 functions are equal" in check(path)


def test_what_a_model_of_the_library_takes_is_no_difference(tmp_path):
    source = (
        "def get_response_log_probs(model, input_ids, labels, return_token_entropy):\n"
        "    ids = input_ids.to(model.device)\n"
        "    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits\n"
        "    found = {'log_probs': logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]}\n"
        "    return found | ({'token_entropy': cs336.compute_entropy(logits)} if return_token_entropy else {})\n"
    )
    assert "all 1 functions are equal" in check(written(tmp_path, source))


def test_it_may_import_what_stands_next_to_it(tmp_path):
    (tmp_path / "own_entropy.py").write_text("from strop.cs336 import compute_entropy\n", encoding="utf-8")
    printed = check(written(tmp_path, "from own_entropy import compute_entropy as run_compute_entropy\n"))
    assert "all 1 functions are equal" in printed
