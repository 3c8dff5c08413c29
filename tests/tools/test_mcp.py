"""Tools of MCP servers, with a real server process over stdin and stdout, and over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from web_server import Answer, Asked, serving

from strop.config import validate
from strop.errors import ConfigError, ToolBroken, UserError
from strop.rollout.tool_calls import argument_problem
from strop.sandbox import ScriptedSandbox
from strop.tools import Tool, mcp
from strop.tools.mcp import Mcp
from strop.types import ToolOutcome

_ResultT = TypeVar("_ResultT")

SERVER = str(Path(__file__).with_name("mcp_server.py"))
PATIENT = {"wall_s": 100.0}  # a server takes long to start where many programs do
STDIO: dict[str, Any] = {**PATIENT, "command": [sys.executable, SERVER, "stdio"]}

pytestmark = pytest.mark.timeout(240)
ONE_TRY = (0.0,)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_START_S", 100.0)


def with_tools(config: dict[str, Any], use: Callable[[dict[str, Tool]], Awaitable[_ResultT]]) -> _ResultT:
    async def run() -> _ResultT:
        async with AsyncExitStack() as stack:
            tools = await Mcp(**config).open(stack, ScriptedSandbox(answer={}), key="tools.remote")
            return await use({tool.spec.name: tool for tool in tools})

    return asyncio.run(run())


async def told(tool: Tool, **arguments: object) -> tuple[ToolOutcome, str]:
    result = await tool.call(arguments, seed=0)
    return result.outcome, result.text


@contextmanager
def http_server() -> Iterator[tuple[str, Callable[[], subprocess.Popen[bytes]]]]:
    """The address of a server, and what starts it (anew)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        for each in running:
            each.kill()
            each.wait()
        command = [sys.executable, SERVER, "http", str(port)]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        until = time.monotonic() + 100
        while time.monotonic() < until:
            with socket.socket() as line:
                if line.connect_ex(("127.0.0.1", port)) == 0:
                    return running[-1]
            time.sleep(0.05)
        raise AssertionError("the server did not start")

    try:
        yield f"http://127.0.0.1:{port}/mcp", start
    finally:
        for each in running:
            each.kill()
            each.wait()


async def every_outcome(tools: dict[str, Tool]) -> None:
    assert set(tools) == {"add", "move", "fail", "refuse", "say", "wait", "die", "secret"}
    assert tools["add"].spec.description == "Adds two numbers."
    assert tools["add"].spec.parameters["required"] == ["a", "b"]
    parameters = tools["move"].spec.parameters
    assert parameters["properties"]["point"]["properties"]["x"] == {"type": "number"}
    assert argument_problem(parameters, {"point": {"x": 1, "z": 2}}) == "unknown argument 'point.z' (known: x, y)"
    assert await told(tools["add"], a=2, b=3) == (ToolOutcome.STDOUT, "5")
    assert await told(tools["move"], point={"x": 1}, direction="down") == (ToolOutcome.STDOUT, "1,-1")
    assert await told(tools["say"], text="") == (ToolOutcome.EMPTY, "")
    outcome, text = await told(tools["fail"], reason="the reason")
    assert outcome is ToolOutcome.ERROR
    assert "the reason" in text
    assert (await told(tools["add"], a="two", b=3))[0].is_error
    assert [text for _, text in await asyncio.gather(*(told(tools["add"], a=n, b=1) for n in range(20)))] == [
        str(n + 1) for n in range(20)
    ]


async def every_refusal(tools: dict[str, Tool], *codes: int) -> None:
    """With another call on the connection, which would be lost with it: it is not made again."""
    waiting = asyncio.ensure_future(told(tools["wait"], seconds=1.5))
    await asyncio.sleep(0.3)
    for code in codes:
        assert await told(tools["refuse"], code=code) == (ToolOutcome.ERROR, f"refused with {code}")
    assert (await told(tools["refuse"], code=-32602))[0] is ToolOutcome.WRONG_ARGUMENTS
    assert await waiting == (ToolOutcome.STDOUT, "waited")


def test_a_server_over_stdin_and_stdout_offers_its_tools_with_typed_outcomes_and_errors_of_the_protocol_are_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp, "_PAUSES_S", ONE_TRY)

    async def play(tools: dict[str, Tool]) -> None:
        await every_outcome(tools)
        await every_refusal(tools, -32002, -32600, -32601, -32603, -32000, 7)

    with_tools(STDIO, play)


