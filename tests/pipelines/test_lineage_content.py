"""What a stage stands on besides its keys: the code that makes it, the user's own modules, data sets, what parents made."""

from __future__ import annotations

import json
import shutil

import pytest

import strop
from scripted_runs import RECIPE, answer, make_recipe, run_recipe
from strop.config import validate
from strop.errors import RunError
from strop.evaluation.leaderboard import gather
from strop.pipelines import lineage
from strop.pipelines.lineage import lineages
from strop.pipelines.recipe import Recipe, resolve
from strop.pipelines.stage import weights_digest
from strop.runs import RunDirectory, read_json, write_json


def lineages_of(run, **root):
    return lineages(validate(Recipe, resolve(RECIPE | root), place="test"), RunDirectory(run))


def digests(run, **root):
    return {name: each["digest"] for name, each in lineages_of(run, **root).items()}


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


def test_the_code_of_a_stage_is_told_by_its_source_since_many_commits_have_one_version(package, tmp_path):
    before = lineages_of(tmp_path / "run")["rl"]["code"]
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "rewards.pyc").write_bytes(b"compiled")
    lineage._source_digest.cache_clear()
    assert lineages_of(tmp_path / "run")["rl"]["code"] == before
    (package / "rewards.py").write_text("WEIGHT = 2\n")
    lineage._source_digest.cache_clear()
    after = lineages_of(tmp_path / "run")["rl"]["code"]
    assert after["strop"] == before["strop"]
    assert after["source"] != before["source"]


def test_other_code_makes_no_stage_stale_that_began_with_what_there_was(run, package):
    began_with = read_json(run.stage("rl").lineage)["code"]
    assert lineages_of(run.path)["rl"]["code"] == began_with
    assert lineage.why_stale(run, make_recipe(), lineages(make_recipe(), run)) == {}
    shutil.rmtree(run.stage("after").path)
    assert lineages_of(run.path)["after"]["code"]["source"] != began_with["source"]


OWN = {
    "a reward": {"reward": {"kind": "function", "function": "own_part:judge"}},
    "a part of a reward": {"reward": {"kind": "sum", "parts": {"own": {"kind": "function", "function": "own_part:judge"}}}},
    "a source of tasks": {"tasks": {"kind": "python", "source": "own_part:tasks"}},
    "a tool": {"tools": {"own": {"kind": "function", "function": "own_part:count"}}},
}


