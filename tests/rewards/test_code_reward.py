import asyncio
import json
from dataclasses import replace

import pytest
from trajectories import TASK, called, trajectory, turn

from strop.config import validate
from strop.errors import ConfigError, MachineError, TaskError
from strop.rewards import CodeRewardConfig, RewardConfig, make_reward
from strop.rewards.code import extract_code, read_tests
from strop.sandbox import ScriptedSandbox
from strop.types import StopReason

TESTS = [{"input": f"{number}\n", "output": f"{number * number}\n"} for number in (2, 3, 4)]
SQUARE = replace(TASK, question="Square it.", answer=json.dumps(TESTS))
RIGHT, HALF, WRONG = "print(int(input()) ** 2)\n", "print(4)\n", "print('four')\n"


def says(request):
    """What Python would print."""
    number = int(request.stdin)
    return {RIGHT: f"{number**2}\n", HALF: "4\n", WRONG: "four\n"}[request.code]


def block(code):
    return f"Here it is.\n```python\n{code}```\nDone."


def judge(judged, *, sandbox=None, task=SQUARE, **keys):
    sandbox = sandbox or ScriptedSandbox(answer=says)
    config = CodeRewardConfig(kind="code", **keys)
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
    task = replace(SQUARE, answer=json.dumps([TESTS[1], TESTS[0], TESTS[0], TESTS[2]]))
    assert judge(trajectory(block(HALF)), task=task)["passed"] == 0.0  # the first test fails
    assert judge(trajectory(block(HALF)), task=task, weights={"passed": 1.0})["passed"] == 0.5


def test_a_lost_sandbox_is_no_wrong_program():
    with pytest.raises(MachineError):
        judge(trajectory(block(RIGHT)), sandbox=ScriptedSandbox(answer=says, dies_after=1))


def test_limits_and_the_place_of_the_tests_come_from_the_recipe():
    sandbox = ScriptedSandbox(answer=says)
    task = replace(TASK, facts={"cases": json.dumps({"inputs": ["5\n"], "outputs": ["25\n"]})})
    assert judge(trajectory(block(RIGHT)), sandbox=sandbox, task=task, tests_fact="cases", wall_s=1.5, memory_mib=64)[
        "accuracy"
    ]
    (request,) = sandbox.requests
    assert (request.code, request.stdin, request.wall_s, request.memory_mib) == (RIGHT, "5\n", 1.5, 64)


@pytest.mark.parametrize("answer", ["72", "[]", "{}", "not JSON", '[{"input": "1"}]', '[{"input": 1, "output": 1}]',
                                    '{"inputs": ["1"], "outputs": []}'])  # fmt: skip
def test_a_task_without_tests_is_refused_by_name(answer):
    with pytest.raises(TaskError, match="task 't': its answer holds no tests"):
        read_tests(replace(TASK, answer=answer), fact=None)


def test_a_task_without_the_fact_is_refused_by_name():
    with pytest.raises(TaskError, match=r"task 't' has no fact 'cases'.* its facts: none"):
        read_tests(TASK, fact="cases")


@pytest.mark.parametrize("text", ["``` print(1) ```", "```python\nprint(1)", "", "`print(1)`"])
def test_what_is_no_closed_block_is_no_program(text):
    assert extract_code(trajectory(text)) is None


def test_a_weight_on_no_part_is_refused():
    with pytest.raises(ConfigError, match=r"weights\.pased: no such part\. Did you mean 'passed'"):
        validate(CodeRewardConfig, {"kind": "code", "weights": {"pased": 1.0}}, place="recipe")


def test_programs_are_not_judged_without_a_sandbox_but_answers_are():
    with pytest.raises(ConfigError, match="no sandbox to run them in"):
        make_reward(CodeRewardConfig(kind="code"))
    answer = trajectory(r"<answer>\boxed{72}</answer>")
    assert asyncio.run(make_reward(RewardConfig())(TASK, answer))["accuracy"] == 1.0
