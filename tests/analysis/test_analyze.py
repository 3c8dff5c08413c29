"""`strop analyze` from a user's chair, on a run directory as the pipelines leave it."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from reports.fake_run import write_run
from strop.analysis.read import parse_steps, read_analysis
from strop.cli import app
from strop.errors import RunError, UserError
from strop.run_directory import RunDirectory


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Rollouts of steps 1 and 10 of stage rl."""
    return write_run(tmp_path_factory.mktemp("analysis") / "demo", num_steps=10).path


@pytest.fixture
def run(written, tmp_path):
    shutil.copytree(written, tmp_path / "demo")
    return RunDirectory(tmp_path / "demo")


def analyze(run, *options):
    result = CliRunner().invoke(app, ["analyze", str(run.path), *options])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(path, change):
    lines = records(path)
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_command_prints_the_figures_and_where_page_and_json_lie(run):
    printed = analyze(run)
    document = json.loads((run.path / "analysis" / "rl.json").read_text())
    assert f"{document['num_rollouts']:,} rollouts, {document['num_tokens']:,} sampled tokens" in printed
    assert f"page: {run.path / 'analysis' / 'rl.html'}" in printed.replace("\n", "")
    assert f"json: {run.path / 'analysis' / 'rl.json'}" in printed.replace("\n", "")
    assert "after an error" in printed


def test_the_json_counts_every_sampled_token_once(run):
    analyze(run)
    document = json.loads((run.path / "analysis" / "rl.json").read_text())
    files = [run.stage("rl").rollouts(step) for step in (1, 10)]
    entropies = [
        entropy
        for file in files
        for line in records(file)
        for turn in line["rollout"]["trajectory"]["turns"]
        for entropy, forced in zip(turn["completion"]["entropies"], turn["completion"]["is_forced"], strict=True)
        if not forced
    ]
    assert document["num_tokens"] == len(entropies)
    assert document["entropy_nats"] == pytest.approx(sum(entropies) / len(entropies))
    assert sum(part["num_tokens"] for part in document["parts"].values()) == len(entropies)
    assert document["parts"]["tool_call"]["num_tokens"] > 0
    assert [step["step"] for step in document["steps"]] == [1, 10]
    assert sum(step["num_tokens"] for step in document["steps"]) == len(entropies)
    ends = sum(len(line["rollout"]["trajectory"]["turns"]) for file in files for line in records(file))
    offsets = document["offsets"]
    assert offsets["start"]["num_tokens"][0] + offsets["after_any"]["num_tokens"][0] == ends


def test_errors_and_successes_are_told_apart_by_the_calls_of_the_turn_before(run):
    analyze(run)
    positions = json.loads((run.path / "analysis" / "rl.json").read_text())["positions"]
    turns = [
        (before["calls"][0]["outcome"])
        for step in (1, 10)
        for line in records(run.stage("rl").rollouts(step))
        for before in line["rollout"]["trajectory"]["turns"][:-1]
    ]
    assert positions["after_error"]["num_completions"] == turns.count("error") > 0
    assert positions["after_success"]["num_completions"] == turns.count("stdout") > 0


def test_steps_are_those_that_were_asked_for(run):
    assert "step 10: 24 rollouts" in analyze(run, "--steps", "2-12")
    assert [step["step"] for step in json.loads((run.path / "analysis" / "rl.json").read_text())["steps"]] == [10]
    with pytest.raises(RunError, match=r"has rollouts of none of these\. It has step 1 to 10"):
        analyze(run, "--steps", "2-9")


def test_steps_are_written_as_numbers_and_ranges():
    assert parse_steps("1-3, 25") == [range(1, 4), range(25, 26)]
    for wrong in ("x", "3-1", "", "1-"):
        with pytest.raises(UserError, match="is no step and no range of steps"):
            parse_steps(wrong)


def test_the_stage_is_the_last_that_learned_from_rollouts_unless_one_is_named(run):
    place = run.stage("after").rollouts(0)
    place.parent.mkdir(parents=True)
    shutil.copy(run.stage("rl").rollouts(10), place)
    assert analyze(run).startswith("rl · 2 steps, 1 to 10: 48 rollouts")
    assert analyze(run, "--stage", "after").startswith("after · step 0: 24 rollouts")
    assert (run.path / "analysis" / "after.html").exists()
    with pytest.raises(RunError, match=r"--stage rk: the run has no such stage .*Stages with rollouts: rl, after"):
        analyze(run, "--stage", "rk")
    with pytest.raises(RunError, match="--stage sft: the stage has no rollouts"):
        analyze(run, "--stage", "sft")


def test_a_run_without_rollouts_says_which_stages_write_them(run):
    shutil.rmtree(run.stage("rl").path / "rollouts")
    with pytest.raises(RunError, match="no rollouts to analyse"):
        analyze(run)


def test_a_file_without_a_finished_rollout_is_not_blamed_on_the_engine(run):
    for step in (1, 10):
        run.stage("rl").rollouts(step).write_text("")
    with pytest.raises(RunError, match="no rollout has finished yet"):
        analyze(run)


def test_rollouts_of_an_engine_that_tells_no_entropies_are_an_error_that_says_so(run):
    def forget(line):
        for turn in line["rollout"]["trajectory"]["turns"]:
            turn["completion"]["entropies"] = []

    rewrite(run.stage("rl").rollouts(1), forget)
    assert "24 rollouts without entropies left out" in analyze(run)
    rewrite(run.stage("rl").rollouts(10), forget)
    with pytest.raises(RunError, match="no entropies, which servers"):
        analyze(run)


def test_a_run_without_a_tokenizer_says_where_to_put_it(run):
    shutil.rmtree(run.stage("sft").model)
    with pytest.raises(RunError, match=r"no tokenizer\.json of stage 'rl'"):
        analyze(run)


def test_a_directory_that_is_no_run_is_named(tmp_path):
    with pytest.raises(RunError, match=r"Is .* a run directory of strop"):
        analyze(RunDirectory(tmp_path))


def test_a_line_that_is_no_rollout_is_named_with_its_place(run):
    rewrite(run.stage("rl").rollouts(1), lambda line: line["rollout"].pop("reward"))
    with pytest.raises(RunError, match=r"step-000001\.jsonl:1: not a rollout: reward"):
        analyze(run)


def test_of_a_rollout_that_was_played_again_the_last_counts(run):
    path = run.stage("rl").rollouts(10)
    first = path.read_text().splitlines(keepends=True)[0]
    path.write_text(path.read_text() + first)
    assert read_analysis(run).steps[10].num_rollouts == 24
