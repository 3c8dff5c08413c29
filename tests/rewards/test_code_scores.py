"""What a program earns by its tests: every score by hand, and rows of which none can be made."""

import asyncio
import json

import pytest
from trajectories import trajectory

from strop.config import validate
from strop.errors import ConfigError, MachineError, TaskError
from strop.rewards import SumReward, SumRewardConfig
from strop.sandbox import ScriptedSandbox
from strop.types import StopReason, Task

SMALL, FULL = ["small", "full"], ["full"]
TESTS = [{"input": number, "output": number * 2, "subtasks": SMALL if number in "12" else FULL} for number in "1234"]
POINTS = {"small": 30, "full": 70}


def a_task(tests=TESTS, points=POINTS):
    return Task(id="t", question="?", answer=json.dumps({"tests": tests, "points": points}), source="test")


def program(right):
    """One that prints what is right for these inputs."""
    return f"```python\n# {' '.join(right)}\n```"


def runner(**options):
    def answer(request):
        return request.stdin * 2 if request.stdin in request.code.split() else "?"

    return ScriptedSandbox(answer=answer, **options)


def score(text, *, task=None, sandbox=None, stop_reason=StopReason.ANSWERED, **keys):
    config = validate(SumRewardConfig, {"kind": "sum", "parts": {"it": {"kind": "code", **keys}}}, place="recipe")

    async def judge():
        reward = SumReward(config, sandbox or runner())
        try:
            return await reward(task or a_task(), trajectory(text, stop_reason=stop_reason))
        finally:
            await reward.close()

    return asyncio.run(judge())["it"]


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        ("1234", {"all": 1, "share": 1, "weighted_sum": 1.1, "subtasks": 1}),
        ("123", {"all": 0, "share": 0.75, "weighted_sum": 0.075, "subtasks": 0.3}),  # 30 of 100
        ("12", {"all": 0, "share": 0.5, "weighted_sum": 0.05, "subtasks": 0.3}),
        ("134", {"all": 0, "share": 0.75, "weighted_sum": 0.075, "subtasks": 0}),  # 2 is of both subtasks
        ("", {"all": 0, "share": 0, "weighted_sum": 0, "subtasks": 0}),
    ],
)
def test_a_program_earns_what_its_score_says(right, expected):
    assert {mode: score(program(right), score=mode) for mode in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("right", "expected"),
    [("1234", 1.0), ("24", 0.7), ("13", 0.3), ("123", 0.3), ("4", 0.2), ("34", 0.2), ("2", 0.0)],
)
def test_subtasks_earn_their_points_where_all_their_tests_pass(right, expected):
    of = {"1": ["odd"], "2": ["even"], "3": ["odd"], "4": ["even", "last"]}
    tests = [{**test, "subtasks": of[test["input"]]} for test in TESTS]
    task = a_task(tests, {"odd": 1.5, "even": 2.5, "last": 1})
    for size in ({}, {"test_batch_size": 1}, {"test_batch_size": 2}, {"test_batch_size": 3}):
        assert score(program(right), task=task, score="subtasks", **size) == pytest.approx(expected)


def test_a_task_of_one_subtask_scores_by_its_worst_test():
    task = a_task([{**test, "subtasks": ["only"]} for test in TESTS], {"only": 12})
    assert [score(program(right), task=task, score="subtasks") for right in ("1234", "234")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("mode", "right", "started"),
    [
        ("all", "134", "12"),
        ("subtasks", "134", "12"),  # the second test is of both
        ("subtasks", "124", "123"),
        ("subtasks", "1234", "1234"),
    ],
)
def test_what_a_failure_settles_is_not_run(mode, right, started):
    sandbox = runner()
    score(program(right), sandbox=sandbox, score=mode, test_batch_size=1)
    assert "".join(request.stdin for request in sandbox.requests) == started


@pytest.mark.parametrize("mode", ["share", "weighted_sum"])
def test_a_score_to_which_every_test_counts_runs_them_all(mode):
    sandbox = runner()
    score(program("4"), sandbox=sandbox, score=mode)
    assert "".join(request.stdin for request in sandbox.requests) == "1234"


