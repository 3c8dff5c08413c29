"""A user's mistake is one message that says what, where and what to do; exit code 2; nothing written before is lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import pytest

from scripted_runs import RECIPE, sums_and_errors
from strop import cli
from strop.cluster.placement import Node, place
from strop.errors import UserError
from strop.run_directory import RunDirectory, read_lines
from strop.runs.manifest import locked
from strop.sandbox import ScriptedSandbox

TINY = Path(__file__).with_name("tiny.toml")


@pytest.fixture(autouse=True)
def scripted_sandbox(monkeypatch):
    """No test here is of programs, and a real sandbox takes a second to start."""

    @asynccontextmanager
    async def scripted(config):
        yield ScriptedSandbox(answer=sums_and_errors)

    monkeypatch.setattr("strop.pipeline.run.open_service", scripted)


@pytest.fixture
def mistake(strop):
    """Type a command that must fail as a user's mistake; returns the message."""

    def typed(*words):
        code, said = strop(*words)
        assert code == 2, said
        assert said.count("error: ") == 1, said
        return said[said.index("error: ") :]

    return typed


def write_recipe(directory, text=None, **tables):
    path = directory / "recipe.toml"
    path.write_text(text if text is not None else as_toml(RECIPE | tables))
    return path


def as_toml(tree):
    """TOML of a recipe: every top-level table as one inline table."""

    def inline(value):
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {inline(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(inline, value)) + "]"
        return json.dumps(value)

    return "".join(f"{key} = {inline(value)}\n" for key, value in tree.items())


def stage(name, **keys):
    return {**RECIPE["stages"], name: RECIPE["stages"][name] | keys}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.rl.method=grpo_rock", "Did you mean 'grpo_roc'?"),
        ("stages.rl.method.clip_high=0.3", "Write a table, as in --set 'stages.rl.method={kind=\"grpo\", clip_high=0.3}'."),
        ('stages.rl.method={kind="grpo", beta=0.1}', "method.beta: unknown key. Did you mean 'kl_coefficient'?"),
        ("stages.rl.group_size=1", "group_size is 1"),
        ('stages.rl.steps="many"', "stages.rl.steps: Input should be a valid integer (got 'many')."),
        ('stages.rl.method={kind="grpo_roc", oversample=0.5}', "stages.rl.method.oversample"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_the_remedy(mistake, tmp_path, override, message):
    assert message in mistake("train", TINY, "--set", override, "--runs", tmp_path / "runs").replace("\n", " ")
    assert not (tmp_path / "runs" / "tiny" / "stages" / "sft").exists()


def test_all_mistakes_of_a_recipe_are_told_at_once(mistake, tmp_path):
    words = ["--set", 'stages.rl.steps="many"', "--set", "stages.sft.batchsize=3"]
    said = mistake("train", TINY, *words, "--runs", tmp_path / "runs")
    assert "stages.rl.steps" in said
    assert "stages.sft.batchsize: unknown key. Did you mean 'batch_size'?" in said


def test_a_recipe_that_is_not_there_is_named_with_the_nearest(mistake):
    assert f"{TINY.with_name('tinny.toml')}: no such recipe. Did you mean {TINY}?" in mistake(
        "train", TINY.with_name("tinny.toml")
    )


def test_a_recipe_that_is_not_toml_is_told_the_line(mistake, tmp_path):
    said = mistake("train", write_recipe(tmp_path, "name = \n"))
    assert "recipe.toml: not valid TOML: " in said
    assert "line 1" in said


def test_a_row_without_an_answer_is_named_by_file_and_line(mistake, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": ""}\n')
    recipe = write_recipe(tmp_path, tasks={"kind": "jsonl", "path": "rows.jsonl"})
    said = mistake("train", recipe, "--runs", tmp_path / "runs")
    assert f"{tmp_path / 'rows.jsonl'}:2: a row without an answer" in said
    assert 'leave such rows out with tasks.bad_rows = "skip"' in said


@pytest.mark.parametrize(("name", "split"), [("rl", "train"), ("after", "test")])
def test_what_is_wrong_with_tasks_is_told_with_the_stage_that_reads_them(mistake, tmp_path, name, split):
    columns = {"train": "answer", "test": "answer", split: "solution"}
    for each, column in columns.items():
        (tmp_path / f"{each}.jsonl").write_text(json.dumps({"question": "1+1", column: "2"}) + "\n")
    tasks = {"kind": "jsonl", "path": "train.jsonl", "test_path": "test.jsonl"}
    recipe = write_recipe(tmp_path, stages=stage(name, tasks=tasks))
    said = mistake("train", recipe, "--runs", tmp_path / "runs")
    assert said.startswith(f"error: stages.{name}.tasks: {tmp_path / split}.jsonl:1: no column 'answer'")
    assert not (tmp_path / "runs" / "scripted" / "stages" / "sft").exists()


def test_control_characters_in_a_message_are_shown_as_escapes(mistake, tmp_path):
    (tmp_path / "clears_the_screen.py").write_text('raise ValueError("\\x1b[2J")\n')
    recipe = write_recipe(tmp_path, reward={"kind": "function", "function": "clears_the_screen:reward"})
    said = mistake("train", recipe, "--dry-run", "--runs", tmp_path / "runs")
    assert "\\x1b[2J" in said
    assert "\x1b" not in said


def test_a_model_that_is_not_there_is_named(mistake, tmp_path):
    stages = {"base": {"kind": "model", "path": "./nowhere"}}
    said = mistake("train", write_recipe(tmp_path, stages=stages), "--runs", tmp_path / "runs")
    assert "./nowhere: no such directory. Give a model directory or a hub id such as org/name." in said


@pytest.mark.parametrize(
    ("spoil", "message"),  # the model is named in every message, and what is wrong with it
    [
        (lambda model: (model / "chat_template.jinja").unlink(), "its tokenizer has no chat template"),
        (lambda model: (model / "tokenizer.json").unlink(), "no tokenizer that transformers can load"),
        (lambda model: (model / "config.json").unlink(), "no config.json there"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\0" * 64), "deserializing header"),
        (lambda model: (model / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (lambda model: (model / "model.safetensors.index.json").write_text("[" * 3000), "nested too deeply"),
    ],
    ids=["no chat template", "no tokenizer", "no config", "damaged weights", "no weight map", "deep index"],
)
def test_a_model_directory_that_is_not_whole_says_what_it_lacks(mistake, scripted_run, tmp_path, spoil, message):
    model = shutil.copytree(scripted_run.run.stage("sft").model, tmp_path / "model")
    spoil(model)
    last = RECIPE["stages"]["rl"] | {"init": "base"}
    recipe = write_recipe(tmp_path, stages={"base": {"kind": "model", "path": "model"}, "last": last})
    said = mistake("train", recipe, "--runs", tmp_path / "runs")
    assert message in said
    assert str(model) in said


def test_a_name_of_a_stage_that_is_no_name_of_a_directory_is_refused(mistake, tmp_path):
    name = "../evil"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'name = "named"\n[stages."{name}"]\nkind = "model"\npath = "nowhere"\ntasks.kind = "arithmetic"\n')
    told = mistake("train", recipe, "--dry-run")
    assert f"{name!r} cannot be the name of a directory and part of a key. Name the stage with letters" in told


def test_a_run_directory_of_another_recipe_is_left_alone(mistake, scripted_run, tmp_path):
    recipe = write_recipe(tmp_path, stages=stage("rl", group_size=4))
    before = contents(scripted_run.run.path)
    said = mistake("train", recipe, "--runs", scripted_run.run.path.parent)
    assert f"{scripted_run.run.path}: these stages are stale:" in said
    assert "stages.rl.group_size: 6 -> 4" in said
    assert "--name" in said
    assert contents(scripted_run.run.path) == before


CONVERT = '''
def convert(x: float) -> float:
    """Converts kilometres to miles."""
    return x / 1.609
'''


def test_a_run_in_which_no_stage_has_begun_takes_the_mended_recipe(mistake, strop, tmp_path, monkeypatch):
    (tmp_path / "mended_tools.py").write_text(CONVERT)
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, stages={"base": RECIPE["stages"]["base"]}, tools={"convert": {"kind": "function"}})
    words = ["train", recipe, "--runs", tmp_path / "runs"]
    mistake(*words, "--set", "tools.convert.function=mended_tools:convrt")
    assert {path.name for path in (tmp_path / "runs" / "scripted").iterdir()} == {".lock", "manifest.json", "events.jsonl"}
    code, said = strop(*words, "--set", "tools.convert.function=mended_tools:convert", "--set", "seed=3")
    assert code == 0, said
    manifest = json.loads((tmp_path / "runs" / "scripted" / "manifest.json").read_text())
    assert manifest["recipe"]["tools"]["convert"]["function"] == "mended_tools:convert"
    assert manifest["seed"] == manifest["recipe"]["seed"] == 3


def test_a_directory_that_is_no_run_is_left_alone(mistake, tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "thesis.txt").write_text("years of work")
    assert "not empty, and not a run directory" in mistake("train", TINY, "--runs", tmp_path / "runs")
    assert (tmp_path / "runs" / "tiny" / "thesis.txt").read_text() == "years of work"


def test_half_a_manifest_that_a_kill_left_is_no_obstacle(mistake, tmp_path):
    (tmp_path / "runs" / "scripted").mkdir(parents=True)
    (tmp_path / "runs" / "scripted" / ".manifest.json.tmp").write_text('{"form')
    recipe = write_recipe(tmp_path, stages={"base": {"kind": "model", "path": "./nowhere"}})
    assert "./nowhere: no such directory" in mistake("train", recipe, "--runs", tmp_path / "runs")
    assert (tmp_path / "runs" / "scripted" / "manifest.json").exists()


def test_a_damaged_manifest_is_named(mistake, tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "manifest.json").write_text('{"format": 1, "rec')
    assert "manifest.json: not valid JSON" in mistake("train", TINY, "--runs", tmp_path / "runs")


class OneNode:
    """A connection to a cluster of one node."""

    directory = None

    def nodes(self):
        return [Node(id="1", address="10.0.0.1", name="10.0.0.1", gpus=0, all_gpus=0)]

    def placement_of(self, roles):
        return place(self.nodes(), roles)


@contextmanager
def not_reached(config, directory):
    raise UserError(f"cluster.address: no Ray cluster at {config.address!r}")
    yield


@pytest.mark.parametrize(
    ("connected", "message"),
    [
        (not_reached, "cluster.address: no Ray cluster at '10.0.0.1:6379'"),
        (
            lambda config, directory: nullcontext(OneNode()),
            "more than the nodes of the cluster: 1 (10.0.0.1). Add",
        ),
    ],
)
def test_a_start_that_a_cluster_refuses_leaves_nothing(mistake, tmp_path, monkeypatch, connected, message):
    monkeypatch.setattr("strop.pipeline.run.connected", connected)
    words = ["--cluster", "10.0.0.1:6379", "--set", "cluster.sandbox_nodes=2", "--runs"]
    assert message in mistake("train", TINY, *words, tmp_path / "runs")
    assert not list(tmp_path.iterdir())
    begun = tmp_path / "begun"
    (begun / "tiny").mkdir(parents=True)
    assert message in mistake("train", TINY, *words, begun)
    assert not list((begun / "tiny").iterdir())


def test_a_directory_that_another_run_uses_is_named_before_the_cluster_is_asked(mistake, tmp_path, monkeypatch):
    monkeypatch.setattr("strop.pipeline.run.connected", not_reached)
    run = RunDirectory(tmp_path / "tiny")
    run.path.mkdir()
    with locked(run):
        said = mistake("train", TINY, "--cluster", "10.0.0.1:6379", "--runs", tmp_path)
    assert "another strop is running there" in said


def test_runs_beneath_a_file_are_refused(mistake, tmp_path):
    (tmp_path / "runs").write_text("a file")
    assert str(tmp_path / "runs") in mistake("train", TINY, "--runs", tmp_path / "runs")


def test_an_evaluation_that_the_recipe_does_not_have_is_named(mistake, scripted_run, tmp_path):
    model = scripted_run.run.stage("sft").model
    said = mistake("eval", TINY, "--model", model, "--stage", "befor", "--runs", tmp_path / "runs")
    assert "'befor'" in said
    assert "before, after" in said


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_an_unknown_key_is_one_line_and_nothing_is_written(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["strop", "train", str(TINY), "--set", "stages.rl.grup_size=8"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    said = capsys.readouterr()
    assert said.err == f"error: {TINY}: stages.rl.grup_size: unknown key. Did you mean 'group_size'?\n"
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_key_is_found_before_transformers_is_loaded():
    """It takes a second to load, which a user would wait for a misspelt word."""
    program = """
import pathlib, sys
from strop.errors import ConfigError
from strop.recipe.load import load_recipe
try:
    load_recipe(pathlib.Path(sys.argv[1]), ["stages.rl.grup_size=8"])
except ConfigError:
    sys.exit(int("transformers" in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", program, TINY], check=False).returncode == 0


LONG_SFT = ["train", TINY, "--set", "stages.sft.steps=100000"]


def wait_for_sft(path, process=None):
    deadline = time.monotonic() + 60
    while not any(line.get("stage") == "sft" for line in read_lines(path)):
        assert process is None or process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_control_c_stops_a_run_with_one_line_that_says_where(strop, monkeypatch, tmp_path):
    def interrupt():
        wait_for_sft(tmp_path / "tiny" / "events.jsonl")
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor() as pool:
            interrupted = pool.submit(interrupt)
            code, said = strop(*LONG_SFT, "--runs", tmp_path)
            interrupted.result()
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == "\nstopped in sft. The same command continues from the last checkpoint.\n"
    assert code == 130


def test_sigterm_in_the_background_stops_a_run_and_every_process_of_it(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "strop.cli", *map(str, LONG_SFT)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background of a shell ignores Ctrl-C, and its children do with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        start_new_session=True,
    )
    try:
        wait_for_sft(tmp_path / "runs" / "tiny" / "metrics.jsonl", process)
        process.terminate()
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    words = r"\nstopped by SIGTERM in sft, with \d+ of \d+ steps done\. The same command continues from the last checkpoint\.\n"
    assert re.fullmatch(words, said), said
    assert process.returncode == 143
    with pytest.raises(ProcessLookupError):  # no process of the session is left
        os.killpg(process.pid, 0)
