import json

import pytest
from attempts import attempt, group_of

from strop.errors import RunError
from strop.evaluation.metrics import rollout_metrics
from strop.evaluation.results import figures_of, find_results, problem_of, read_eval, write_eval
from strop.stages.evaluation import _in_words
from strop.types import StopReason, ToolOutcome

RIGHT, WRONG = True, False


def group(*verdicts, **about):
    return group_of(*(attempt("", right=right, number=number) for number, right in enumerate(verdicts)), **about)


def test_pass_at_is_told_for_powers_of_two_and_for_k_itself():
    figures = figures_of([group(RIGHT, WRONG, WRONG, WRONG, WRONG, WRONG)], seed=0)
    assert figures["pass_at"] == {  # one right of six: k of six draws hold it
        "1": pytest.approx(1 / 6),
        "2": pytest.approx(2 / 6),
        "4": pytest.approx(4 / 6),
        "6": 1.0,
    }
    assert figures["pass_at_k"] == 1.0
    assert figures["accuracy"] == pytest.approx(1 / 6)


def test_a_void_problem_is_counted_and_enters_no_mean_and_no_vote():
    figures = figures_of([group(RIGHT, WRONG), group(num_void=2)], seed=0, votes=[["2", "3"], []])
    assert (figures["num_tasks"], figures["num_tasks_void"], figures["accuracy"]) == (1, 1, 0.5)
    assert figures["maj_at_k"] == 0.5  # a tie shares
    assert figures["void_fraction"] == 0.5
    assert (figures["num_void"], figures["is_final"]) == (2, False)


@pytest.mark.parametrize(("num_void", "is_final"), [(0, True), (1, True), (2, False)])
def test_a_result_with_more_than_one_void_rollout_in_a_hundred_is_not_final(num_void, is_final):
    groups = [group(*[RIGHT] * (100 - num_void), num_void=num_void)]
    figures = figures_of(groups, seed=0) | {"k": 100}
    assert figures["is_final"] is is_final
    assert _in_words(figures).endswith(". Too many for a final figure: evaluate again") is not is_final
    assert (f"; {num_void} rollouts are void ({num_void}.0%)" in _in_words(figures)) is (num_void > 0)


def test_a_problem_with_fewer_attempts_than_k_is_counted_and_in_no_pass_at_k():
    """One that lost three of four attempts made pass@1 of the pass@4 of all."""
    groups = [group(RIGHT, WRONG, WRONG, WRONG), group(WRONG, WRONG, WRONG, WRONG), group(WRONG, num_void=7)]
    figures = figures_of(groups, seed=0, k=4)
    assert figures["num_tasks_below_k"] == 1
    assert figures["pass_at"] == {"1": 1 / 8, "2": pytest.approx(1 / 4), "4": 1 / 2}
    assert figures["pass_at_k"] == 1 / 2
    assert figures["accuracy"] == pytest.approx(1 / 12)  # of all three
    none = figures_of(groups[2:], seed=0, k=4)
    assert none["num_tasks_below_k"] == 1
    assert not {"pass_at", "pass_at_k"} & none.keys()


def test_a_part_that_an_attempt_was_not_given_is_null_and_not_zero(tmp_path):
    """0 would be a judgement, of the worst answer."""
    attempts = [attempt("", right=RIGHT, parts={"accuracy": 1.0, "f1": 0.5}), attempt("", right=RIGHT, number=1)]
    line = problem_of(group_of(*attempts), None)
    assert line["parts"] == {"accuracy": [1.0, 1.0], "f1": [0.5, None]}
    write_eval(tmp_path, {"accuracy": 1.0}, [line])
    assert read_eval(tmp_path).problems == [line]


def test_without_votes_there_is_no_majority():
    assert "maj_at_k" not in figures_of([group(RIGHT)], seed=0)


