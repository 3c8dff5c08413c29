"""What a stage reads besides its keys: the user's own modules, data, models, and results of other stages."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import strop
from scripted_runs import RECIPE, answer, make_recipe, recipe_of, run_recipe
from strop.config import validate
from strop.errors import RunError
from strop.evaluation.results import gather
from strop.recipe.recipe import Recipe, resolve
from strop.run_directory import RunDirectory, read_json, write_json
from strop.runs import lineage
from strop.runs.lineage import digest_of, lineages


def lineages_of(run, **root):
    return lineages(validate(Recipe, resolve(RECIPE | root), place="test"), RunDirectory(run))


def digests(run, **root):
    return {
        name: {key: facts["digest"] for key, facts in each["files"].items()} for name, each in lineages_of(run, **root).items()
    }


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of strop that lies elsewhere."""
    directory = tmp_path / "strop"
    directory.mkdir()
    (directory / "__init__.py").write_text("")
    (directory / "rewards.py").write_text("WEIGHT = 1\n")
    monkeypatch.setattr(strop, "__file__", str(directory / "__init__.py"))
    lineage._source_digest.cache_clear()
    yield directory
    lineage._source_digest.cache_clear()


def test_the_code_of_a_stage_is_recorded_by_the_content_of_its_source(package, tmp_path):
    before = lineages_of(tmp_path / "run")["rl"]["code"]
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "rewards.pyc").write_bytes(b"compiled")
    lineage._source_digest.cache_clear()
    assert lineages_of(tmp_path / "run")["rl"]["code"] == before
    (package / "rewards.py").write_text("WEIGHT = 2\n")
    lineage._source_digest.cache_clear()
    after = lineages_of(tmp_path / "run")["rl"]["code"]
    assert after["strop"] == before["strop"]
    assert after["digest"] != before["digest"]


def test_other_code_makes_no_stage_stale_that_began_with_what_there_was(run, package):
    began_with = read_json(run.stage("rl").lineage)["code"]
    assert lineages_of(run.path)["rl"]["code"] == began_with
    assert lineage.why_stale(run, make_recipe(), lineages(make_recipe(), run)) == {}
    shutil.rmtree(run.stage("after").path)
    assert lineages_of(run.path)["after"]["code"]["digest"] != began_with["digest"]


OWN = {
    "a reward": {"reward": {"kind": "function", "function": "own_part:judge"}},
    "a part of a reward": {"reward": {"kind": "sum", "parts": {"own": {"kind": "function", "function": "own_part:judge"}}}},
    "a tool": {"tools": {"own": {"kind": "function", "function": "own_part:count"}}},
    "an engine": {"engine": {"kind": "own_part:Own"}},
}
ENGINE = """from strop import Engine
class Own(Engine):
    async def open(self, model, *, detokenize): ...
"""


