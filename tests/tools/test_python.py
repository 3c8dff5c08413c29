"""The Python tool: what the policy reads for each kind of run, and whose fault is whose."""

from __future__ import annotations

import asyncio

import pytest

from strop.errors import MachineError, ToolBroken
from strop.sandbox import (
    IsolationLevel,
    LocalSandbox,
    RunOutcome,
    RunRequest,
    RunResult,
    SandboxConfig,
    ScriptedSandbox,
    scripted_result,
)
from strop.tools import Python, ToolResult
from strop.tools.python import PythonTool
from strop.types import ToolOutcome


def call(tool: PythonTool, **arguments: object) -> ToolResult:
    return asyncio.run(tool.call(arguments, seed=0))


def tool_that_gets(result: RunResult, **config: object) -> PythonTool:
    return PythonTool(ScriptedSandbox(answer=lambda request: result), Python.Config.model_validate(config))


def test_it_is_described_as_in_the_prompt_of_rstar2_agent() -> None:
    function = PythonTool(ScriptedSandbox(answer={})).spec.as_function()["function"]
    assert function["name"] == "execute_python_code_with_standard_io"
    assert function["parameters"]["required"] == ["code", "input"]
    assert {name: part["type"] for name, part in function["parameters"]["properties"].items()} == {
        "code": "string",
        "input": "string",
    }


def test_the_four_responses_of_rstar2_agent_come_from_real_programs() -> None:
    async def play() -> list[ToolResult]:
        async with LocalSandbox(SandboxConfig(min_level=IsolationLevel.PROCESS)) as box:
            tool = PythonTool(box, Python.Config(wall_s=0.5))
            programs = [
                "print(int(input()) * 2)",
                "6 * 7",
                "print('so far')\n1 / 0",
                "print('so far')\nwhile True: pass",
                "x = 1",
            ]
            return [await tool.call({"code": code, "input": "21"}, seed=0) for code in programs]

    assert [(result.outcome, result.text) for result in asyncio.run(play())] == [
        (ToolOutcome.STDOUT, "42\n"),
        (ToolOutcome.ECHO, "42"),
        (
            ToolOutcome.ERROR,
            'so far\nTraceback (most recent call last):\n  File "<code>", line 2, in <module>\n    1 / 0\n    ~~^~~\n'
            "ZeroDivisionError: division by zero\n",
        ),
        (ToolOutcome.TIMEOUT, "so far\nExecution timed out after 0.5 s."),
        (ToolOutcome.EMPTY, ""),
    ]


@pytest.mark.parametrize(
    ("result", "outcome", "text"),
    [
        (scripted_result("", RunOutcome.TIMEOUT), ToolOutcome.TIMEOUT, "Execution timed out after 4 s."),
        (scripted_result("a", RunOutcome.TIMEOUT), ToolOutcome.TIMEOUT, "a\nExecution timed out after 4 s."),
        (scripted_result("", RunOutcome.KILLED, reason="signal 11"), ToolOutcome.KILLED, "Execution was killed (signal 11)."),
        (scripted_result("Not run: too long.", RunOutcome.REJECTED), ToolOutcome.REJECTED, "Not run: too long."),
        (scripted_result("Execution timed out after 4 s."), ToolOutcome.STDOUT, "Execution timed out after 4 s."),
    ],
)
def test_the_class_comes_from_the_runner_and_never_from_the_text(result: RunResult, outcome: ToolOutcome, text: str) -> None:
    told = call(tool_that_gets(result), code="1", input="")
    assert (told.outcome, told.text) == (outcome, text)


def test_a_long_observation_keeps_its_head_and_its_tail() -> None:
    tool = tool_that_gets(scripted_result("a" * 100 + "b" * 100), max_chars=64)
    assert call(tool, code="1").text == "a" * 32 + "\n[... 136 characters left out ...]\n" + "b" * 32


def test_a_missing_input_counts_as_empty_and_the_seed_reaches_the_program() -> None:
    box = ScriptedSandbox(answer=lambda request: "ok")
    asyncio.run(PythonTool(box).call({"code": "1"}, seed=5))
    assert (box.requests[0].stdin, box.requests[0].seed) == ("", 5)


def test_our_own_faults_are_retried_and_the_policy_does_not_see_them() -> None:
    faults = [scripted_result("", RunOutcome.OVERLOADED), scripted_result("", RunOutcome.INTERNAL)]
    answers = iter([*faults, scripted_result("42")])
    told = call(PythonTool(ScriptedSandbox(answer=lambda request: next(answers))), code="1")
    assert (told.outcome, told.text) == (ToolOutcome.STDOUT, "42")


def test_a_fault_that_stays_breaks_the_tool() -> None:
    box = ScriptedSandbox(answer=lambda request: scripted_result("", RunOutcome.OVERLOADED))
    with pytest.raises(ToolBroken, match="failed 3 times in a row"):
        call(PythonTool(box), code="1")
    assert len(box.requests) == 3


def test_a_lost_sandbox_breaks_the_tool() -> None:
    def lost(request: RunRequest) -> RunResult:
        raise MachineError("the sandbox is gone")

    with pytest.raises(ToolBroken, match="the sandbox is gone"):
        call(PythonTool(ScriptedSandbox(answer=lost)), code="1")
