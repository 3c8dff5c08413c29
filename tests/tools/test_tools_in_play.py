"""Tools at work in rollouts: a fault of theirs is tried again, then voids the rollout, and another one takes its place."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_mcp import STDIO
from web_server import Answer, Asked, serving

from scripted_node import ScriptedNode
from strop.config import Config, validate
from strop.engine.protocol import CompletionRequest
from strop.engine.scripted import ScriptedEngine
from strop.errors import ConfigError
from strop.rewards import function_reward
from strop.rollout.chat_template import ChatFormat
from strop.rollout.environment import RolloutLimits, ToolEnvironments
from strop.rollout.player import Judge, NullObserver, Player, SamplingConfig, collect
from strop.rollout.prompt import load_prompt
from strop.sandbox import LocalSandbox, SandboxConfig, ScriptedSandbox
from strop.stages.model import make_tokenizer
from strop.tools import Python, Tool, mcp, open_tools, tool
from strop.tools.limits import CallLimits, limited
from strop.tools.protocol import ToolKind
from strop.tools.python import PythonTool
from strop.types import Group, Task, ToolOutcome

CHAT = ChatFormat(make_tokenizer([], vocab_size=300))
TASK = Task(id="t", question="?", answer="!", source="test")
FOUND = {"results": [{"title": "", "text": "found"}]}


class Tools(Config):
    tools: dict[str, ToolKind]


@asynccontextmanager
async def opened(tables: dict[str, Any]) -> AsyncIterator[tuple[Tool, ...]]:
    async with open_tools(validate(Tools, {"tools": tables}, place="the test").tools, ScriptedSandbox(answer={})) as tools:
        yield tools


async def play_with(
    tools: Sequence[Tool], call: dict[str, Any], *, num_rollouts: int, num_calls: int = 1, **limits: Any
) -> Group:
    """The group of one task whose every rollout makes these calls in its first turn, and then answers. `NUMBER` in a call is
    another one in each."""
    block = f"<tool_call>{json.dumps(call)}</tool_call>"
    numbers = itertools.count()

    def say(request: CompletionRequest) -> tuple[int, ...]:
        is_first = block.partition("NUMBER")[0] not in CHAT.decode(request.ids)
        blocks = "".join(block.replace("NUMBER", str(next(numbers))) for _ in range(num_calls))
        return CHAT.completion_ids(blocks if is_first else "<answer>!</answer>")

    player = Player(
        engine=ScriptedEngine(say),
        environments=ToolEnvironments(CHAT, load_prompt("short"), tools, RolloutLimits(**limits)),
        judge=Judge(reward=function_reward(lambda task, trajectory: 1.0), weights={"reward": 1.0}),
        sampling=SamplingConfig(max_tokens=2048),
        stop_ids=CHAT.stop_ids,
    )
    playing = collect([(0, TASK)], player, num_rollouts=num_rollouts, seed=0, observer=NullObserver(), finished={})
    [group] = [group async for group in playing]
    return group


def outcomes(group: Group) -> list[tuple[int, list[str]]]:
    return [(each.trajectory.key.attempt, [str(call.text) for call in each.trajectory.calls]) for each in group.trajectories]


def test_a_search_service_that_fails_is_asked_again_then_voids_the_rollout_which_is_refilled() -> None:
    """Two tries of a request, three of a rollout: six failures void it; the seventh and eighth are those of the next."""

    def answer(asked: Asked, number: int) -> Answer:
        return Answer(body={}, status=500) if number < 7 else Answer(body=FOUND)

    with serving(answer) as server:
        backend = {"kind": "http", "url": server.url, "retries": 1}

        async def run() -> Group:
            async with opened({"search": {"kind": "search", "backend": backend}}) as tools:
                call = {"name": "search", "arguments": {"query": "x"}}
                return await play_with(tools, call, num_rollouts=1)

        group = asyncio.run(run())
        assert len(server.asked) == 8
    assert outcomes(group) == [(1, ["Page 1: found"])]
    assert (group.num_void, group.rewards) == (1, [1.0])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_mcp_server_that_dies_under_calls_voids_the_rollout_which_is_refilled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One try of a call, three of a rollout: three deaths void it; the next rollout meets a server that lives."""
    monkeypatch.setattr(mcp, "_START_S", 100.0)
    monkeypatch.setattr(mcp, "_PAUSES_S", (0.0,))

    async def run() -> Group:
        async with opened({"remote": {"kind": "mcp", **STDIO}}) as tools:
            call = {"name": "die", "arguments": {"marks": str(tmp_path / "marks"), "times": 3}}
            return await play_with(tools, call, num_rollouts=1, deadline_s=200.0)

    group = asyncio.run(run())
    assert (group.num_void, [attempt for attempt, _ in outcomes(group)]) == (1, [1])
    assert group.trajectories[0].trajectory.calls[0].outcome is ToolOutcome.STDOUT


