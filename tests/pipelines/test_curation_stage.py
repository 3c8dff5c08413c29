"""Curation as a stage of a recipe: what it makes, what it stands on, and that a kill costs nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripted_runs import RECIPE, Watching, run_recipe
from strop.config import validate
from strop.curation.run import run_curation
from strop.errors import ConfigError, NotThere, RunError, TaskError
from strop.pipeline.plan import plan
from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe, resolve
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.runs.manifest import locked
from strop.stages import curation as curation_stage

CURATION = """
name = "sums"

[[sources]]
kind = "jsonl"
path = "sums.jsonl"

[[rules]]
kind = "integer_answer"

[[rules]]
kind = "decontamination"
against = [{ kind = "jsonl", path = "benchmark.jsonl" }]

[[rules]]
kind = "exact_duplicates"
"""
AGREEMENT = """
[[rules]]
kind = "agreement"
outcomes = "none.jsonl"
num_rollouts = 4
min_right = 2
"""


DUPLICATES = '[[rules]]\nkind = "exact_duplicates"\n'
WITH_AGREEMENT = CURATION.replace(DUPLICATES, AGREEMENT + DUPLICATES)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(*pairs):
    return [{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs]


@pytest.fixture
def directory(tmp_path):
    """12 sums, with one of a benchmark, one twice, one whose answer is no integer, and one row that is no problem."""
    rows = sums(*((n + 10, 2 * n + 11) for n in range(12)), (10, 11), (50, 50))
    write(tmp_path / "sums.jsonl", [*rows, {"question": "1+1.5", "answer": "2.5"}, {"question": "", "answer": "1"}])
    write(tmp_path / "benchmark.jsonl", sums((50, 50)))
    (tmp_path / "rules.toml").write_text(CURATION)
    return tmp_path


def recipe_of(directory, *, file="rules.toml", jobs=1, **stages):
    curated = {"kind": "curation", "recipe": str(directory / file), "jobs": jobs}
    tree = RECIPE | {"stages": {"problems": curated, **stages}}
    return validate(Recipe, resolve(tree), place="test")


def kept(run, stage):
    return read_lines(run.stage(stage).path / "data" / "kept.jsonl")


MODELS = {name: RECIPE["stages"][name] for name in ("base", "sft")}


def test_its_problems_are_trained_on_and_its_last_line_says_how_many_fell_to_which_rule(directory):
    rl = RECIPE["stages"]["rl"] | {"data": ["problems"], "steps": 1}
    progress = Watching()
    run = run_recipe(directory / "run", recipe_of(directory, **MODELS, rl=rl), progress=progress).run
    assert dict(progress.stages)["problems"].startswith(
        "12 of 16 problems kept; dropped: 1 by unreadable, 1 by integer_answer, 1 by decontamination, 1 by exact_duplicates ("
    )
    questions = {row["question"] for row in kept(run, "problems")}
    assert questions == {f"{n + 10}+{2 * n + 11}" for n in range(12)}
    assert {each["task"]["question"] for each in read_json(run.stage("rl").selection(1))["groups"]} <= questions
    data = run.stage("problems").path / "data"
    assert {row["rule"] for row in read_lines(data / "dropped.jsonl")} == {
        *("unreadable", "integer_answer", "decontamination", "exact_duplicates")
    }
    assert "Dropped by decontamination" in (data / "report.html").read_text()
    assert not (data / "parts").exists()


@pytest.mark.parametrize(
    ("name", "key"), [("sums.jsonl", r"recipe\.sources\.0\.path"), ("benchmark.jsonl", r"recipe\.rules\.\w+\.against\.0\.path")]
)
def test_a_file_that_changes_makes_it_stale_with_all_that_stands_on_it_and_from_makes_it_anew(directory, name, key):
    recipe = recipe_of(directory, mixed={"kind": "mix", "data": ["problems"]})
    run = run_recipe(directory / "run", recipe).run
    with (directory / name).open("a") as file:
        file.write(json.dumps({"question": "70+7", "answer": "77"}) + "\n")
    with pytest.raises(RunError, match=rf"problems: \S*{name} \({key}\) has other contents(.|\n)*mixed: problems is stale"):
        run_recipe(run.path, recipe)
    run_recipe(run.path, recipe, start="problems")
    assert len(kept(run, "mixed")) == (13 if name == "sums.jsonl" else 12)


def test_rules_over_rollouts_read_those_of_a_stage_of_the_run(directory):
    (directory / "agreed.toml").write_text(WITH_AGREEMENT)
    stages = {
        "answers": {"kind": "filter", "init": "sft", "data": ["problems"], "k": 4, "max_right": 4},
        "agreed": {
            "kind": "curation",
            "recipe": str(directory / "agreed.toml"),
            "outcomes": {"agreement": "answers"},
        },
    }
    recipe = recipe_of(directory, **MODELS, **stages)
    assert list(recipe.stages)[-2:] == ["answers", "agreed"]
    run = run_recipe(directory / "run", recipe).run
    outcomes = {row["task_id"]: row for row in read_lines(run.stage("answers").path / "data" / "outcomes.jsonl")}
    assert len(outcomes) == 12
    agreed = {row["id"] for row in kept(run, "agreed")}
    assert agreed == {name for name, row in outcomes.items() if row["num_right"] >= 2}
    assert 0 < len(agreed) < 12
    lineage = read_json(run.stage("agreed").lineage)
    assert list(lineage["parents"]) == ["answers"]
    assert "recipe.rules.agreement.outcomes" not in lineage["files"]


def test_a_kill_behind_its_result_costs_nothing_where_the_run_is_moved_and_spelt_otherwise(directory, monkeypatch):
    (directory / "agreed.toml").write_text(WITH_AGREEMENT)
    stages = {
        "answers": {"kind": "filter", "init": "base", "data": ["problems"], "k": 4, "max_right": 4},
        "agreed": {"kind": "curation", "recipe": str(directory / "agreed.toml"), "outcomes": {"agreement": "answers"}},
    }
    recipe = recipe_of(directory, base=MODELS["base"], **stages)
    run = run_recipe(directory / "run", recipe).run
    run.stage("agreed").done.unlink()  # as a kill leaves it between curation.json and done.json
    made = (run.stage("agreed").path / "data" / "kept.jsonl").stat().st_mtime_ns
    monkeypatch.chdir(directory)
    Path("run").rename("moved")
    again = run_recipe(Path("moved"), recipe).run.stage("agreed")
    assert again.done.exists()
    assert (again.path / "data" / "kept.jsonl").stat().st_mtime_ns == made


FILES = {
    "a rule that there is none of": (CURATION.replace("integer_answer", "integer_anser"), "Did you mean 'integer_answer'?"),
    "no TOML": ("name = \n", "rules.toml: not valid TOML"),
    "rules in a wrong order": (
        CURATION + '[[rules]]\nkind = "small_numbers"\n',
        "rules has exact_duplicates before small_numbers",
    ),
}
MISSING = {
    "a source that is not there": (
        CURATION.replace("sums.jsonl", "other.jsonl"),
        "other.jsonl: no such file",
    ),
    "rollouts that are not there": (
        WITH_AGREEMENT,
        "none.jsonl: no such file",
    ),
}


def trained(recipe):
    return run_recipe(Path("nowhere"), recipe)


@pytest.mark.parametrize(
    ("does", "text", "message"),
    [
        pytest.param(plan, *FILES["no TOML"], id="plan"),
        *(pytest.param(trained, *each, id=f"train-{name}") for name, each in (FILES | MISSING).items()),
    ],
)
def test_what_is_wrong_with_its_file_is_told_with_its_name_before_anything_begins(directory, monkeypatch, does, text, message):
    monkeypatch.chdir(directory)
    (directory / "rules.toml").write_text(text)
    with pytest.raises((ConfigError, NotThere)) as told:
        does(recipe_of(directory))
    assert str(told.value).startswith("stages.problems.recipe")
    assert message in str(told.value)
    assert not (directory / "nowhere").exists()


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        (
            {"agreement": "mixed"},
            "names 'mixed', a stage of kind 'mix', which plays no set of tasks. Name one of kind 'filter'",
        ),
    ],
)
def test_outcomes_that_no_stage_or_no_rule_has_are_refused(directory, outcomes, message):
    stages = {
        "mixed": {"kind": "mix", "data": ["problems"]},
        "answers": {"kind": "filter", "init": "base", "data": ["problems"], "k": 4},
        "agreed": {"kind": "curation", "recipe": str(directory / "agreed.toml"), "outcomes": outcomes},
    }
    (directory / "agreed.toml").write_text(WITH_AGREEMENT if "agreement" in outcomes else CURATION)
    message = message.replace("rules.toml", "agreed.toml")
    with pytest.raises(ConfigError, match=r"stages\.agreed\.outcomes(\.agreement)? " + message):
        plan(recipe_of(directory, **MODELS, **stages))


def test_where_nothing_passes_the_run_ends_with_the_rules_that_dropped_it_and_so_does_the_next_try(directory):
    write(directory / "sums.jsonl", [{"question": "1+1.5", "answer": "2.5"}, *sums((50, 50))])
    recipe = recipe_of(directory, mixed={"kind": "mix", "data": ["problems"]})
    told = r"stages\.problems: none of the 2 problems passes the rules of .*: 1 by integer_answer, 1 by decontamination\."
    for _ in range(2):
        with pytest.raises(TaskError, match=told):
            run_recipe(directory / "run", recipe)
    assert not RunDirectory(directory / "run").stage("problems").done.exists()


def test_its_path_is_looked_for_beside_the_recipe_and_paths_in_its_file_beside_that(directory, monkeypatch):
    (directory / "curation").mkdir()
    for name in ("rules.toml", "sums.jsonl", "benchmark.jsonl"):
        shutil.move(directory / name, directory / "curation" / name)
    (directory / "recipe.toml").write_text(
        'name = "curated"\n[tasks]\nkind = "arithmetic"\n[stages.problems]\nkind = "curation"\nrecipe = "curation/rules.toml"\n'
    )
    monkeypatch.chdir("/")
    recipe = load_recipe(directory / "recipe.toml")
    assert recipe.stages["problems"].config.recipe == str(directory / "curation" / "rules.toml")
    [planned] = plan(recipe)
    assert planned.arithmetic.startswith("1 source, 3 rules of ")
    assert planned.arithmetic.endswith(": integer_answer, decontamination, exact_duplicates")
    assert len(kept(run_recipe(directory / "run", recipe).run, "problems")) == 12


def test_killed_it_goes_on_behind_what_was_judged_to_the_same_end(directory, monkeypatch):
    monkeypatch.setattr("strop.curation.run.CHUNK_TASKS", 4)
    recipe, in_two_processes = recipe_of(directory), recipe_of(directory, jobs=2)

    def killed(config, directory, *, jobs, progress):
        def end(num_rows):
            if (directory / "parts" / "part-000001.jsonl").exists():
                raise KeyboardInterrupt

        return run_curation(config, directory, jobs=jobs, progress=end)

    with monkeypatch.context() as patch:
        patch.setattr(curation_stage, "run_curation", killed)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(directory / "run", recipe)
    run = RunDirectory(directory / "run")
    parts = run.stage("problems").path / "data" / "parts"
    assert len(list(parts.glob("part-*.jsonl"))) == 2
    assert not run.stage("problems").done.exists()
    first, *others = (parts / "part-000000.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(first) | {"rule": "integer_answer", "reason": "by hand"}
    doctored = RunDirectory(shutil.copytree(run.path, directory / "doctored"))
    part = doctored.stage("problems").path / "data" / "parts" / "part-000000.jsonl"
    part.write_text("".join([json.dumps(row) + "\n", *others]))

    whole = run_recipe(directory / "whole", recipe).run
    run_recipe(run.path, in_two_processes)
    assert len(kept(whole, "problems")) == 12
    for name in ("kept.jsonl", "dropped.jsonl", "report.html"):
        assert len({(each.stage("problems").path / "data" / name).read_bytes() for each in (run, whole)}) == 1
    run_recipe(doctored.path, recipe)
    dropped = read_lines(doctored.stage("problems").path / "data" / "dropped.jsonl")
    assert [row["id"] for row in dropped if row["reason"] == "by hand"] == [row["task"]["id"]]  # what was judged is not anew


def test_a_run_that_is_cancelled_ends_the_judging_before_it_frees_the_run_and_says_meanwhile_how_far_it_is(
    directory, monkeypatch
):
    ended = threading.Event()
    told = []
    when_freed = []

    def endless(config, directory, *, jobs, progress):
        try:
            while True:
                progress(10)
                time.sleep(0.01)
        finally:
            time.sleep(0.5)  # a part that is being written
            ended.set()

    @contextmanager
    def watched(run):
        with locked(run):
            try:
                yield
            finally:
                when_freed.append(ended.is_set())

    class Told(Watching):
        def note(self, text):
            told.append(text)
            raise asyncio.CancelledError

    monkeypatch.setattr(curation_stage, "run_curation", endless)
    monkeypatch.setattr(curation_stage, "_NOTE_EVERY_S", 0.2)
    monkeypatch.setattr("strop.pipeline.run.locked", watched)
    with pytest.raises(asyncio.CancelledError):
        run_recipe(directory / "run", recipe_of(directory), progress=Told())
    assert when_freed == [True]
    assert told[0].endswith(" rows judged")
    assert int(told[0].split()[0].replace(",", "")) >= 10
