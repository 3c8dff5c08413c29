"""A cold start whose demonstrator calls tools in the form that the prompt asks for."""

from scripted_runs import RECIPE, run_recipe
from strop.config import validate
from strop.recipe.recipe import Recipe, resolve
from strop.run_directory import read_lines

TAGS = 'source = "test"\ncalls = "tags"\n\n[[messages]]\nrole = "user"\ncontent = "{question}"\n'


def test_a_cold_start_under_a_prompt_with_tags_imitates_calls_that_are_tags(tmp_path):
    prompt = tmp_path / "tags.toml"
    prompt.write_text(TAGS)
    demonstrator = {"kind": "arithmetic", "guess_fraction": 0.0, "error_fraction": 0.5}
    sft = RECIPE["stages"]["sft"] | {"demonstrator": demonstrator}
    stages = RECIPE["stages"] | {"sft": sft}
    recipe = validate(Recipe, resolve(RECIPE | {"prompt": str(prompt), "stages": stages}), place="test")
    run = run_recipe(tmp_path / "run", recipe, until="sft").run

    rows = read_lines(run.stage("sft").path / "data" / "demonstrations.jsonl")
    played = [row["trajectory"] for row in rows]
    assert len(played) == 8
    outcomes = []
    for trajectory in played:
        *calls, last = trajectory["turns"]
        assert all(turn["completion_text"].endswith("</python>") for turn in calls)
        assert "tool_call" not in "".join(turn["completion_text"] for turn in trajectory["turns"])
        outcomes += [call["outcome"] for turn in calls for call in turn["calls"]]
        total = calls[-1]["calls"][0]["text"].strip()
        assert f"boxed{{{total}}}" in last["completion_text"]
        assert trajectory["stop_reason"] == "answered"
    assert set(outcomes) == {"stdout", "error"}
    assert [line["step"] for line in read_lines(run.metrics) if line["stage"] == "sft"] == [1, 2]
