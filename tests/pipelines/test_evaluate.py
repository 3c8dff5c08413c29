"""`strop eval` as one call: what a kill leaves is taken over, what is finished is not played again."""

import asyncio
import json
import random

import pytest

from hub_copies import keep_copy, offline, reach_hub
from scripted_runs import RecordingEngine, answer, make_recipe, run_recipe, sums_and_errors
from strop.errors import EngineLost, MachineError, RunError, TaskError
from strop.evaluation.results import read_eval
from strop.pipelines.evaluate import evaluate_model
from strop.pipelines.recipe import Recipe, resolve
from strop.pipelines.stage import load_chat
from strop.reports.progress import Silent
from strop.runs import read_lines, write_text
from strop.sandbox.scripted import ScriptedSandbox
from strop.tasks import RowTasks
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

    monkeypatch.setattr("strop.pipelines.evaluate.train", _with_doubles(open_engines))
    figures = asyncio.run(evaluate_model(recipe, model, directory, stage=None, progress=Silent()))
    return figures, engines


def _with_doubles(open_engines):
    from strop.pipelines.train import train

    async def run(recipe, directory, *, progress):
        runner = ScriptedSandbox(answer=sums_and_errors, max_latency_s=0.01)
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
    assert resumed["num_taken_over"] >= 5
    assert len(engine.answers) == 4 * 3 - resumed["num_taken_over"]
    untold = ("time_s", "num_taken_over", "run")
    assert {k: v for k, v in resumed.items() if k not in untold} == {k: v for k, v in whole.items() if k not in untold}
    assert read_eval(tmp_path / "run").problems == read_eval(tmp_path / "whole").problems
    again, engines = evaluate(tmp_path / "run", model, recipe, monkeypatch=monkeypatch)
    assert (again, engines) == (resumed, [])


@pytest.mark.parametrize("is_finished", [True, False])
def test_more_problems_and_more_attempts_are_played_beside_those_that_are_there(tmp_path, model, monkeypatch, is_finished):
    """From two problems twice to four problems three times: the eight attempts that are missing, and no others."""
    write_rows(tmp_path / "rows.jsonl", *SUMS)
    small, large = (evaluation(tmp_path / "rows.jsonl", num_tasks=num, k=k) for num, k in ((2, 2), (4, 3)))
    whole, _ = evaluate(tmp_path / "whole", model, large, monkeypatch=monkeypatch)
    if is_finished:
        evaluate(tmp_path / "run", model, small, monkeypatch=monkeypatch)
    else:
        with pytest.raises(EngineLost):
            evaluate(tmp_path / "run", model, small, lost_after=2, monkeypatch=monkeypatch)
    figures, [engine] = evaluate(tmp_path / "run", model, large, monkeypatch=monkeypatch)
    assert figures["num_taken_over"] == 4 if is_finished else figures["num_taken_over"] in (2, 3)
    assert len(engine.answers) == 12 - figures["num_taken_over"]
    assert (figures["num_tasks"], figures["k"]) == (4, 3)
    untold = ("time_s", "num_taken_over", "run")
    assert {k: v for k, v in figures.items() if k not in untold} == {k: v for k, v in whole.items() if k not in untold}
    assert evaluate(tmp_path / "run", model, large, monkeypatch=monkeypatch) == (figures, [])


