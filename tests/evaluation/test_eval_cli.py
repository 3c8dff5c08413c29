"""The words of `strop eval`: an evaluation without `run`, comparisons and the leaderboard."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strop.cli import app
from strop.evaluation.results import write_eval
from strop.run_directory import write_json


def put(directory, correct):
    problems = [{"question": str(at), "answer": "2", "correct": [each], "parts": {}} for at, each in enumerate(correct)]
    write_eval(directory / "stages" / "test" / "eval", {"accuracy": sum(correct) / len(correct), "benchmark": "sums"}, problems)


def invoke(*words):
    return CliRunner().invoke(app, ["eval", *map(str, words)])


def test_a_recipe_stands_where_a_command_could_with_its_options_before_or_behind_it():
    for words in (("nowhere.toml", "--model", "m"), ("--model", "m", "nowhere.toml"), ("run", "nowhere.toml", "--model", "m")):
        assert "nowhere.toml: no such recipe" in str(invoke(*words).exception)


def test_the_name_of_a_result_tells_models_apart_that_have_the_same_weights(tmp_path, monkeypatch):
    """Under one name the second would be told the first one's result."""
    names = []

    async def evaluate_model(recipe, model, directory, **_):
        names.append(recipe.name)

    monkeypatch.setattr("strop.pipeline.from_python.evaluate_model", evaluate_model)
    recipe = Path(__file__).parents[2] / "recipes" / "demo.toml"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for template in ("{{ messages }}", "{{ messages }}", "{{ tools }}"):
        (tmp_path / "chat_template.jinja").write_text(template)
        found = invoke(recipe, "--model", tmp_path)
        assert found.exit_code == 0
        assert "other evaluations of this recipe (--stage): after" in found.output
        assert f"evaluating {tmp_path} with stage 'before' of {recipe}" in found.output
    assert "other evaluations" not in invoke(recipe, "--model", tmp_path, "--stage", "after").output
    assert names[0] == names[1] != names[2]


def test_compare_prints_a_table_and_json_on_request(tmp_path):
    put(tmp_path / "a", [0, 0, 0, 1])
    put(tmp_path / "b", [1, 1, 1, 1])
    told = invoke("compare", tmp_path / "a", tmp_path / "b").output
    assert "sums: 4 problems in both" in told
    assert (
        "differences in accuracy of 70.0% or more are found with 80% probability" in told
    )  # 2.80 times 0.25, the standard error of three 1s and a 0
    assert "+75.0%" in told
    [accuracy] = json.loads(invoke("compare", tmp_path / "a", tmp_path / "b", "--json").output)["metrics"]
    assert (accuracy["paired"]["num_better"], accuracy["paired"]["p_value"]) == (3, 0.25)


def test_compare_and_the_leaderboard_tell_what_is_stale_and_why(tmp_path, monkeypatch):
    put(tmp_path / "a", [0, 0, 0, 1])
    put(tmp_path / "b", [1, 1, 1, 1])
    both = (tmp_path / "a", tmp_path / "b")
    assert invoke("compare", *both).stderr == ""
    stage = tmp_path / "b" / "stages" / "test"
    write_json(stage / "stale.json", {"because": "rl was made anew"})
    warning = f"warning: {stage}: stale, so its results do not match the recipe: rl was made anew."
    for words in (both, (both[0], stage), (both[0], stage / "eval" / "result.json")):
        found = invoke("compare", *words)
        assert found.stderr == f"{warning} Rerun it: `strop train` with --from test.\n"
        assert "+75.0%" in found.stdout
    monkeypatch.chdir(stage / "eval")
    assert invoke("compare", both[0], "result.json").stderr.startswith(warning)
    found = invoke("compare", *both, "--json")
    assert found.stderr.startswith(warning)
    [told] = json.loads(found.stdout)["stale"]
    assert f"warning: {told}".startswith(warning)
    write_json(tmp_path / "a" / "stages" / "test" / "stale.json", {})
    assert "a/stages/test: stale, so its results do not match the recipe: its inputs have changed. " in (
        invoke("compare", *both).stderr
    )
    (tmp_path / "a" / "stages" / "test" / "stale.json").unlink()
    board = invoke("leaderboard", tmp_path)
    assert board.stderr.startswith("left out: ")
    assert "stale, so it is not ranked: rl was made anew. Rerun it: `strop train` with --from test" in board.stderr
    assert "rl was made anew" in (tmp_path / "leaderboard.html").read_text()


def test_the_leaderboard_is_a_table_a_page_and_a_file(tmp_path):
    put(tmp_path / "a", [0, 1])
    told = invoke("leaderboard", tmp_path).output
    assert "50.0%" in told
    assert "50.0%" in (tmp_path / "leaderboard.html").read_text()
    [entry] = json.loads((tmp_path / "leaderboard.json").read_text())["benchmarks"]["sums"]
    assert entry["accuracy"] == 0.5
    assert invoke("leaderboard", tmp_path, "--out", tmp_path / "board.html").exit_code == 0
    assert (tmp_path / "board.html").exists()


def test_no_detectable_difference_is_above_100_percent(tmp_path):
    put(tmp_path / "a", [0, 1])
    put(tmp_path / "b", [1, 0])  # differences 1 and -1: 2.8 times their standard error is 2.8
    output = invoke("compare", tmp_path / "a", tmp_path / "b").output
    assert "too few problems: no true difference in accuracy is found with 80% probability" in output
    [accuracy] = json.loads(invoke("compare", tmp_path / "a", tmp_path / "b", "--json").output)["metrics"]
    assert accuracy["detectable"] is None


def test_tables_fit_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name, about = "Qwen3-4B-with-a-long-name-\x1b[31m", {"k": 64, "num_tasks": 1319, "temperature": 0.6, "max_tokens": 32768}
    for verdicts, run in (([0, 1, 0, 0], "a"), ([1, 1, 1, 1], "b")):
        put(tmp_path / run, verdicts)
        path = tmp_path / run / "stages" / "test" / "eval" / "result.json"
        share = sum(verdicts) / 4
        interval = {"accuracy_low": share - 0.125, "accuracy_high": share, "maj_at_k": share, "run": name, "prompt": "rstar2"}
        write_json(path, json.loads(path.read_text()) | about | interval)
    for output in (invoke("leaderboard", tmp_path).output, invoke("compare", tmp_path / "a", tmp_path / "b").output):
        table = [line for line in output.splitlines() if "leaderboard.html" not in line]
        assert max(map(len, table)) <= 80
        assert "\x1b" not in output
    assert "1319 × 64" in invoke("leaderboard", tmp_path).output
    assert "12.5% – 25.0%" in invoke("leaderboard", tmp_path).output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.rl.steps=3", "--set stages.rl.steps: only stage 'before' is evaluated."),
        ("stages.before.init=rl", "--set stages.before.init: --model names what is evaluated."),
        ("name=other", "--set name: use --name."),
    ],
)
def test_overrides_without_effect_are_refused(tmp_path, override, message):
    recipe = Path(__file__).parents[2] / "recipes" / "demo.toml"
    assert message in str(invoke(recipe, "--model", tmp_path, "--set", override).exception)
