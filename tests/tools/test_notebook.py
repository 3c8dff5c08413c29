"""The stateful Python tool: what lasts from call to call, what a branch gets, and whose fault a lost notebook is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from scripted_node import ScriptedNode
from strop.errors import MachineError, ToolBroken, UserError
from strop.sandbox import IsolationLevel, LocalSandbox, RunOutcome, SandboxConfig, ScriptedSandbox, scripted_result
from strop.sandbox.protocol import RunRequest, RunResult
from strop.tools import Python, Tool
from strop.tools.notebook import NEW_NOTEBOOK
from strop.tools.python import PythonTool
from strop.types import ToolOutcome

STATEFUL = Python.Config(stateful=True, wall_s=1.0)


async def say(tool: Tool, code: str) -> tuple[ToolOutcome, str]:
    result = await tool.call({"code": code}, seed=0)
    return result.outcome, result.text


def test_a_notebook_of_a_real_sandbox() -> None:
    async def run() -> None:
        async with LocalSandbox(SandboxConfig(min_level=IsolationLevel.PROCESS)) as box:
            if box.level.rank < IsolationLevel.NAMESPACES.rank:
                pytest.skip("copies of a session need namespaces")
            for play in (remembers_and_forks, ends_and_is_replaced):
                notebook = await PythonTool(box, STATEFUL).start(seed=1)
                await play(notebook)
                await notebook.close()

    asyncio.run(run())


async def remembers_and_forks(notebook: Tool) -> None:
    """A branch goes its own way from where it forked."""
    assert await say(notebook, "x = 1") == (ToolOutcome.EMPTY, "")
    assert (await say(notebook, "x = 2\n1 / 0"))[0] is ToolOutcome.ERROR
    branch = await notebook.fork()
    assert await say(branch, "x += 10\nx") == (ToolOutcome.ECHO, "12")
    assert await say(notebook, "x") == (ToolOutcome.ECHO, "2")
    await branch.close()
    assert await say(notebook, "x") == (ToolOutcome.ECHO, "2")


async def ends_and_is_replaced(notebook: Tool) -> None:
    """A cell that ends its notebook has its own outcome, and the next one is told of the new notebook."""
    await say(notebook, "x = 1")
    assert await say(notebook, "import os\nos._exit(3)") == (ToolOutcome.ERROR, "The program exited with code 3.\n")
    assert await say(notebook, "print('x' in globals())") == (ToolOutcome.STDOUT, f"{NEW_NOTEBOOK}\nFalse\n")
    assert await say(notebook, "x = 1\nx") == (ToolOutcome.ECHO, "1")


def scripted(answer: Callable[[RunRequest], str | RunResult]) -> tuple[ScriptedNode, PythonTool]:
    node = ScriptedNode(answer=answer)
    return node, PythonTool(node, STATEFUL)


def test_two_rollouts_have_two_notebooks_and_closing_one_leaves_the_other() -> None:
    node, tool = scripted(lambda request: request.code)

    async def play() -> None:
        one, two = await tool.start(seed=1), await tool.start(seed=2)
        await say(one, "1")
        await say(two, "2")
        assert [[cell.code for cell in cells] for cells in node.cells.values()] == [["1"], ["2"]]
        await one.close()
        await one.close()
        assert [[cell.code for cell in cells] for cells in node.cells.values()] == [["2"]]

    asyncio.run(play())


def test_the_calls_of_one_turn_run_in_their_order() -> None:
    node, tool = scripted(lambda request: request.code)
    node.max_latency_s = 0.02

    async def play() -> None:
        notebook = await tool.start(seed=1)
        await asyncio.gather(*(say(notebook, str(number)) for number in range(8)))
        [cells] = node.cells.values()
        assert [cell.code for cell in cells] == [str(number) for number in range(8)]

    asyncio.run(play())


def test_a_notebook_that_was_never_used_opens_no_session_and_neither_does_its_branch() -> None:
    node, tool = scripted(lambda request: request.code)

    async def play() -> None:
        notebook = await tool.start(seed=1)
        branch = await notebook.fork()
        assert node.cells == {}
        await say(branch, "1")
        await branch.close()
        await notebook.close()
        assert node.cells == {}

    asyncio.run(play())


def test_a_session_that_is_lost_after_an_ordinary_cell_breaks_the_tool_at_once() -> None:
    node, tool = scripted(lambda request: "ok")

    async def play() -> None:
        notebook = await tool.start(seed=1)
        await say(notebook, "x = 1")
        node.cells.clear()  # as when its lease ran out
        with pytest.raises(ToolBroken, match="has no session"):
            await say(notebook, "x")
        with pytest.raises(MachineError):
            await notebook.fork()

    asyncio.run(play())
    assert len(node.requests) == 2  # the cell was not tried again: it would have met another state


def test_a_session_that_is_lost_after_a_killed_cell_is_the_policys_own_doing() -> None:
    node, tool = scripted(
        lambda request: scripted_result("", RunOutcome.KILLED, reason="memory") if "[0]" in request.code else "ok"
    )

    async def play() -> None:
        notebook = await tool.start(seed=1)
        assert (await say(notebook, "[0] * 10**12"))[0] is ToolOutcome.KILLED
        node.cells.clear()
        branch = await notebook.fork()
        for one in (notebook, branch):
            assert await say(one, "x") == (ToolOutcome.STDOUT, f"{NEW_NOTEBOOK}\nok")
            assert await say(one, "x") == (ToolOutcome.STDOUT, "ok")

    asyncio.run(play())


def test_a_runner_without_sessions_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match="keeps sessions, and ScriptedSandbox keeps none"):
        PythonTool(ScriptedSandbox(answer={}), STATEFUL)