def test_so_does_a_server_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_PAUSES_S", ONE_TRY)

    async def play(tools: dict[str, Tool]) -> None:
        await every_outcome(tools)
        await every_refusal(tools, -32002, -32600, -32601, -32603, 7)

    with http_server() as (url, start):
        start()
        with_tools({**PATIENT, "url": url}, play)


def scripted(*, listing: Answer, calls: Callable[[int], Answer]) -> Callable[[Asked, int], Answer]:
    """A server of MCP over HTTP that knows nothing; `calls` gets the number of the call."""
    num_calls = iter(range(1_000))

    def answer(asked: Asked, number: int) -> Answer:
        if asked.method != "POST" or "id" not in asked.body:
            return Answer(body=b"", status=202 if asked.method == "POST" else 405)
        told = Answer(body={"error": {"code": -32601, "message": "unknown"}})
        if asked.body["method"] == "initialize":
            version = asked.body["params"]["protocolVersion"]
            server = {"name": "scripted", "version": "0"}
            told = Answer(body={"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}})
        elif asked.body["method"] == "tools/list":
            told = listing
        elif asked.body["method"] == "tools/call":
            told = calls(next(num_calls))
        body = {"jsonrpc": "2.0", "id": asked.body["id"], **told.body} if isinstance(told.body, dict) else told.body
        return Answer(body=body, status=told.status, headers={"Content-Type": "application/json"}, delay_s=told.delay_s)

    return answer


ONE_TOOL = Answer(body={"result": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]}})


def test_an_answer_that_a_proxy_lost_is_asked_for_again_and_the_policy_does_not_see_it() -> None:
    def answer(number: int) -> Answer:
        found = Answer(body={"result": {"content": [{"type": "text", "text": "found"}]}})
        return Answer(body=b"bad gateway", status=502) if number == 0 else found

    with serving(scripted(listing=ONE_TOOL, calls=answer)) as server:
        config = {**PATIENT, "url": f"{server.url}/mcp"}
        assert with_tools(config, lambda tools: told(tools["look"])) == (ToolOutcome.STDOUT, "found")


PROMISING = Answer(
    body={
        "result": {
            "tools": [
                {
                    "name": "look",
                    "inputSchema": {"type": "object"},
                    "outputSchema": {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]},
                }
            ]
        }
    }
)


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        ({"content": [{"type": "text", "text": "big"}]}, "has an output schema but did not return structured content"),
        ({"content": [], "structuredContent": {"size": "big"}}, "'big' is not of type 'integer'"),
        ({"content": "big"}, "validation error"),
    ],
    ids=["nothing structured", "of another type", "no result"],
)
def test_an_answer_against_its_own_schema_is_the_servers_error_and_is_not_asked_for_again(
    result: dict[str, Any], fault: str
) -> None:
    def answer(number: int) -> Answer:
        assert number == 0, "it was asked again"
        return Answer(body={"result": result})

    with serving(scripted(listing=PROMISING, calls=answer)) as server:
        outcome, text = with_tools({**PATIENT, "url": f"{server.url}/mcp"}, lambda tools: told(tools["look"]))
    assert outcome is ToolOutcome.ERROR
    assert text.startswith("The answer of look is invalid: ")
    assert fault in text


@pytest.mark.parametrize(
    ("listing", "fault"),
    [
        (Answer(body={"error": {"code": -32603, "message": "the list is gone"}}), "MCPError: the list is gone"),
        (Answer(body={"result": {"tools": "none"}}), "does not list its tools: "),
        (Answer(body={}, delay_s=6.0), "no list within 2 s"),
    ],
    ids=["refused", "no list", "silent"],
)
def test_a_server_that_does_not_list_its_tools_is_told_with_the_key(
    listing: Answer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "_START_S", 2.0)

    async def play(tools: dict[str, Tool]) -> None:
        raise AssertionError("it opened")

    with (
        serving(scripted(listing=listing, calls=lambda number: listing)) as server,
        pytest.raises(UserError, match=f"tools.remote: the MCP server .*{fault}"),
    ):
        with_tools({**PATIENT, "url": f"{server.url}/mcp"}, play)


def test_a_server_that_dies_in_mid_call_is_started_anew_and_the_policy_does_not_see_it(tmp_path: Path) -> None:
    async def play(tools: dict[str, Tool]) -> None:
        marks = tmp_path / "marks"
        outcome, text = await told(tools["die"], marks=str(marks), times=2)
        assert outcome is ToolOutcome.STDOUT
        assert marks.read_text() == "xxx"
        assert await told(tools["die"], marks=str(marks), times=2) == (outcome, text)  # the process that came last lives on

    with_tools(STDIO, play)


