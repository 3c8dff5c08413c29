"""What a program earns by its tests: every score by hand, and rows that hold no tests."""

import asyncio
import json
from dataclasses import replace

import pytest
from trajectories import TASK, called, trajectory, turn

from faulty_sandbox import FaultySandbox
from strop.errors import ConfigError, MachineError, TaskError
from strop.rewards import MathReward, Reward, make_reward
from strop.rewards.code import CodeReward, extract_code, read_tests
from strop.sandbox import ScriptedSandbox
from strop.types import StopReason, Task

SQUARES = [{"input": f"{number}\n", "output": f"{number * number}\n"} for number in (2, 3, 4)]
SQUARE = replace(TASK, question="Square it.", answer=json.dumps(SQUARES))
RIGHT, HALF, WRONG = "print(int(input()) ** 2)\n", "print(4)\n", "print('four')\n"
MODES = ["all", "share", "weighted_sum", "subtasks"]


def says(request):
    """What Python would print."""
    number = int(request.stdin)
    code = request.code.partition("\n")[2]  # the first line closes stderr
    return {RIGHT: f"{number**2}\n", HALF: "4\n", WRONG: "four\n"}[code]


def block(code):
    return f"Here it is.\n```python\n{code}```\nDone."


def judge(judged, *, sandbox=None, task=SQUARE, **keys):
    sandbox = sandbox or ScriptedSandbox(answer=says)
    config = CodeReward(**keys)
    return dict(asyncio.run(make_reward(config, sandbox)(task, judged)))


@pytest.mark.parametrize(
    ("judged", "parts"),
    [
        (trajectory(block(RIGHT)), (1, 1, 1, 0)),
        (trajectory(block(WRONG)), (0, 0, 1, 0)),
        (trajectory(block(HALF)), (0, 1 / 3, 1, 0)),
        (trajectory(block(WRONG) + "Better:\n" + block(RIGHT)), (1, 1, 1, 0)),  # the last block counts
        (trajectory(turn("", called()), block(RIGHT)), (1, 1, 1, 1)),
        (trajectory(RIGHT), (0, 0, 0, 0)),
        (trajectory(turn(block(RIGHT), called()), "It is above."), (0, 0, 0, 1)),
        (trajectory(block(RIGHT), stop_reason=StopReason.LENGTH), (0, 0, 0, 0)),
    ],
)
def test_the_parts_are_accuracy_passed_format_and_called(judged, parts):
    assert judge(judged) == dict(zip(("accuracy", "passed", "format", "called"), parts, strict=True))


def test_a_weight_on_the_share_of_passed_tests_runs_them_all():
    task = replace(SQUARE, answer=json.dumps([SQUARES[1], SQUARES[0], SQUARES[0], SQUARES[2]]))
    assert judge(trajectory(block(HALF)), task=task)["passed"] == 0.0  # the first test fails
    assert judge(trajectory(block(HALF)), task=task, weights={"passed": 1.0})["passed"] == 0.5


def test_limits_come_from_the_recipe():
    sandbox = ScriptedSandbox(answer=says)
    task = replace(TASK, answer=json.dumps({"inputs": ["5\n"], "outputs": ["25\n"]}))
    assert judge(trajectory(block(RIGHT)), sandbox=sandbox, task=task, wall_s=1.5, memory_mib=64)["accuracy"]
    (request,) = sandbox.requests
    assert (request.code.partition("\n")[2], request.stdin, request.wall_s, request.memory_mib) == (RIGHT, "5\n", 1.5, 64)


@pytest.mark.parametrize(
    "answer",
    [
        *("72", "[]", "{}", "not JSON", '[{"input": "1"}]', '[{"input": 1, "output": 1}]', '{"inputs": ["1"], "outputs": []}'),
        *("[" * 3000, json.dumps({"fn_name": "f", "inputs": ["[" * 3000], "outputs": ["1"]})),
        *('{"fn_name": "f", "inputs": [1], "outputs": [1]}', '{"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}'),
    ],
)
def test_a_task_without_tests_is_refused_by_name(answer):
    with pytest.raises(TaskError, match="task 't': its answer holds no tests"):
        read_tests(replace(TASK, answer=answer))