@pytest.mark.parametrize("root", OWN.values(), ids=OWN)
def test_a_module_of_the_users_own_counts_by_its_contents(root, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "own_part.py"
    module.write_text(f"{ENGINE}A = 1\n")
    before = digests(tmp_path / "run", **root)
    assert digests(tmp_path / "run", **root) == before
    module.write_text(f"{ENGINE}A = 2\n")
    assert digests(tmp_path / "run", **root) != before
    module.write_text(f"# A comment.\n\n{ENGINE}A = 1\n")
    assert digests(tmp_path / "run", **root) == before
    sys.modules.pop("own_part", None)  # an engine's is imported with the recipe


def test_a_docstring_counts_only_in_a_tool_where_it_is_part_of_the_prompt(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "own_part.py"
    module.write_text("def judge():\n    return 1\n")
    before = [digests(tmp_path / "run", **OWN[each]) for each in ("a reward", "a tool")]
    module.write_text('def judge():\n    """Judge."""\n    return 1\n')
    after = [digests(tmp_path / "run", **OWN[each]) for each in ("a reward", "a tool")]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]


def test_a_module_that_changes_makes_stale_what_it_judged(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "own_judge.py"
    module.write_text("def judge(task, trajectory):\n    return 1.0\n")
    recipe = make_recipe(reward={"kind": "function", "function": "own_judge:judge"})
    run = run_recipe(tmp_path / "run", recipe, until="rl").run
    module.write_text("def judge(task, trajectory):\n    return 0.0\n")
    with pytest.raises(RunError, match=r"stale:\n  rl: own_judge:judge \(stages\.rl\.reward\.function|rl: own_judge:judge"):
        run_recipe(run.path, recipe)


def test_a_local_directory_that_is_named_as_a_data_set_of_the_hub_counts_by_its_contents(tmp_path):
    rows = tmp_path / "dataset" / "train.jsonl"
    rows.parent.mkdir()
    rows.write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    hub = {"tasks": {"kind": "hub", "name": str(rows.parent)}}
    before = digests(tmp_path / "run", **hub)
    rows.write_text(json.dumps({"question": "1+2", "answer": "3"}) + "\n")
    after = digests(tmp_path / "run", **hub)
    assert before["rl"] != after["rl"]
    elsewhere = {"tasks": {"kind": "hub", "name": "openai/gsm8k"}}
    assert lineages_of(tmp_path / "run", **elsewhere)["rl"]["files"] == {}


@pytest.fixture
def model(tmp_path):
    """A model directory, as far as its files go."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "lineage.json"):
        (directory / name).write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def of_model(model, **root):
    """The scripted recipe from a local model on."""
    stages = {"base": {"kind": "model", "path": str(model)}, "before": RECIPE["stages"]["before"] | {"init": "base"}}
    return RECIPE | {"stages": stages} | root


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_local_model_counts_with_its_tokenizer_its_chat_template_and_its_config(model, tmp_path, name):
    before, digest = digests(tmp_path / "run", **of_model(model)), digest_of(model)
    (model / name).write_text("another")
    after = digests(tmp_path / "run", **of_model(model))
    assert before["base"] != after["base"]
    assert digest_of(model) != digest


def test_a_models_card_is_no_part_of_it(model, tmp_path):
    before, digest = digests(tmp_path / "run", **of_model(model)), digest_of(model)
    for name in ("README.md", "lineage.json"):
        (model / name).write_text("another")
    assert digests(tmp_path / "run", **of_model(model)) == before
    assert digest_of(model) == digest


def never_right(conversation, draw):
    return answer(draw.choice([0, 1]))


def test_a_rerun_stage_with_another_result_makes_its_dependents_stale(run):
    """The recipe is the same: only the digests of the result differ."""
    before = read_json(run.stage("rl").lineage)
    run_recipe(run.path, start="rl", until="rl", say=never_right)
    after = read_json(run.stage("rl").lineage)
    assert before["keys"] == after["keys"]
    assert before["product"] != after["product"]
    assert read_json(run.stage("after").stale) == {"because": "rl has another result"}
    assert not run.stage("before").stale.exists()
    assert any("after/eval/result.json: stale" in told for told in gather([run.path]).left_out)
    with pytest.raises(RunError, match=r"stale:\n  after: rl has another result\nRerun them with --from after"):
        run_recipe(run.path, say=never_right)
    run_recipe(run.path, start="after", say=never_right)
    assert not run.stage("after").stale.exists()
    assert read_json(run.stage("after").lineage)["parents"] == {"rl": after["product"]}


def test_what_depends_on_a_stale_stage_is_stale_too(run):
    of_rl = read_json(run.stage("rl").lineage)
    write_json(run.stage("rl").lineage, of_rl | {"parents": {"sft": {"model.safetensors": "another"}}})
    recipe = make_recipe()
    stale = lineage.why_stale(run, recipe, lineages(recipe, run))
    assert stale == {"rl": "sft has another result", "after": "rl is stale"}
    lineage.mark_stale(run, recipe, stale)
    assert {name: read_json(run.stage(name).stale)["because"] for name in stale} == stale


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit of the weights": ("model.safetensors", flip_a_bit, "changed"),
    "a tokenizer that is gone": ("tokenizer.json", Path.unlink, "removed"),
    "a file that was added": ("added_tokens.json", lambda path: path.write_text("{}"), "added"),
}


@pytest.mark.parametrize(("name", "damage", "what"), DAMAGES.values(), ids=DAMAGES)
def test_a_model_that_changed_after_its_stage_finished_is_refused(run, name, damage, what):
    path = run.stage("sft").model / name
    shutil.rmtree(run.stage("rl").path)
    shutil.rmtree(run.stage("after").path)
    damage(path)
    with pytest.raises(RunError) as caught:
        run_recipe(run.path)
    assert str(caught.value) == (f"{path}: {what} since stage sft finished. Restore it, or rerun the stage with --from sft.")
    assert not run.stage("rl").path.exists()


def test_rows_that_were_cut_after_their_stage_finished_are_refused(tmp_path):
    """At the end of a line, where every reader takes the file for whole."""
    stages = {name: RECIPE["stages"][name] for name in ("base", "sft")}
    stages["hard"] = {"kind": "filter", "init": "sft", "num_tasks": 6, "k": 2, "min_right": 0, "max_right": 2}
    mixed = {"mixed": {"kind": "mix", "data": ["hard"]}}
    recipe = recipe_of(stages | mixed)
    run = run_recipe(tmp_path / "run", recipe, until="hard").run
    rows = run.stage("hard").path / "data" / "kept.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    assert len(lines) > 1
    rows.write_text("".join(lines[:-1]))
    with pytest.raises(RunError, match=rf"^{rows}: changed since stage hard finished.* with --from hard\.$"):
        run_recipe(run.path, recipe)


def digests_with_corpus(path, run):
    return digests(run, tools={"search": {"kind": "search", "backend": {"kind": "bm25", "path": str(path)}}})


@pytest.mark.parametrize("place", ["corpus.jsonl", "corpus/part/rows.jsonl"])
def test_what_a_tool_reads_is_part_of_what_every_stage_reads(tmp_path, place):
    corpus = tmp_path / place.partition("/")[0]
    rows = tmp_path / place
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text('{"id": "1", "text": "a"}\n')
    before = digests_with_corpus(corpus, tmp_path / "run")
    assert digests_with_corpus(corpus, tmp_path / "run") == before
    rows.write_text('{"id": "1", "text": "b"}\n')
    after = digests_with_corpus(corpus, tmp_path / "run")
    assert all(before[name] != after[name] for name in before)
