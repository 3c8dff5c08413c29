"""What `strop train --dry-run` tells: the stages that would run, what they lack, and how much memory they may take."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strop.cli import app
from strop.pipeline.plan import plan
from strop.recipe.load import load_recipe
from strop.recipe.stage import Machine
from strop.stages.model import tiny_llama_config

TINY = Path(__file__).with_name("tiny.toml")


def planned(*overrides):
    return {stage.name: stage for stage in plan(load_recipe(TINY, overrides))}


@pytest.mark.parametrize(
    ("words", "told", "untold"),
    [
        ([], ["base", "rl", "after"], []),
        (["--until", "rl"], ["base", "rl"], ["after"]),
        (["--from", "rl"], ["rl", "after"], ["base"]),
    ],
)
def test_the_stages_that_would_run_are_told_and_no_other(words, told, untold):
    result = CliRunner().invoke(app, ["train", str(TINY), "--dry-run", *words])
    assert result.exit_code == 0, result.output
    first_words = {line.split()[0] for line in result.output.splitlines() if line.strip()}
    assert first_words >= set(told)
    assert first_words.isdisjoint(untold)


def test_a_stage_that_is_not_there_is_refused_as_when_training():
    result = CliRunner().invoke(app, ["train", str(TINY), "--dry-run", "--until", "afer"])
    assert "--until afer: no such stage. Did you mean 'after'?" in str(result.exception)


def test_a_directory_without_weights_is_told(tmp_path):
    sizes = load_recipe(TINY).stages["base"].config.tiny
    tiny_llama_config(sizes, vocab_size=64, eos_token_id=2).save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(re.sub(r"(?<=kind = \"model\"\n).*\n.*\n.*\n", f'path = "{tmp_path / "model"}"\n', TINY.read_text()))
    told = plan(load_recipe(recipe))[0].arithmetic
    assert told.startswith(f"{tmp_path / 'model'}: NO WEIGHTS there")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    assert plan(load_recipe(recipe))[0].arithmetic == str(tmp_path / "model")


def test_a_hub_that_cannot_be_reached_is_told_once_and_in_the_plan(monkeypatch):
    """Nothing listens at the address; the waits between tries take no time."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setenv("COLUMNS", "300")
    zero_shot = Path(__file__).parents[2] / "recipes" / "presets" / "cs336-zero-shot.toml"
    done = CliRunner().invoke(app, ["train", str(zero_shot), "--dry-run"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.count("Qwen/Qwen2.5-Math-1.5B: NOT FOUND, taken as 1.5 B parameters.") == 1


@pytest.mark.parametrize(
    ("num_tasks", "told", "num_rollouts"),
    [(100, "10 tasks x 2 rollouts = 20 rollouts, tools real", 20), (3, "3 tasks x 2 rollouts = 6 rollouts, tools real", 6)],
)
def test_an_evaluation_of_a_file_is_planned_for_the_rows_that_are_there(num_tasks, told, num_rollouts, tmp_path):
    stage = planned(*held_out(tmp_path, num_rows=10), f"stages.after.num_tasks={num_tasks}")["after"]
    assert stage.arithmetic == told
    assert stage.tokens == num_rollouts * 128


@pytest.mark.parametrize(
    ("filtered", "told"), [("", "10 tasks"), ("num_tasks=4,", "4 tasks"), ("num_tasks=12,data=['hard'],", "up to 12 tasks")]
)
def test_a_filter_of_a_file_is_planned_for_the_rows_that_are_there_and_not_for_those_that_are_still_to_be_made(
    filtered, told, tmp_path
):
    tasks = f"tasks={{kind='jsonl',path={str(rows(tmp_path, 10))!r}}}"
    words = [
        f"stages.hard={{kind='filter',init='sft',{tasks}}}",
        f"stages.easy={{kind='filter',init='sft',k=2,{filtered}{tasks}}}",
    ]
    assert planned(*words)["easy"].arithmetic.startswith(f"{told} x 2 rollouts = ")


def rows(directory, num):
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 1", "answer": f"{n + 1}"}) + "\n" for n in range(num)))
    return path


def held_out(directory, *, num_rows):
    path = str(rows(directory, num_rows))
    return [f"stages.after.tasks={{kind='jsonl',path={path!r},test_path={path!r}}}"]


def test_rl_on_a_file_is_planned_with_its_passes_over_the_rows_that_are_there(tmp_path):
    tasks = f"{{kind='jsonl',path={str(rows(tmp_path, 10))!r}}}"
    stage = planned(f"stages.rl.tasks={tasks}", "stages.rl.steps=5", "stages.rl.tasks_per_step=4")["rl"]
    assert "; 2.0 passes over 10 tasks" in stage.arithmetic
    assert "passes" not in planned()["rl"].arithmetic


def test_rl_on_published_tasks_is_planned_with_its_passes_over_each_of_them():
    """DeepSeek-R1's 10 400 updates of 16 a step, whose problems stand in for its own: 26, 17 and 15 of 58."""
    *_, stage = plan(load_recipe(Path(__file__).parents[2] / "recipes" / "presets" / "r1-zero.toml"), only=["rl"])
    num = 10_400 // 16 * 512
    assert (
        f"; {num * 26 / 58 / 14_116:.1f} passes over 14116 tasks of math; {num * 17 / 58 / 5000:.1f} passes" in stage.arithmetic
    )
    assert "of logic" not in stage.arithmetic  # made without end
    part = planned('stages.rl.tasks={kind="hub", dataset="gsm8k", limit=100}')["rl"]
    assert "passes" not in part.arithmetic


@pytest.mark.parametrize(
    ("words", "share", "tokens"),
    [
        ([], "58%", 2 * (128 + 6 * 128)),  # two groups of six rows of 128 + 128 tokens
        (["stages.rl.trainer.max_tokens_per_microbatch=700"], "67%", 2 * (2 * 128 + 6 * 128)),  # four rows of a group, and two
        (["stages.rl.trainer.packing=false"], "100%", 12 * 256),
        (["stages.rl.branching={initial_rollouts=3}"], "at most 58%", 2 * (128 + 6 * 128)),
        (["engine.max_length=130"], "100%", 12 * 130),  # two tokens of a prompt are not worth sharing
    ],
)
def test_rl_is_planned_with_each_prompt_once_a_group(words, share, tokens):
    recipe = load_recipe(TINY, words)
    estimate = recipe.stages["rl"].plan("rl", recipe.for_stage("rl"), Machine())
    assert estimate.lines[0].startswith(f"distinct tokens of an update: {share}, an estimate with full-length prompts (")
    assert estimate.trained.tokens_of_update == tokens


def test_the_memory_of_rl_is_that_of_distinct_tokens():
    """34 float32 values of each token, channel and layer; a micro-batch would hold all 12 rows of 256 tokens."""
    shared, rows = (planned(f"stages.rl.trainer.packing={each}")["rl"].memory_mib for each in ("true", "false"))
    assert (rows - shared) * 2**20 == pytest.approx((12 * 256 - 2 * 7 * 128) * 34 * 64 * 2 * 4)