@pytest.mark.parametrize("text", ["``` print(1) ```", "print(1)", "", "`print(1)`", "```json\n[1]\n```"])
def test_what_is_no_block_of_python_is_no_program(text):
    assert extract_code(trajectory(text)) is None


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```",
        "```Python3 title=a.py\nprint(1)\n```\n",
        "```\nprint(1)\n```",
        "```python\nprint(1)\n",  # not closed
        "1. A list:\n\n   ```py\n   print(1)\n   ```\n",
        "```python\nprint(1)\n```\nIt prints:\n```\n1\n```\n```text\nor so\n```",  # the last block of Python
        "```json\n[1]\n```python\nprint(1)\n```",
        "````python\nprint(1)\n````",
        "<answer> ```python\nprint(1)\n``` </answer>",
        "<answer>```python\nprint(1)\n```</answer>",
        "<answer>\n```python\nprint(1)\n</answer>",  # not closed
        "```python\nprint(2)\n```\n<answer>```python\nprint(1)\n```</answer>\n```python\nprint(3)\n```",
        "```python\nprint(1)\n```\n<answer>the program above</answer>",
        "Here: ```python\nprint(1)\n```",
        "Here: ```python\nprint(1)```\nIt prints 1.",
        "I write ```python blocks.\n```python\nprint(1)\n```",
    ],
)
def test_the_program_is_the_last_block_of_python(text):
    assert (extract_code(trajectory(text)) or "").rstrip() == "print(1)"


def test_an_indented_block_keeps_its_own_indentation():
    text = "- so:\n  ```python\n  if 1:\n      print(1)\n\n  ```"
    assert extract_code(trajectory(text)) == "if 1:\n    print(1)\n\n"


@pytest.mark.parametrize(
    ("answer", "call", "value"),
    [
        ({"fn_name": "add", "inputs": [[1, [2]]], "outputs": [[3]]}, "[1, [2]]", "[3]"),
        ({"fn_name": "add", "inputs": ["1\n[2]"], "outputs": ["[3]"]}, "[1, [2]]", "[3]"),  # as LiveCodeBench has it
    ],
)
def test_a_row_that_names_a_function_has_calls(answer, call, value):
    tests = read_tests(replace(TASK, answer=json.dumps(answer)))
    assert tests.fn_name == "add"
    assert [(test.input, test.output) for test in tests.tests] == [(call, value)]
    sandbox = ScriptedSandbox(answer=lambda request: f"{value}\n")
    task = replace(TASK, answer=json.dumps(answer))
    assert judge(trajectory("```python\ndef add(a, b): ...\n```"), sandbox=sandbox, task=task)["accuracy"] == 1.0
    assert "_call_tested_function('add')" in sandbox.requests[0].code


def test_programs_are_not_judged_without_a_sandbox_but_answers_are():
    with pytest.raises(ConfigError, match="no sandbox to run them in"):
        make_reward(CodeReward())
    answer = trajectory(r"<answer>\boxed{72}</answer>")
    assert asyncio.run(make_reward(MathReward())(TASK, answer))["accuracy"] == 1.0


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

    return FaultySandbox(answer=answer, **options)


def score(text, *, task=None, sandbox=None, stop_reason=StopReason.ANSWERED, **keys):
    config = Reward.of({"kind": "sum", "parts": {"it": {"kind": "code", **keys}}})
    reward = make_reward(config, sandbox or runner())
    return asyncio.run(reward(task or a_task(), trajectory(text, stop_reason=stop_reason)))["it"]


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
    assert score(program(right), task=task, score="subtasks") == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["share", "weighted_sum"])
def test_a_score_to_which_every_test_counts_runs_them_all(mode):
    sandbox = runner()
    score(program("4"), sandbox=sandbox, score=mode)
    assert "".join(request.stdin for request in sandbox.requests) == "1234"


@pytest.mark.parametrize("mode", MODES)
def test_no_program_scores_0_and_a_lost_sandbox_is_no_wrong_program(mode):
    assert score("I do not know.", score=mode) == 0
    assert score(program("1234"), stop_reason=StopReason.LENGTH, score=mode) == 0
    with pytest.raises(MachineError):
        score(program("1234"), sandbox=runner(dies_after=3), score=mode)


@pytest.mark.parametrize(
    ("tests", "points", "message"),
    [
        ([{**TESTS[0], "subtasks": []}, *TESTS[1:]], POINTS, r"test 1 has the subtasks \[\]"),
        ([*TESTS, {**TESTS[0], "subtasks": ["big"]}], POINTS, r"test 5 .*'big'.* needs points \(known: small, full\)"),
        (TESTS, {**POINTS, "big": 5}, "subtask 'big' has points but no test"),
        (TESTS, {**POINTS, "full": 0}, "full"),
        (TESTS, {**POINTS, "full": float("nan")}, "full"),
        (TESTS, {**POINTS, "full": True}, "full"),
        (TESTS, [30, 70], "points"),
    ],
)
def test_a_row_whose_tests_and_points_do_not_fit_is_named(tests, points, message):
    with pytest.raises(TaskError, match=f"(?s)task 't': .*{message}"):
        score(program("1234"), task=a_task(tests, points), score="subtasks")
