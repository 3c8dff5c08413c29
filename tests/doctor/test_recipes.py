"""What the doctor says of healthy recipes, and of recipes whose mistake is in the file."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from strop.cli import app
from strop.doctor import CHECKS, examine_file
from strop.recipe.load import load_recipe

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def test_a_healthy_recipe_has_every_check_made_and_no_problem(examine_with, recipe_path):
    diagnosis = examine_with(of=load_recipe(recipe_path))  # on a sandbox of its own
    assert [finding.check for finding in diagnosis.findings] == list(CHECKS)
    assert not diagnosis.problems
    assert {piece.origin for piece in diagnosis.rollout if piece.is_trained} == {"sampled"}
    assert {piece.origin for piece in diagnosis.rollout} == {"prompt", "forced", "sampled", "observation"}


def own_prompt(tmp_path, **keys):
    path = tmp_path / "mine.toml"
    said = "".join(f"{key} = {value!r}\n" for key, value in {"source": "me", **keys}.items())
    path.write_text(said + 'messages = [{role = "user", content = "{question}"}]\n')
    return f"stages.rl.prompt={path}"


@pytest.mark.parametrize(
    ("calls", "written"),
    [
        ("json", '<tool_call>\n{"name": "python", "arguments": {"code": "print(6*7)", "input": ""}}\n</tool_call>'),
        ("tags", "<python>print(6*7)</python>"),
    ],
)
def test_the_call_is_written_as_the_prompt_has_calls_written(examine_with, load, tmp_path, calls, written):
    diagnosis = examine_with(of=load(own_prompt(tmp_path, calls=calls)))
    assert [problem.detail for problem in diagnosis.problems] == []
    assert [piece.text for piece in diagnosis.rollout if piece.origin == "forced"] == [written]
    assert any("42" in piece.text for piece in diagnosis.rollout if piece.origin == "observation")


def test_a_prompt_without_tools_has_no_call_tried(examine_with, load, tmp_path):
    diagnosis = examine_with(of=load(own_prompt(tmp_path, calls="none")))
    assert [problem.detail for problem in diagnosis.problems] == []
    assert {piece.origin for piece in diagnosis.rollout} == {"prompt", "sampled"}
    (finding,) = [finding for finding in diagnosis.findings if finding.check == "tool round trip"]
    assert finding.detail.startswith("not made: the prompt lists no tools")


def test_where_no_tool_runs_python_none_is_called(examine_with):
    diagnosis = examine_with(lambda parts: replace(parts, tools=()))
    assert [problem.detail for problem in diagnosis.problems] == []
    assert {piece.origin for piece in diagnosis.rollout} == {"prompt", "sampled"}


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), "bfloat16"),
        (lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)), "float32"),
    ],
    ids=["llama in bfloat16", "qwen2 in float32"],
)
def test_a_random_model_of_another_origin_has_no_problem(examine_with, tiny_directory, load, make, dtype):
    torch.manual_seed(0)
    low = load(f"engine.dtype={dtype}", f"trainer.precision={dtype}")
    assert not examine_with(of=low, model=tiny_directory(make())).problems


@pytest.mark.parametrize(
    ("override", "check", "detail", "remedy"),
    [
        ("stages.rl.grup_size=1", "recipe", "stages.rl.grup_size: unknown key.", "Did you mean 'group_size'?"),
        ("stages.rl.group_size=1", "recipe", "group_size is 1", 'advantage = "none"'),
        ("sandbox.url=foo", "recipe", "sandbox.url: 'foo' is no address of a code service.", "'http://127.0.0.1:8517'"),
        (
            "sampling.max_tokens=500",
            "batch arithmetic",
            "together 514; the limit is engine.max_length = 512",
            "engine.max_length",
        ),
        (
            'stages.rl.trainer.optimizer={schedule="cosine", warmup_updates=9}',
            "recipe",
            "warmup_updates is 9",
            "Lower warmup_updates",
        ),
        ("stages.base.path=nowhere", "recipe", "stages.base: give either path", "Mend what the message names"),
    ],
)
def test_a_mistake_in_the_recipe_is_the_one_thing_reported(recipe_path, service, run, override, check, detail, remedy):
    (problem,) = run(examine_file(recipe_path, [service, override], model=None)).problems
    assert problem.check == check
    assert detail in problem.detail
    assert remedy in problem.remedy


@pytest.mark.parametrize("kind", ["sft", "distil"])
def test_a_warmup_past_the_end_is_arithmetic_under_every_name_of_sft(recipe_path, run, kind):
    optimizer = '{optimizer={schedule="cosine", warmup_updates=9}}'
    student = f'stages.student={{kind="{kind}", init="base", data=["base"], steps=2, trainer={optimizer}}}'
    (problem,) = run(examine_file(recipe_path, [student], model=None)).problems
    assert problem.check == "recipe"
    assert "warmup_updates is 9" in problem.detail


def test_a_model_that_is_not_there_is_a_finding(recipe_path, run, tmp_path):
    (problem,) = run(examine_file(recipe_path, [], model=tmp_path)).findings
    assert problem.check == "model"
    assert "no config.json there" in problem.detail


def test_tasks_that_are_not_there_are_told_with_their_stage(recipe_path, service, run):
    missing = 'stages.rl.tasks={kind="jsonl", path="nowhere.jsonl", question="q", answer="a"}'
    (problem,) = run(examine_file(recipe_path, [service, missing], model=None)).findings
    assert problem.detail.startswith("stages.rl.tasks: ")
    assert "nowhere.jsonl" in problem.detail


CORPUS = 'tools.wiki={kind="search", backend={kind="kept", path="nowhere.json"}}'
NO_INTERPRETER = ("engine.kind=vllm", "engine.python=/nowhere/python")


def made(diagnosis):
    return [finding.check for finding in diagnosis.findings if finding.is_made and not finding.is_problem]


def test_a_corpus_that_is_not_there_is_a_problem_of_its_tool_and_every_check_is_made(recipe_path, service, run):
    limits = "stages.rl.limits.max_calls_per_tool={wiki=3}"
    diagnosis = run(examine_file(recipe_path, [service, CORPUS, limits], model=None))
    (problem,) = diagnosis.problems
    assert problem.check == "tools.wiki"
    assert problem.detail.endswith("nowhere.json: no such file of search results.")
    assert made(diagnosis) == [name for name in CHECKS if name not in ("your code", "prompts")]  # which have nothing to do


def test_an_interpreter_that_is_not_there_is_a_problem_of_the_engine_and_the_other_checks_are_made(recipe_path, service, run):
    diagnosis = run(examine_file(recipe_path, [service, *NO_INTERPRETER], model=None))
    (problem,) = diagnosis.problems
    assert problem.check == "engine"
    assert problem.detail.startswith("engine.python: /nowhere/python does not exist.")
    assert made(diagnosis) == ["chat template", "loss mask", "tool round trip", "reward", "batch arithmetic"]
    not_made = [finding.check for finding in diagnosis.findings if "the recipe's engine cannot be opened" in finding.detail]
    assert not_made == ["log-probs", "publication"]


def test_what_is_not_there_is_named_with_what_ends_the_examination(recipe_path, service, run, tmp_path):
    problems = run(examine_file(recipe_path, [service, CORPUS], model=tmp_path)).problems
    assert [problem.check for problem in problems] == ["tools.wiki", "model"]


def test_the_demo_is_healthy_and_the_command_shows_its_mask():
    result = CliRunner().invoke(app, ["doctor", "recipes/demo.toml", "--set", "threads=1"])
    assert result.exit_code == 0, result.output
    assert "No problem found." in result.output
    assert "⟦" in result.output  # the tokens that are trained on, where there are no colours


def test_the_command_ends_with_2_when_there_is_a_problem_and_shows_the_remedy(recipe_path):
    result = CliRunner().invoke(app, ["doctor", str(recipe_path), "--set", "stages.rl.updates_per_step=3"])
    assert result.exit_code == 2
    shown = " ".join(result.output.split())
    assert "stages.rl: tasks_per_step is 4" in shown
    assert "Remedy: Change one of them." in shown
    assert "1 problem found." in shown