def test_a_tool_that_keeps_silent_beyond_the_deadline_voids_the_rollout() -> None:
    released = threading.Event()

    @tool
    def ask() -> str:
        """Asks."""
        released.wait(20)
        return "late"

    try:
        group = asyncio.run(play_with([ask], {"name": "ask", "arguments": {}}, num_rollouts=1, deadline_s=0.05))
    finally:
        released.set()
    assert (group.trajectories, group.num_void) == ((), 2)


def test_a_call_that_hangs_to_the_tools_own_limit_is_a_timeout_and_no_fault_of_ours_however_short_the_deadline() -> None:
    """Else a policy could hang its way out of a penalty: the rollout would be played again, and then be void."""

    async def hang() -> str:
        """Never answers."""
        await asyncio.sleep(60)
        return "late"

    tools = [tool(hang, wall_s=0.3)]
    group = asyncio.run(play_with(tools, {"name": "hang", "arguments": {}}, num_rollouts=2, deadline_s=0.1))
    assert [call.outcome for each in group.trajectories for call in each.trajectory.calls] == [ToolOutcome.TIMEOUT] * 2
    assert group.num_void == 0


def test_a_call_that_waits_behind_the_cap_for_longer_than_the_deadline_is_not_voided() -> None:
    num_begun = 0

    @tool
    async def work() -> str:
        """Works."""
        nonlocal num_begun
        num_begun += 1
        await asyncio.sleep(0.06)
        return "done"

    async def run() -> tuple[Group, float]:
        began = time.monotonic()
        tools = limited([work], CallLimits(max_running=1), key="tools.work")
        group = await play_with(tools, {"name": "work", "arguments": {}}, num_rollouts=6, num_calls=4, deadline_s=0.9)
        return group, time.monotonic() - began

    group, took_s = asyncio.run(run())
    assert outcomes(group) == [(attempt, ["done"] * 4) for attempt in range(6)]
    assert (group.num_void, num_begun) == (0, 24)  # none was played again
    assert took_s > 0.9  # one after the other; of its own each rollout takes 0.24 s and what the machine adds


def test_a_call_that_hangs_behind_the_cap_still_meets_its_deadline_and_lets_the_next_one_in() -> None:
    num_begun = 0

    @tool
    async def work() -> str:
        """Hangs, the first time."""
        nonlocal num_begun
        num_begun += 1
        await asyncio.sleep(60 if num_begun == 1 else 0)
        return "done"

    async def run() -> Group:
        tools = limited([work], CallLimits(max_running=1), key="tools.work")
        return await play_with(tools, {"name": "work", "arguments": {}}, num_rollouts=3, deadline_s=0.3)

    group = asyncio.run(run())
    assert outcomes(group) == [(attempt, ["done"]) for attempt in range(3)]
    assert (group.num_void, num_begun) == (0, 4)  # the one that hung was played again