def test_fewer_problems_or_other_settings_than_there_are_is_another_evaluation(tmp_path, model, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", *SUMS)
    figures, _ = evaluate(tmp_path / "run", model, evaluation(tmp_path / "rows.jsonl"), monkeypatch=monkeypatch)
    for asked in ({"num_tasks": 2}, {"k": 2}, {"num_tasks": 2, "k": 8}, {"k": 8, "prompt": "rstar2"}):
        with pytest.raises(RunError, match="a run of another recipe"):
            evaluate(tmp_path / "run", model, evaluation(tmp_path / "rows.jsonl", **asked), monkeypatch=monkeypatch)
    assert read_eval(tmp_path / "run").result == figures


def test_the_time_of_a_result_is_that_of_all_its_tries_as_its_tokens_are(tmp_path, model, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", *SUMS)
    recipe = evaluation(tmp_path / "rows.jsonl")
    with pytest.raises(EngineLost):
        evaluate(tmp_path / "run", model, recipe, lost_after=5, monkeypatch=monkeypatch)
    clock = tmp_path / "run" / "stages" / "sums" / "eval" / "clock.jsonl"
    first_try = read_lines(clock)
    assert len(first_try) >= 5
    assert [line["try"] for line in first_try] == [1] * len(first_try)
    slow = first_try[-1] | {"time_s": 1000.0}
    of_others = {"try": 2, "weights": "of another model", "time_s": 5000.0}
    write_text(clock, "".join(json.dumps(line) + "\n" for line in (slow, of_others)))
    figures, _ = evaluate(tmp_path / "run", model, recipe, monkeypatch=monkeypatch)
    last_try = [line["time_s"] for line in read_lines(clock) if line["try"] == 3]
    assert len(last_try) == 4 * 3 - figures["num_taken_over"]
    assert 1000.0 + max(last_try) < figures["time_s"] < 1600.0


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


PUBLISHED = list(SUMS)
"""What a source that is no file holds today: a hub data set, for one."""


def published(*, seed, split):
    tasks = [Task(id=str(at), question=question, answer=right, source="hub") for at, (question, right) in enumerate(PUBLISHED)]
    return RowTasks(tasks, seed=seed, is_shuffled=False)


def test_a_problem_that_changed_meanwhile_is_played_again_and_a_finished_evaluation_says_so(tmp_path, model, monkeypatch):
    recipe = evaluation(tmp_path / "no file", tasks={"kind": "python", "source": "test_evaluate:published"})
    with pytest.raises(EngineLost):
        evaluate(tmp_path / "run", model, recipe, lost_after=11, monkeypatch=monkeypatch)
    monkeypatch.setattr("test_evaluate.PUBLISHED", [*SUMS[:3], ("1+2", "3")])
    _, [engine] = evaluate(tmp_path / "run", model, recipe, monkeypatch=monkeypatch)
    assert 3 <= len(engine.answers) <= 4  # the changed problem's three, and the one that was not finished
    monkeypatch.setattr("test_evaluate.PUBLISHED", SUMS)
    with pytest.raises(RunError, match=r"finished, but 1 of its problems are no longer .* first is number 3.* --name"):
        evaluate(tmp_path / "run", model, recipe, monkeypatch=monkeypatch)


def test_a_problem_that_changed_is_played_again_also_where_the_try_that_would_have_is_killed(tmp_path, model, monkeypatch):
    recipe = evaluation(tmp_path / "no file", tasks={"kind": "python", "source": "test_evaluate:published"})
    with pytest.raises(EngineLost):
        evaluate(tmp_path / "run", model, recipe, lost_after=11, monkeypatch=monkeypatch)
    monkeypatch.setattr("test_evaluate.PUBLISHED", [*SUMS[:3], ("1+2", "3")])
    with pytest.raises(EngineLost):
        evaluate(tmp_path / "run", model, recipe, lost_after=0, monkeypatch=monkeypatch)
    _, [engine] = evaluate(tmp_path / "run", model, recipe, monkeypatch=monkeypatch)
    assert 3 <= len(engine.answers) <= 4


def test_a_file_that_changed_under_a_finished_evaluation_is_refused(tmp_path, model, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, *SUMS)
    evaluate(tmp_path / "run", model, evaluation(rows), monkeypatch=monkeypatch)
    write_rows(rows, *SUMS[:3], ("1+2", "3"))
    with pytest.raises(RunError, match="1 of its problems are no longer"):
        evaluate(tmp_path / "run", model, evaluation(rows), monkeypatch=monkeypatch)


def test_a_finished_evaluation_of_the_hub_is_held_to_the_commit_that_it_read_and_grows_there(tmp_path, model, monkeypatch):
    pytest.importorskip("datasets", reason="needs the extra strop[data]")
    offline(monkeypatch, tmp_path / "copies")
    keep_copy(tmp_path / "copies", "sums", "a" * 40, [{"question": asked, "answer": right} for asked, right in SUMS])
    of_hub = {"kind": "hub", "name": "org/sums", "test_split": "train"}
    small, large = (evaluation(tmp_path / "no file", tasks=of_hub, k=k) for k in (2, 3))
    done = evaluate(tmp_path / "run", model, small, monkeypatch=monkeypatch)[0]
    keep_copy(tmp_path / "copies", "sums", "b" * 40, [{"question": "1+2", "answer": "3"}] * 4)
    reach_hub(monkeypatch, tmp_path / "copies")
    assert evaluate(tmp_path / "run", model, small, monkeypatch=monkeypatch) == (done, [])
    grown, [engine] = evaluate(tmp_path / "run", model, large, monkeypatch=monkeypatch)
    assert (grown["num_taken_over"], len(engine.answers)) == (4 * 2, 4)
    assert [line["question"] for line in read_eval(tmp_path / "run").problems] == [asked for asked, _ in SUMS]


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
    recipe = evaluation(tmp_path / "rows.jsonl", reward={"kind": "function", "function": "test_evaluate:judge_lost_on_one"})
    figures, _ = evaluate(tmp_path / "run", model, recipe, monkeypatch=monkeypatch)
    assert (figures["num_tasks"], figures["num_tasks_void"], figures["accuracy"]) == (3, 1, 1.0)
    assert "maj_at_k" not in figures  # a function of one's own: nobody knows which answers are the same
    assert figures["maj_at_k_missing"] == "no answers to compare: reward"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any("void" in event.get("text", "") and "timed out" in event["text"] for event in events)
