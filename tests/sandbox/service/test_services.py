"""Several services and one client: the least loaded is asked, and what a lost one costs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from dispatching import pairs
from links import until
from services import scripted, serving
from test_client import TOKEN, free_port
from test_server import process

from scripted_node import ScriptedNode
from strop.config import validate
from strop.errors import MachineError, SessionLost, UserError
from strop.sandbox import SandboxConfig, client_service
from strop.sandbox.client import SandboxClient
from strop.sandbox.local import open_service
from strop.sandbox.protocol import PairVerdict, RunRequest, RunResult, SessionLimits, VerifyRequest

NUM_CALLS = 3000
NUM_CELLS = 100


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_service, "SILENCE_S", 2.5)


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def two(**options: float) -> AsyncIterator[tuple[SandboxClient, list[ScriptedNode]]]:
    """A client of two services of this process, with 4 and with 8 slots."""
    nodes = [scripted("small", slots=4, latency_s=0.02), scripted("large", slots=8, latency_s=0.02)]
    async with (
        serving(nodes[0]) as small,
        serving(nodes[1]) as large,
        SandboxClient([small.url, large.url], **options) as client,
    ):
        yield client, nodes


def test_the_least_loaded_service_is_asked_and_a_session_stays_where_it_was_opened() -> None:
    async def play() -> None:
        async with two() as (client, nodes):
            results = await asyncio.gather(*(client.run(RunRequest(code=str(n), seed=n)) for n in range(900)))
            assert [result.text for result in results] == [f"ran {n}" for n in range(900)]
            shares = Counter(result.node for result in results)
            assert shares["small"] + shares["large"] == 900
            assert 1.5 < shares["large"] / shares["small"] < 2.7  # as their slots
            sessions = [await client.open_session(SessionLimits()) for _ in range(12)]
            assert [len(node.cells) for node in nodes] == [4, 8]
            sessions += [await client.fork_session(sessions[0]) for _ in range(5)]
            cells = await asyncio.gather(*(client.run(RunRequest(code="c", session=name)) for name in sessions * 3))
            assert {cell.node for cell in cells[:4]} == {"small", "large"}
            assert sum(len(ran) for node in nodes for ran in node.cells.values()) == len(cells)
            for session in sessions:
                await client.close_session(session)
            assert [len(node.cells) for node in nodes] == [0, 0]
            with pytest.raises(SessionLost):
                await client.run(RunRequest(code="c", session=sessions[0]))
            verdicts = [client.verify(VerifyRequest(pairs=pairs(40))) for _ in range(6)]
            for judged in await asyncio.gather(*map(collect, verdicts)):
                assert judged == {n: PairVerdict.EQUAL if n % 2 else PairVerdict.UNEQUAL for n in range(40)}
            assert all(node.num_verify_calls for node in nodes)

    asyncio.run(play())


async def collect(verdicts: AsyncIterator[tuple[int, PairVerdict]]) -> dict[int, PairVerdict]:
    return {index: verdict async for index, verdict in verdicts}


def test_a_service_at_another_address_takes_the_calls_of_a_lost_one_and_none_of_its_sessions() -> None:
    async def play() -> None:
        async with serving(scripted("kept")) as kept, contextlib.AsyncExitStack() as second:
            doomed = await second.enter_async_context(serving(scripted("lost")))
            client = SandboxClient([kept.url, doomed.url])
            sessions = [await client.open_session(SessionLimits()) for _ in range(4)]
            await client.run(RunRequest(code="a", session=sessions[0]))
            await second.aclose()
            async with serving(scripted("new")) as other:
                await client.move(doomed.url, other.url)
                nodes: set[str] = set()
                while nodes != {"kept", "new"}:
                    results = await asyncio.gather(*(client.run(RunRequest(code=str(n))) for n in range(50)))
                    nodes |= {result.node for result in results}
                cells = [client.run(RunRequest(code="b", session=session)) for session in sessions]
                ended = await asyncio.gather(*cells, return_exceptions=True)
                assert Counter(type(each) for each in ended) == {RunResult: 2, SessionLost: 2}
                await client.close()

    asyncio.run(play())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_service_that_dies_costs_its_sessions_and_no_call(caplog: pytest.LogCaptureFixture, number: signal.Signals) -> None:
    sign = "is lost" if number == signal.SIGKILL else "has been silent"

    async def play() -> float:
        ports = [free_port(), free_port()]
        lost = url_of(ports[1])
        with process(ports[0], slots=16), contextlib.ExitStack() as second:
            doomed = second.enter_context(process(ports[1], slots=16))
            async with SandboxClient([url_of(port) for port in ports], connect_s=20) as client:
                assert len(await client.health()) == 2
                sessions = [await client.open_session(SessionLimits()) for _ in range(8)]
                calls = [asyncio.create_task(client.run(RunRequest(code=str(n), seed=n))) for n in range(NUM_CALLS)]
                cells = [asyncio.create_task(count_cells(client, session)) for session in sessions]
                judging = asyncio.create_task(collect(client.verify(VerifyRequest(pairs=pairs(200)))))
                await until(lambda: sum(call.done() for call in calls) > 500, limit_s=20)
                signalled_at = time.time()
                doomed.send_signal(number)
                assert [(await call).text for call in calls] == [f"ran {n}" for n in range(NUM_CALLS)]
                assert len(await judging) == 200
                nums = [await num for num in cells]
                assert nums.count(NUM_CELLS) == 4, nums
                for session, num in zip(sessions, nums, strict=True):
                    if num < NUM_CELLS:
                        for work in (client.run(RunRequest(code="x", session=session)), client.fork_session(session)):
                            with pytest.raises(SessionLost):
                                await work
                    await client.close_session(session)
                if number == signal.SIGKILL:
                    second.close()
                    second.enter_context(process(ports[1], slots=16))
                else:
                    doomed.send_signal(signal.SIGCONT)
                await wait_for_node(client, str(ports[1]))
                assert f"{lost} works again" in caplog.text
        return next(record.created for record in caplog.records if f"{lost} {sign}" in record.getMessage()) - signalled_at

    assert asyncio.run(play()) < 2.0


async def wait_for_node(client: SandboxClient, name: str) -> None:
    """Return once calls run there."""
    async with asyncio.timeout(20):
        while True:
            results = await asyncio.gather(*(client.run(RunRequest(code=str(number))) for number in range(20)))
            if name in {result.node for result in results}:
                return


async def count_cells(client: SandboxClient, session: str) -> int:
    """How many cells ran before the session was lost."""
    for number in range(NUM_CELLS):
        try:
            await client.run(RunRequest(code=str(number), seed=number, session=session))
        except SessionLost:
            return number
    return NUM_CELLS


def test_calls_fail_once_every_service_is_lost_for_too_long() -> None:
    async def play() -> None:
        async with contextlib.AsyncExitStack() as services:
            urls = [(await services.enter_async_context(serving(scripted()))).url for _ in range(2)]
            client = SandboxClient(urls, reconnect_s=0.5)
            await client.run(RunRequest(code="x"))
        async with client:
            started_at = time.monotonic()
            with pytest.raises(MachineError, match="out of reach"):
                await asyncio.wait_for(client.run(RunRequest(code="x")), 5)
            assert time.monotonic() - started_at > 0.4

    asyncio.run(play())


def test_a_service_that_does_not_answer_at_the_start_is_named_and_used_later(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        port = free_port()
        async with serving(scripted("there")) as server, SandboxClient([server.url, url_of(port)], connect_s=0.3) as client:
            assert list(await client.health()) == [server.url]
            assert f"{url_of(port)} is lost" in caplog.text
            assert (await client.run(RunRequest(code="x"))).node == "there"
            async with serving(scripted("late"), port=port):
                await wait_for_node(client, "late")

    asyncio.run(play())


def test_a_wrong_token_names_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with serving(scripted(), token=TOKEN) as right, serving(scripted(), token=f"not {TOKEN}") as wrong:
            monkeypatch.setenv("STROP_SANDBOX_TOKEN", TOKEN)
            with pytest.raises(UserError, match=f"the code service at {wrong.url} wants another token"):
                async with open_service(SandboxConfig(url=(right.url, wrong.url))):
                    pass
            async with SandboxClient([right.url, wrong.url], token=TOKEN) as client:
                with pytest.raises(UserError, match=f"{wrong.url} refused the token"):
                    await client.run(RunRequest(code="x"))

    asyncio.run(play())


def test_a_recipe_names_one_service_or_several() -> None:
    one, several = "http://a:8517", ["http://a:8517", "https://b/strop"]
    assert validate(SandboxConfig, {"url": one}, place="sandbox").url == one
    assert validate(SandboxConfig, {"url": several}, place="sandbox").url == tuple(several)
    with pytest.raises(UserError, match="'b:8517' is no address"):
        validate(SandboxConfig, {"url": [one, "b:8517"]}, place="sandbox")