async def play_with_python(node: ScriptedNode, *, num_rollouts: int) -> Group:
    """Rollouts that each call Python once, in a sandbox with this supervisor; a call has 3 * 0.1 + 0.3 s."""

    async def spawn(config: SandboxConfig, name: str) -> ScriptedNode:
        return node

    async with LocalSandbox(spawn=spawn) as box:
        python = PythonTool(box, Python.Config(name="python", wall_s=0.1))
        call = {"name": "python", "arguments": {"code": "1", "input": ""}}
        return await play_with([python], call, num_rollouts=num_rollouts, deadline_s=0.3)


def test_a_call_that_waits_for_a_slot_of_the_sandbox_for_longer_than_the_deadline_is_not_voided() -> None:
    node = ScriptedNode(answer={"1": "1"}, num_slots=1, max_latency_s=0.3)
    began = time.monotonic()
    group = asyncio.run(play_with_python(node, num_rollouts=12))
    assert outcomes(group) == [(attempt, ["1"]) for attempt in range(12)]
    assert (group.num_void, len(node.requests)) == (0, 12)
    assert time.monotonic() - began > 2 * 0.6  # one after the other


def test_no_more_calls_of_a_tool_run_at_once_than_it_may_over_all_rollouts() -> None:
    running, most = 0, 0

    @tool
    async def work() -> str:
        """Works."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return "done"

    async def run() -> Group:
        tools = limited([work], CallLimits(max_running=3), key="tools.work")
        return await play_with(tools, {"name": "work", "arguments": {}}, num_rollouts=8, num_calls=2)

    group = asyncio.run(run())
    assert [texts for _, texts in outcomes(group)] == [["done", "done"]] * 8
    assert most == 3


def test_a_call_that_gave_up_its_place_in_the_queue_does_not_keep_it() -> None:
    @tool
    async def work(seconds: float) -> str:
        """Works."""
        await asyncio.sleep(seconds)
        return "done"

    async def run() -> float:
        [one_at_a_time] = limited([work], CallLimits(max_running=1), key="tools.work")
        calls = [asyncio.ensure_future(one_at_a_time.call({"seconds": 30}, seed=0)) for _ in range(3)]
        await asyncio.sleep(0.01)
        for each in calls:
            each.cancel()
        began = time.monotonic()
        assert (await one_at_a_time.call({"seconds": 0}, seed=0)).text == "done"
        return time.monotonic() - began

    assert asyncio.run(run()) < 10


def shout(text: str) -> str:
    """Says it louder."""
    return text.upper()


def test_tools_of_all_kinds_stand_in_one_recipe_in_their_order(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text('{"x": "Page 1: kept"}')
    tables = {
        "search": {"kind": "search", "description": "Looks.", "max_running": 2, "backend": {"kind": "kept", "path": str(kept)}},
        "python": {"kind": "python", "name": "python"},
        "mine": {"kind": "function", "function": f"{__name__}:shout"},
    }

    async def run() -> list[str]:
        async with opened(tables) as tools:
            assert (await tools[0].call({"query": "x"}, seed=0)).text == "Page 1: kept"
            return [tool.spec.name for tool in tools]

    assert asyncio.run(run()) == ["search", "python", "shout"]


def test_a_recipe_may_describe_a_tool_in_other_words() -> None:
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}

    async def specs(table: dict[str, Any]) -> list[tuple[str, object]]:
        async with opened({"python": table}) as tools:
            started = [await tool.start(seed=0) for tool in tools]
            return [(tool.spec.description, tool.spec.parameters) for tool in started]

    [(own, own_parameters)] = asyncio.run(specs({"kind": "python"}))
    assert own.startswith("Execute Python code with standard input")
    assert asyncio.run(specs({"kind": "python", "description": "Runs code."})) == [("Runs code.", own_parameters)]
    assert asyncio.run(specs({"kind": "python", "parameters": parameters})) == [(own, parameters)]
    with pytest.raises(ConfigError, match=r"tools\.python\.description: the table brings several tools \(add, "):
        asyncio.run(specs({"kind": "mcp", **STDIO, "description": "Does it."}))