@pytest.mark.slow
def test_a_server_that_keeps_dying_breaks_the_tool_and_its_last_words_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "_PAUSES_S", 2 * ONE_TRY)

    async def play(tools: dict[str, Tool]) -> None:
        with pytest.raises(
            ToolBroken, match=r"tools.remote: failed 2 times in a row.* was lost during a call of die.*dying as told"
        ):
            await told(tools["die"], marks=str(tmp_path / "marks"), times=9)
        assert await told(tools["add"], a=1, b=1) == (ToolOutcome.STDOUT, "2")

    with_tools({**STDIO, "only": ["die", "add"]}, play)


@pytest.mark.slow
def test_an_http_server_that_is_killed_and_comes_back_is_reached_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_PAUSES_S", (0.0, 0.0, 1.0, 2.0, 4.0, 8.0))

    with http_server() as (url, start):
        start()

        async def play(tools: dict[str, Tool]) -> None:
            waiting = asyncio.ensure_future(told(tools["wait"], seconds=1.0))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(start)
            assert await waiting == (ToolOutcome.STDOUT, "waited")

        with_tools({**PATIENT, "url": url}, play)


@pytest.mark.slow
def test_a_slow_call_is_a_timeout_while_a_server_that_hangs_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_ALIVE_S", 2.0)
    monkeypatch.setattr(mcp, "_PAUSES_S", ONE_TRY)
    with http_server() as (url, start):
        process = start()

        async def play(tools: dict[str, Tool]) -> None:
            assert await told(tools["wait"], seconds=60) == (ToolOutcome.TIMEOUT, "wait gave no answer within 2 s.")
            assert await told(tools["add"], a=1, b=1) == (ToolOutcome.STDOUT, "2")
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(ToolBroken, match="lists no tools within 2 s"):
                await told(tools["wait"], seconds=0)

        with_tools({**PATIENT, "url": url, "wall_s": 2.0}, play)


@pytest.mark.slow
def test_a_cancelled_call_leaves_the_connection_to_others() -> None:
    async def play(tools: dict[str, Tool]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(told(tools["wait"], seconds=60), 0.2)
        assert await told(tools["add"], a=1, b=1) == (ToolOutcome.STDOUT, "2")

    with_tools(STDIO, play)


@pytest.mark.slow
def test_the_process_has_ended_when_the_tools_are_closed(tmp_path: Path) -> None:
    async def play(tools: dict[str, Tool]) -> int:
        _, text = await told(tools["die"], marks=str(tmp_path / "marks"), times=0)
        return int(text.removeprefix("pid "))

    process_id = with_tools(STDIO, play)
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


@pytest.mark.slow
def test_a_recipe_chooses_and_renames_tools_and_says_what_the_program_finds_in_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FOR_THE_SERVER", "ours")  # which is not passed on

    async def play(tools: dict[str, Tool]) -> tuple[list[str], str]:
        return list(tools), (await told(tools["my_secret"]))[1]

    config = {**STDIO, "only": ["secret"], "prefix": "my_"}
    assert with_tools(config, play) == (["my_secret"], "nothing")
    assert with_tools({**config, "env": {"FOR_THE_SERVER": "theirs"}}, play) == (["my_secret"], "theirs")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"only": ["divide"]}, "has no tool 'divide'; it offers add, move"),
        ({"command": [sys.executable, "-c", "import sys; sys.exit('no such module')"]}, "cannot be reached.*no such module"),
        ({"command": ["/no/such/program"]}, "cannot be reached: .*No such file"),
        ({"key_env": "NOT_SET"}, "the environment variable NOT_SET is not set"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_before_anything_is_played(change: dict[str, Any], named: str) -> None:
    async def play(tools: dict[str, Tool]) -> None:
        raise AssertionError("it opened")

    with pytest.raises(UserError, match=named):
        with_tools({**STDIO, **change}, play)


def test_a_recipe_names_one_server_in_one_way() -> None:
    for config in ({}, {**STDIO, "url": "http://127.0.0.1:1/mcp"}):
        with pytest.raises(ConfigError, match="give either the command of an MCP server"):
            validate(Mcp.Config, config, place="the test")