@pytest.mark.parametrize("mode", ["all", "share", "weighted_sum", "subtasks"])
def test_a_rollout_without_a_program_scores_what_the_recipe_says(mode):
    cut_off = {"text": program("1234"), "stop_reason": StopReason.LENGTH}
    for rollout in ({"text": "I do not know."}, cut_off):
        assert score(**rollout, score=mode) == 0
        assert score(**rollout, score=mode, no_code=-1.0) == -1
    assert score(program(""), score=mode, no_code=-1.0) == 0  # a wrong one is a program


@pytest.mark.parametrize("mode", ["all", "share", "weighted_sum", "subtasks"])
def test_a_lost_sandbox_is_no_wrong_program(mode):
    with pytest.raises(MachineError):
        score(program("1234"), sandbox=runner(dies_after=3), score=mode)


ALL_FORMS = [
    [{"input": "1", "output": "11"}, {"input": "2", "output": "22"}],
    {"inputs": ["1", "2"], "outputs": ["11", "22"]},
    {"tests": [{"input": "1", "output": "11"}, {"input": "2", "output": "22"}]},
]


@pytest.mark.parametrize("tree", ALL_FORMS, ids=["rows", "columns", "tests"])
def test_tests_of_every_form_are_read_and_subtasks_are_asked_of_one(tree):
    task = Task(id="t", question="?", answer=json.dumps(tree), source="test")
    assert score(program("1"), task=task, score="share") == 0.5
    with pytest.raises(TaskError, match=r"task 't': its answer holds no subtasks .*Write JSON: .*or set another score"):
        score(program("1"), task=task, score="subtasks")


def with_test(number, subtasks):
    return [{**test, "subtasks": subtasks} if place == number else test for place, test in enumerate(TESTS, start=1)]


@pytest.mark.parametrize(
    ("tests", "points", "message"),
    [
        (with_test(3, []), POINTS, "test 3 is of no subtask, .* Name one in its"),
        ([{"input": "1", "output": "11"}], POINTS, "test 1 is of no subtask"),
        (with_test(2, ["big"]), POINTS, "test 2 is of subtask 'big', which has no points; those with points: small, full"),
        (TESTS, {}, "test 1 is of subtask 'full', which has no points; those with points: none"),
        (TESTS, {**POINTS, "big": 5}, "subtask 'big' has points but no test. Name it"),
        (TESTS, {**POINTS, "full": 0}, "subtask 'full' has 0 points. Give it more"),
        (TESTS, {**POINTS, "full": -70}, "subtask 'full' has -70 points"),
        (TESTS, {**POINTS, "full": float("nan")}, "subtask 'full' has nan points"),
        (TESTS, {**POINTS, "full": "70"}, r"holds no subtasks \(TypeError: points are '70', which is no number\)"),
        (TESTS, {**POINTS, "full": True}, "points are True, which is no number"),
        (TESTS, [30, 70], "holds no subtasks"),
        (with_test(1, "small"), POINTS, "the subtasks of a test are 'small', which is no list of names"),
    ],
)
def test_a_row_whose_tests_and_points_do_not_fit_is_named(tests, points, message):
    with pytest.raises(TaskError, match=f"task 't': .*its answer.*{message}"):
        score(program("1234"), task=a_task(tests, points), score="subtasks")
    assert score(program("1234"), task=a_task(tests, points), score="share") == 1  # which needs no subtasks


def test_subtasks_may_stand_in_a_fact():
    whole = a_task()
    task = Task(id="t", question="?", answer="", source="test", facts={"cases": whole.answer})
    assert score(program("12"), task=task, score="subtasks", tests_fact="cases") == pytest.approx(0.3)
    bad = Task(id="t", question="?", answer="", source="test", facts={"cases": a_task(points={}).answer})
    with pytest.raises(TaskError, match="task 't': in its fact 'cases' test 1"):
        score(program("12"), task=bad, score="subtasks", tests_fact="cases")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"score": "share", "test_batch_size": 4}, "test_batch_size is 4 but score is 'share', to which every test counts"),
        ({"score": "weighted_sum", "test_batch_size": 4}, "Remove it, or set score = 'all' or 'subtasks'"),
        ({"test_batch_size": 0}, "test_batch_size"),
        ({"no_code": 0.5}, "no_code"),
        ({"score": "partial"}, "score"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        score(program("1"), **keys)