def test_every_part_of_the_reward_has_a_mean_over_tasks_and_an_interval():
    groups = [
        group_of(attempt("", right=RIGHT, parts={"accuracy": 1.0, "f1": 1.0})),
        group_of(
            attempt("", right=WRONG, parts={"accuracy": 0.0, "f1": 0.5}),
            attempt("", right=WRONG, parts={"accuracy": 0.0, "f1": 0.0}),
        ),
    ]
    f1 = figures_of(groups, seed=0)["parts"]["f1"]
    assert f1["mean"] == pytest.approx((1.0 + 0.25) / 2)  # each task weighs the same
    assert (f1["low"], f1["high"]) == (0.25, 1.0)


def test_a_part_that_is_for_some_tasks_alone_has_the_mean_of_those():
    """As where mathematics is judged by its answer and everything else by a reward model."""
    groups = [
        group_of(attempt("", right=RIGHT, parts={"accuracy": 1.0})),
        group_of(attempt("", right=RIGHT, parts={"helpful": 0.5})),
        group_of(attempt("", right=RIGHT, parts={"helpful": 0.75})),
    ]
    parts = figures_of(groups, seed=0)["parts"]
    assert (parts["accuracy"]["mean"], parts["helpful"]["mean"]) == (1.0, 0.625)
    metrics = rollout_metrics(groups)
    assert (metrics["reward/accuracy_mean"], metrics["reward/helpful_mean"]) == (1.0, 0.625)


def test_a_problems_line_says_what_each_attempt_came_to():
    cut = attempt("", right=WRONG, length=9, calls=[ToolOutcome.ERROR, ToolOutcome.NOT_RUN], stop_reason=StopReason.LENGTH)
    line = problem_of(group_of(attempt("", right=RIGHT, calls=[ToolOutcome.STDOUT]), cut, num_void=1), ["2", ""])
    assert line == {
        "id": "t",
        "question": "1 + 1?",
        "answer": "2",
        "correct": [1, 0],
        "length_tokens": [5, 9],
        "tool_calls": [1, 1],
        "tool_errors": [0, 1],
        "truncated": [0, 1],
        "parts": {"accuracy": [1.0, 0.0]},
        "answers": ["2", ""],
        "num_void": 1,
    }


def test_calls_are_counted_by_what_became_of_them():
    calls = [ToolOutcome.STDOUT, ToolOutcome.STDOUT, ToolOutcome.TIMEOUT]
    assert figures_of([group_of(attempt("", right=RIGHT, calls=calls))], seed=0)["tool_outcomes"] == {
        "stdout": 2,
        "timeout": 1,
    }


def test_an_evaluation_is_found_from_its_file_its_stage_and_its_run(tmp_path):
    directory = tmp_path / "run" / "stages" / "after" / "eval"
    write_eval(directory, {"accuracy": 0.5}, [{"question": "é?", "correct": [1]}])
    for path in (directory / "result.json", directory, directory.parent, tmp_path / "run"):
        files = read_eval(path)
        assert (files.result["accuracy"], files.problems[0]["question"]) == (0.5, "é?")
    assert find_results(tmp_path) == [directory / "result.json"]


def test_an_evaluation_that_was_made_anew_is_the_only_one_of_its_run(tmp_path):
    stage = tmp_path / "run" / "stages" / "after"
    write_eval(stage / "eval", {"accuracy": 0.1}, [])
    aside = tmp_path / "run" / "stale" / "after-1"
    aside.parent.mkdir()
    stage.rename(aside)
    write_eval(stage / "eval", {"accuracy": 0.5}, [])
    assert read_eval(tmp_path / "run").result["accuracy"] == 0.5
    assert read_eval(aside).result["accuracy"] == 0.1  # asked for by name
    assert [each.result["accuracy"] for each in map(read_eval, find_results(aside.parent))] == [0.1]


def test_what_is_no_single_evaluation_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(RunError, match=r"absent: no such directory"):
        read_eval(tmp_path / "absent")
    for stage in ("before", "after"):
        write_eval(tmp_path / "stages" / stage / "eval", {"accuracy": 0.5}, [])
    with pytest.raises(RunError, match=r"holds 2 evaluations. Give one of them:\n.*after/eval\n.*before/eval"):
        read_eval(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({"loss": 1}))
    with pytest.raises(RunError, match="not the result of an evaluation"):
        read_eval(tmp_path / "result.json")
