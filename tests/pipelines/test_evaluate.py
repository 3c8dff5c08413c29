"""`strop eval` as one call: what a kill leaves is taken over, what is finished is not played again."""

import asyncio
import json
import random

import pytest

from faulty_sandbox import FaultySandbox
from scripted_runs import RecordingEngine, answer, make_recipe, run_recipe, sums_and_errors
from strop.errors import EngineLost, MachineError, RunError, TaskError
from strop.evaluation.results import read_eval
from strop.pipeline.from_python import evaluate_model
from strop.recipe.recipe import Recipe, resolve
from strop.reports.trackers import Progress
from strop.stages.context import load_chat
from strop.types import Task


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model; what it says is scripted anyway."""
    recipe = make_recipe()
    base = recipe.model_copy(update={"stages": {"base": recipe.stages["base"]}})
    return run_recipe(tmp_path_factory.mktemp("model") / "run", base).run.stage("base").model


def write_rows(path, *rows):
    path.write_text("".join(json.dumps({"question": question, "answer": right}) + "\n" for question, right in rows))


def evaluation(rows, **stage):
    tree = {
        "name": "evaluation",
        "threads": 1,
        "tasks": {"kind": "jsonl", "path": str(rows), "test_path": str(rows)},
        "prompt": "plain",
        "tools": {"python": {"name": "python"}},
        "engine": {"max_length": 256},
        "sampling": {"max_tokens": 200},
        "stages": {
            "model": {"kind": "model", "path": "somewhere"},
            "sums": {"kind": "eval", "init": "model", "num_tasks": 4, "k": 3, **stage},
        },
    }
    return Recipe.model_validate_json(json.dumps(resolve(tree)))


def evaluate(directory, model, recipe, *, say=None, lost_after=None, monkeypatch):
    """The figures, and the engine with what it was asked. It says "2", or a number by chance; it is lost on request."""
    engines = []

    class Engine(RecordingEngine):
        async def complete(self, request):
            completion = await super().complete(request)
            if lost_after is not None and sum(len(each.answers) for each in engines) > lost_after:
                raise EngineLost("scripted: the engine is gone")
            return completion

    async def open_engines(model, config, *, detokenize, logs, names):
        chat = load_chat(model)
        said = say or (lambda draw: answer(draw.choice([2, 2, 3])))
        engines.append(Engine(lambda request: chat.completion_ids(said(random.Random(request.seed)))))
        return [engines[-1]]

    monkeypatch.setattr("strop.pipeline.from_python.run_recipe", _with_doubles(open_engines))
    figures = asyncio.run(evaluate_model(recipe, model, directory, stage=None, progress=Progress()))
    return figures, engines


def _with_doubles(open_engines):
    from strop.pipeline.run import train

    async def run(recipe, directory, *, progress):
        runner = FaultySandbox(answer=sums_and_errors, max_latency_s=0.01)
        return await train(recipe, directory, progress=progress, runner=runner, open_engines=open_engines)

    return run


SUMS = [("1+1", "2"), ("0+2", "2"), ("3-1", "2"), ("2+2", "4")]


def test_a_kill_in_the_middle_loses_only_what_was_in_flight_and_a_third_call_does_nothing(tmp_path, model, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", *SUMS)
    recipe = evaluation(tmp_path / "rows.jsonl")
    whole, _ = evaluate(tmp_path / "whole", model, recipe, monkeypatch=monkeypatch)
    with pytest.raises(EngineLost):
        evaluate(tmp_path / "run", model, recipe, lost_after=5, monkeypatch=monkeypatch)
    resumed, [engine] = evaluate(tmp_path / "run", model, recipe, monkeypatch=monkeypatch)
    assert len(engine.answers) <= 4 * 3 - 5
    untold = ("time_s", "run")
    assert {k: v for k, v in resumed.items() if k not in untold} == {k: v for k, v in whole.items() if k not in untold}
    assert read_eval(tmp_path / "run").problems == read_eval(tmp_path / "whole").problems
    again, engines = evaluate(tmp_path / "run", model, recipe, monkeypatch=monkeypatch)
    assert (again, engines) == (resumed, [])


def test_fewer_problems_or_other_settings_than_there_are_is_another_evaluation(tmp_path, model, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", *SUMS)
    figures, _ = evaluate(tmp_path / "run", model, evaluation(tmp_path / "rows.jsonl"), monkeypatch=monkeypatch)
    for asked in ({"num_tasks": 2}, {"k": 2}, {"num_tasks": 2, "k": 8}, {"k": 8, "prompt": "rstar2"}):
        with pytest.raises(RunError, match=r"holds another evaluation:(.|\n)*another name with --name"):
            evaluate(tmp_path / "run", model, evaluation(tmp_path / "rows.jsonl", **asked), monkeypatch=monkeypatch)
    assert read_eval(tmp_path / "run").result == figures


def test_a_result_says_what_was_evaluated_and_its_problems_who_was_right(tmp_path, model, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", *SUMS)
    figures, _ = evaluate(tmp_path / "run", model, evaluation(tmp_path / "rows.jsonl"), monkeypatch=monkeypatch)
    assert figures["benchmark"].endswith("/rows")
    assert set(figures["pass_at"]) == {"1", "2", "3"}
    assert figures["pass_at"]["1"] == pytest.approx(figures["accuracy"])
    problems = read_eval(tmp_path / "run").problems
    assert [line["question"] for line in problems] == [question for question, _ in SUMS]
    assert [line["correct"] for line in problems[:3]] == [
        [int(said == "2") for said in line["answers"]] for line in problems[:3]
    ]
    assert problems[3]["correct"] == [0, 0, 0]
    # Twice of three it says 2: a majority of three is right about as often, and never on the last.
    assert figures["maj_at_k"] == sum(line["answers"].count("2") >= 2 for line in problems[:3]) / 4


def test_a_file_that_changed_under_a_finished_evaluation_is_refused(tmp_path, model, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, *SUMS)
    evaluate(tmp_path / "run", model, evaluation(rows), monkeypatch=monkeypatch)
    write_rows(rows, *SUMS[:3], ("1+2", "3"))
    with pytest.raises(RunError, match=r"rows\.jsonl .* has other contents"):
        evaluate(tmp_path / "run", model, evaluation(rows), monkeypatch=monkeypatch)


def test_a_benchmark_without_answers_is_one_message_before_anything_is_played(tmp_path, model, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, ("1+1", ""))
    with pytest.raises(TaskError, match=r"rows.jsonl:1: a row without an answer"):
        evaluate(tmp_path / "run", model, evaluation(rows), monkeypatch=monkeypatch)


def slow_judge(task: Task, trajectory) -> float:
    raise MachineError("the judge at http://judge timed out after 30 s")


def judge_lost_on_one(task: Task, trajectory) -> float:
    if task.question == "1+1":
        raise MachineError("the judge at http://judge timed out after 30 s")
    return 1.0


def test_a_judge_that_times_out_on_everything_is_named_with_its_reason(tmp_path, model, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", *SUMS)
    recipe = evaluation(tmp_path / "rows.jsonl", reward={"kind": "function", "function": "test_evaluate:slow_judge"})
    with pytest.raises(
        MachineError, match=r"every rollout of 4 tasks is void.* http://judge timed out after 30 s\. All reasons"
    ):
        evaluate(tmp_path / "run", model, recipe, monkeypatch=monkeypatch)


def test_a_judge_that_times_out_on_one_problem_costs_that_problem_alone(tmp_path, model, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", *SUMS)
    reward = {"kind": "function", "function": "test_evaluate:judge_lost_on_one", "right_above": 0}
    recipe = evaluation(tmp_path / "rows.jsonl", reward=reward)
    figures, _ = evaluate(tmp_path / "run", model, recipe, monkeypatch=monkeypatch)
    assert (figures["num_tasks"], figures["num_tasks_void"], figures["accuracy"]) == (3, 1, 1.0)
    assert "maj_at_k" not in figures  # a function of one's own: nobody knows which answers are the same
    assert figures["maj_at_k_missing"] == "no answers to compare: reward"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any("void" in event.get("text", "") and "timed out" in event["text"] for event in events)