@pytest.mark.parametrize("root", OWN.values(), ids=OWN)
def test_a_module_of_the_users_own_counts_by_its_contents(root, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "own_part.py"
    module.write_text("A = 1\n")
    before = digests(tmp_path / "run", **root)
    assert digests(tmp_path / "run", **root) == before
    module.write_text("A = 2  # longer\n")
    after = digests(tmp_path / "run", **root)
    assert all(before[name] != after[name] for name in before)


def test_a_module_that_changes_makes_stale_what_it_judged(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "own_judge.py"
    module.write_text("def judge(task, trajectory):\n    return 1.0\n")
    recipe = make_recipe(reward={"kind": "function", "function": "own_judge:judge"})
    run = run_recipe(tmp_path / "run", recipe, until="rl").run
    module.write_text("def judge(task, trajectory):\n    return 0.0\n")
    with pytest.raises(RunError, match=r"stale:\n  rl: own_judge:judge \(stages\.rl\.reward\.function|rl: own_judge:judge"):
        run_recipe(run.path, recipe)


def test_a_stage_that_an_older_strop_began_is_not_held_to_what_it_did_not_record(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_part.py").write_text("A = 1\n")
    root = OWN["a reward"]
    older = RunDirectory(tmp_path / "run")
    for name, each in lineages_of(older.path, **root).items():
        write_json(older.stage(name).lineage, each | {"code": {"strop": "0.1.0"}, "data": {}})
    now = lineages_of(older.path, **root)
    assert [each["data"] for each in now.values()] == [{}] * len(now)


def test_a_local_directory_that_is_named_as_a_data_set_of_the_hub_counts_by_its_contents(tmp_path):
    rows = tmp_path / "dataset" / "train.jsonl"
    rows.parent.mkdir()
    rows.write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    hub = {"tasks": {"kind": "hub", "name": str(rows.parent)}}
    before = digests(tmp_path / "run", **hub)
    rows.write_text(json.dumps({"question": "1+2", "answer": "3"}) + "\n")
    after = digests(tmp_path / "run", **hub)
    assert all(before[name] != after[name] for name in before)
    elsewhere = {"tasks": {"kind": "hub", "name": "openai/gsm8k"}}
    assert lineages_of(tmp_path / "run", **elsewhere)["rl"]["data"] == {}


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
    before, digest = digests(tmp_path / "run", **of_model(model)), lineage.model_digest(model)
    (model / name).write_text("another")
    after = digests(tmp_path / "run", **of_model(model))
    assert all(before[stage] != after[stage] for stage in before)
    assert lineage.model_digest(model) != digest


def test_a_models_card_is_no_part_of_it(model, tmp_path):
    before, digest = digests(tmp_path / "run", **of_model(model)), lineage.model_digest(model)
    for name in ("README.md", "lineage.json"):
        (model / name).write_text("another")
    assert digests(tmp_path / "run", **of_model(model)) == before
    assert lineage.model_digest(model) == digest


def test_a_stage_that_an_older_strop_began_is_held_to_the_weights_of_its_model_alone(model, tmp_path):
    older = RunDirectory(tmp_path / "run")
    now = lineages_of(older.path, **of_model(model))["base"]
    facts = {key: value for key, value in now["data"]["path"].items() if key != "has_tokenizer"}
    write_json(older.stage("base").lineage, now | {"data": {"path": facts | {"digest": weights_digest(model)}}})
    begun = lineages_of(older.path, **of_model(model))["base"]
    assert begun["data"]["path"]["digest"] == weights_digest(model)
    (model / "tokenizer.json").write_text("another")
    assert lineages_of(older.path, **of_model(model))["base"]["digest"] == begun["digest"]
    (model / "model.safetensors").write_bytes(b"other weights")
    assert lineages_of(older.path, **of_model(model))["base"]["digest"] != begun["digest"]


def never_right(conversation, draw):
    return answer(draw.choice([0, 1]))


def test_a_stage_that_is_made_anew_and_comes_out_otherwise_makes_stale_what_stood_on_it(run):
    """Nothing of the recipe has changed: the digests alone of what was made tell it."""
    before = read_json(run.stage("rl").lineage)
    run_recipe(run.path, start="rl", until="rl", say=never_right)
    after = read_json(run.stage("rl").lineage)
    assert before["digest"] == after["digest"]
    assert before["product"] != after["product"]
    assert read_json(run.stage("after").stale) == {"because": "rl was made anew"}
    assert not run.stage("before").stale.exists()
    assert any("after/eval/result.json: stale" in told for told in gather([run.path]).left_out)
    with pytest.raises(RunError, match=r"stale:\n  after: rl was made anew\nMake them anew with --from after"):
        run_recipe(run.path, say=never_right)
    run_recipe(run.path, start="after", say=never_right)
    assert not run.stage("after").stale.exists()
    assert read_json(run.stage("after").lineage)["parent_products"] == {"rl": after["product"]}


def test_a_stage_that_comes_out_as_it_was_makes_nothing_stale(run):
    before = read_json(run.stage("rl").lineage)["product"]
    run_recipe(run.path, start="rl", until="rl")
    assert read_json(run.stage("rl").lineage)["product"] == before
    assert not run.stage("after").stale.exists()
    run_recipe(run.path)


def test_what_stands_on_a_stale_stage_is_stale_too(run):
    """Two steps away: sft was made anew, so rl and what measures it are stale."""
    run_recipe(run.path, start="sft", until="sft")
    sft = read_json(run.stage("sft").lineage)
    write_json(run.stage("rl").lineage, read_json(run.stage("rl").lineage) | {"parent_products": {"sft": "of other weights"}})
    lineage.write_lineage(run, "sft", sft, product=run.stage("sft").model)
    because = {name: read_json(run.stage(name).stale)["because"] for name in ("rl", "after")}
    assert because == {"rl": "sft was made anew", "after": "rl is stale"}
    stale = lineage.why_stale(run, make_recipe(), lineages(make_recipe(), run))
    assert stale == because
