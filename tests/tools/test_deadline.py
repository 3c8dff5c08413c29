"""How long a call may last: what its clock counts, what it does not, and what each kind of tool says of its own limits."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack

import pytest

from scripted_node import ScriptedNode
from strop.deadline import clock_stopped, deadline
from strop.sandbox import ScriptedSandbox
from strop.tools import Python, Tool, tool
from strop.tools.limits import CallLimits, NoisyTool, limited
from strop.tools.mcp import Mcp, McpServer, McpTool
from strop.tools.protocol import ToolSpec
from strop.tools.python import PythonTool
from strop.tools.search.tool import Search
from strop.types import ToolOutcome


def test_what_a_call_waits_with_its_clock_stopped_is_not_counted_and_the_rest_is() -> None:
    laps: list[float] = []

    async def run() -> None:
        async with deadline(0.3) as timeout:
            with clock_stopped(), clock_stopped():
                await asyncio.sleep(0.5)
            assert not timeout.expired()
            laps.append(time.monotonic())
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert 0.2 < time.monotonic() - laps[0] < 10


def test_the_clock_of_a_call_that_does_two_things_at_once_goes_on_when_neither_waits_any_more() -> None:
    async def wait(seconds: float) -> None:
        with clock_stopped():
            await asyncio.sleep(seconds)

    async def run() -> float:
        async with deadline(0.3) as timeout:
            await asyncio.gather(wait(0.1), wait(0.6))
            assert not timeout.expired()
            began = time.monotonic()
            await asyncio.sleep(60)
        return began

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert 0.8 < time.monotonic() - began < 10


def test_a_tool_that_runs_a_loop_of_its_own_leaves_the_clock_of_its_call_alone() -> None:
    async def wait() -> None:
        with clock_stopped():
            await asyncio.sleep(0.3)

    async def run() -> None:
        async with deadline(0.1):
            await asyncio.to_thread(asyncio.run, wait())

    with pytest.raises(TimeoutError):
        asyncio.run(run())


def test_cells_of_a_notebook_that_wait_for_those_before_them_keep_their_time() -> None:
    node = ScriptedNode(answer=lambda request: request.code, max_latency_s=0.3)

    async def run() -> tuple[list[ToolOutcome], float]:
        began = time.monotonic()
        notebook = await PythonTool(node, Python.Config(stateful=True)).start(seed=1)

        async def cell(number: int) -> ToolOutcome:
            async with deadline(0.8):
                return (await notebook.call({"code": str(number)}, seed=0)).outcome

        found = await asyncio.gather(*(cell(number) for number in range(12)))
        return found, time.monotonic() - began

    found, took_s = asyncio.run(run())
    assert found == [ToolOutcome.STDOUT] * 12
    assert took_s > 0.8  # else nothing was tested


async def _hang() -> str:
    """Hangs."""
    await asyncio.sleep(60)
    return ""


def test_every_kind_of_tool_says_when_its_calls_have_ended_by_its_own_limits() -> None:
    assert tool(_hang, wall_s=7.0).longest_call_s == 7.0
    assert tool(_hang).longest_call_s == 0.0
    # Three tries of 120 s, where it is the sandbox that fails.
    python = PythonTool(ScriptedSandbox(answer={}), Python.Config(wall_s=120.0))
    assert python.longest_call_s == 360.0
    # Four tries of (30 to connect + 30 of the call + 5 for a sign of life + 10 to part), pauses of 0, 0, 1 and 2 s.
    server = McpServer(Mcp(command=[sys.executable, "server.py"]).config, key="tools.remote")
    spec = ToolSpec(name="add", description="Adds.", parameters={})
    assert McpTool(server, "add", spec).longest_call_s == 4 * 75.0 + 3.0


@pytest.mark.parametrize(
    ("backend", "longest_s"),
    [
        ({"kind": "http", "url": "http://127.0.0.1:1/"}, 4 * 10.0 + 3 * 15.0),
        ({"kind": "http", "url": "http://127.0.0.1:1/", "retries": 0, "timeout_s": 2.0}, 2.0),
        ({"kind": "kept", "path": "kept.json"}, 0.0),
    ],
    ids=["four tries and the pauses between them", "one try", "no service"],
)
def test_a_search_is_as_long_as_its_backend_takes(
    backend: dict[str, object], longest_s: float, tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("kept.json", "w") as kept:
        kept.write("{}")

    async def run() -> float:
        async with AsyncExitStack() as stack:
            (tool,) = await Search(backend=backend).open(stack, ScriptedSandbox(answer={}), key="tools.search")
            return tool.longest_call_s

    assert asyncio.run(run()) == longest_s


def test_a_tool_around_another_keeps_its_limits() -> None:
    async def run() -> list[float]:
        inner = tool(_hang, wall_s=7.0)
        [behind_cap] = limited([inner], CallLimits(max_running=1), key="tools.own")
        notebook = PythonTool(ScriptedNode(answer={}), Python.Config(stateful=True, wall_s=2.0))
        around: list[Tool] = [behind_cap, NoisyTool(inner), await notebook.start(seed=0)]
        return [each.longest_call_s for each in [*around, *[await each.fork() for each in around]]]

    assert asyncio.run(run()) == [7.0, 7.0, 6.0] * 2
