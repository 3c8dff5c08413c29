"""The client: every call answered exactly once, through overload, lost connections and a service that comes and goes."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Awaitable

import pytest
from aiohttp import test_utils, web
from links import until
from relay import Relay, relayed
from services import Supply, dead, echo, scripted, serving

from scripted_node import ScriptedNode
from strop.deadline import deadline
from strop.errors import DeadlineExceeded, MachineError, NoNodes, SessionLost, UserError
from strop.sandbox import client_service
from strop.sandbox.client import SandboxClient
from strop.sandbox.protocol import AnswerPair, PairVerdict, RunOutcome, RunRequest, SessionLimits, VerifyRequest
from strop.sandbox.scripted import scripted_result
from strop.sandbox.server.dispatcher import DispatchConfig
from strop.sandbox.server.ndjson import VerdictLine

TOKEN = "correct horse battery"


def through(relay: Relay) -> SandboxClient:
    return SandboxClient(f"http://127.0.0.1:{relay.port}")


def test_many_calls_at_once_get_each_its_own_answer() -> None:
    async def play() -> None:
        node = scripted(slots=64, latency_s=0.02)
        async with serving(node) as server, SandboxClient(server.url) as client:
            requests = [RunRequest(code=f"ünï {number}", stdin="\n\0", seed=number) for number in range(500)]
            results = await asyncio.gather(*map(client.run, requests))
            assert [result.text for result in results] == [echo(request) for request in requests]
            assert len(node.requests) == 500

    asyncio.run(play())


def test_a_lone_call_waits_for_no_batch() -> None:
    async def play() -> None:
        async with serving(scripted()) as server, SandboxClient(server.url) as client:
            await client.run(RunRequest(code="first"))
            times = []
            for number in range(50):
                started_at = time.perf_counter()
                await client.run(RunRequest(code=str(number)))
                times.append(time.perf_counter() - started_at)
            assert sorted(times)[25] < client_service.BATCH_S  # on a machine that is busy too: 0.3 ms when it is not

    asyncio.run(play())


def test_calls_that_come_together_leave_together() -> None:
    async def play() -> None:
        async with serving(scripted(slots=500)) as server, relayed("127.0.0.1", server.port) as relay, through(relay) as client:
            await asyncio.gather(*(client.run(RunRequest(code=str(number))) for number in range(1000)))
            assert relay.num_connections == 1

    asyncio.run(play())


def test_an_overloaded_service_is_asked_again_until_it_has_room() -> None:
    async def play() -> None:
        node = scripted(slots=4, latency_s=0.01)
        async with (
            serving(node, dispatch=DispatchConfig(max_held=20, client_share=1.0)) as server,
            SandboxClient(server.url) as client,
        ):
            results = await asyncio.gather(*(client.run(RunRequest(code=str(n), seed=n)) for n in range(200)))
            assert [result.text for result in results] == [f"ran {n}" for n in range(200)]
            assert server.dispatcher.tally.outcomes[RunOutcome.OVERLOADED] > 0
            assert len(node.requests) == 200

    asyncio.run(play())


def test_calls_that_wait_until_a_service_has_room_end_when_the_client_is_closed() -> None:
    async def play() -> None:
        node = scripted(slots=1, latency_s=60)
        async with serving(node, dispatch=DispatchConfig(max_held=1, client_share=1.0)) as server:
            client = SandboxClient(server.url)
            calls = [asyncio.create_task(client.run(RunRequest(code=str(n), seed=n))) for n in range(4)]
            while server.dispatcher.tally.outcomes[RunOutcome.OVERLOADED] < 3:  # noqa: ASYNC110 - the service says no more
                await asyncio.sleep(0.01)
            await client.close()
            ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
            assert [str(end) for end in ends] == ["the client of the code service was closed"] * 4

    asyncio.run(play())


def test_a_call_that_waits_in_the_queue_of_the_service_keeps_its_time() -> None:
    async def play() -> float:
        began = time.monotonic()
        node = scripted(slots=1, latency_s=0.4)
        async with serving(node) as server, SandboxClient(server.url) as client:

            async def call(number: int) -> str:
                async with deadline(0.8):
                    return (await client.run(RunRequest(code=str(number), seed=number))).text

            assert await asyncio.gather(*map(call, range(10))) == [f"ran {number}" for number in range(10)]
        return time.monotonic() - began

    assert asyncio.run(play()) > 2 * 0.8  # else nothing was tested


def test_a_call_under_which_a_node_hangs_has_no_more_than_its_time() -> None:
    async def play() -> None:
        node = scripted(slots=1, latency_s=600)
        async with serving(node) as server, SandboxClient(server.url) as client:
            with pytest.raises(TimeoutError):
                async with deadline(0.3):
                    await client.run(RunRequest(code="hang"))
            await until(lambda: node.num_cancelled == 1)

    began = time.monotonic()
    asyncio.run(play())
    assert time.monotonic() - began < 10  # that a node has it is told with the next sign of life


def test_a_lost_connection_costs_no_call_and_runs_none_twice() -> None:
    async def play() -> None:
        node = scripted(slots=32, latency_s=0.1)
        async with serving(node) as server, relayed("127.0.0.1", server.port) as relay, through(relay) as client:
            calls = [asyncio.create_task(client.run(RunRequest(code=str(n), seed=n))) for n in range(1000)]
            for number in range(1, 6):
                await until(lambda: relay.num_connections >= number or all(call.done() for call in calls), limit_s=20)  # noqa: B023
                await asyncio.sleep(0.1)
                relay.cut()
            results = await asyncio.gather(*calls)
        assert [result.text for result in results] == [f"ran {n}" for n in range(1000)]
        assert Counter(request.code for request in node.requests) == {str(n): 1 for n in range(1000)}
        assert relay.num_connections >= 2

    asyncio.run(play())


def test_a_cell_runs_once_through_a_lost_connection() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo, max_latency_s=1.0)
        dispatch = DispatchConfig(linger_s=0.1)
        async with (
            serving(node, dispatch=dispatch) as server,
            relayed("127.0.0.1", server.port) as relay,
            through(relay) as client,
        ):
            session = await client.open_session(SessionLimits())
            cell = asyncio.create_task(client.run(RunRequest(code="count += 1", session=session)))
            await until(lambda: node.num_in_flight == 1)
            relay.is_refusing = True
            relay.cut()
            await asyncio.sleep(1.2)  # longer than a call outlives its client: a cell that has begun is not stopped
            relay.is_refusing = False
            assert (await cell).text == "ran count += 1"
            assert [[cell.code for cell in cells] for cells in node.cells.values()] == [["count += 1"]]

    asyncio.run(play())


def test_a_connection_that_is_silent_is_given_up_and_its_calls_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_service, "SILENCE_S", 1.6)

    async def play() -> None:
        node = scripted(latency_s=0.5)
        async with serving(node) as server, relayed("127.0.0.1", server.port) as relay, through(relay) as client:
            await client.run(RunRequest(code="first"))
            call = asyncio.create_task(client.run(RunRequest(code="second")))
            await until(lambda: len(node.requests) == 2)
            relay.freeze()
            await asyncio.sleep(1.0)
            await until(lambda: relay.num_connections == 2, limit_s=4)
            relay.thaw()
            assert (await call).text == "ran second"
            assert len(node.requests) == 2

    asyncio.run(play())


def test_a_service_that_is_started_again_is_found_again() -> None:
    async def play() -> None:
        async with serving(scripted("before")) as server:
            port = server.port
            client = SandboxClient(server.url)
            assert (await client.run(RunRequest(code="x"))).node == "before"
            session = await client.open_session(SessionLimits())
        call = asyncio.create_task(client.run(RunRequest(code="y")))
        await asyncio.sleep(0.3)
        async with serving(scripted("after"), port=port):
            assert (await asyncio.wait_for(call, 5)).node == "after"
            with pytest.raises(SessionLost):
                await client.run(RunRequest(code="z", session=session))
            await client.close()

    asyncio.run(play())


def test_a_caller_who_leaves_ends_the_program() -> None:
    async def play() -> None:
        node = scripted(slots=2, latency_s=60)
        async with serving(node) as server, SandboxClient(server.url) as client:
            calls = [asyncio.create_task(client.run(RunRequest(code=str(n)))) for n in range(5)]
            await until(lambda: node.num_in_flight == 2)
            for call in calls:
                call.cancel()
            await until(lambda: server.dispatcher.admission.held.num == 0)
            await until(lambda: node.num_in_flight == 0)

    asyncio.run(play())


def test_closing_the_client_ends_its_programs_and_fails_its_calls() -> None:
    async def play() -> None:
        node = scripted(latency_s=60)
        async with serving(node) as server:
            client = SandboxClient(server.url)
            call = asyncio.create_task(client.run(RunRequest(code="x")))
            await until(lambda: node.num_in_flight == 1)
            await client.close()
            with pytest.raises(MachineError, match="closed"):
                await call
            with pytest.raises(MachineError, match="closed"):
                await client.run(RunRequest(code="y"))
            await until(lambda: node.num_in_flight == 0)
            await client.close()

    asyncio.run(play())


def test_a_call_raises_when_the_patience_of_its_caller_is_over() -> None:
    async def play() -> None:
        node = scripted(latency_s=60)
        async with serving(node) as server, SandboxClient(server.url, patience_s=0.6) as client:
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(client.run(RunRequest(code="x")), 3)
            await until(lambda: node.num_in_flight == 0)

    asyncio.run(play())


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("url", ["127.0.0.1:8300", "ftp://127.0.0.1", ""])
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(UserError, match="no address of a code service"):
        SandboxClient(url)


def test_a_wrong_address_or_token_is_named() -> None:
    async def play() -> None:
        async with serving(scripted(), token=TOKEN) as server:
            nowhere = SandboxClient(f"http://127.0.0.1:{free_port()}", connect_s=0.3)
            elsewhere = SandboxClient(server.url + "/other", token=TOKEN)
            cases = (
                (SandboxClient(server.url), "token"),
                (SandboxClient(server.url, token="wrong"), "token"),
                (nowhere, "answers at"),
                (elsewhere, "404"),
            )
            for client, words in cases:
                async with client:
                    for work in (
                        client.run(RunRequest(code="x")),
                        client.open_session(SessionLimits()),
                        judged(client, 1),
                        client.run(RunRequest(code="x")),
                    ):
                        with pytest.raises(UserError, match=words):
                            await asyncio.wait_for(work, 5)
            async with SandboxClient(server.url, token=TOKEN) as client:
                assert (await client.run(RunRequest(code="x"))).text == "ran x"

    asyncio.run(play())


def test_a_service_that_is_gone_for_too_long_is_the_machines_fault() -> None:
    async def play() -> None:
        async with serving(scripted()) as server:
            client = SandboxClient(server.url, reconnect_s=0.3)
            await client.run(RunRequest(code="x"))
        with pytest.raises(MachineError, match="out of reach"):
            await asyncio.wait_for(client.run(RunRequest(code="y")), 5)
        with pytest.raises(MachineError, match="out of reach"):
            await asyncio.wait_for(judged(client, 1), 5)
        await client.close()

    asyncio.run(play())


def test_a_service_without_nodes_is_waited_for_with_a_line_in_the_log_and_not_forever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def works(client: SandboxClient) -> list[Awaitable[object]]:
        return [
            client.run(RunRequest(code="x")),
            client.run(RunRequest(code="y")),
            client.open_session(SessionLimits()),
            judged(client, 1),
            client.health(),
        ]

    async def play() -> None:
        supply = Supply(dead())
        async with serving(supply, dispatch=DispatchConfig(no_node_s=0.1)) as server:
            async with SandboxClient(server.url, reconnect_s=0.5) as client:
                failures = await asyncio.wait_for(asyncio.gather(*works(client), return_exceptions=True), 5)
            for failure in failures:
                assert isinstance(failure, NoNodes)
                assert "has had no node for 0.5 s" in str(failure)
            assert caplog.text.count(f"the code service at {server.url} is lost: ") == 1
            async with SandboxClient(server.url) as client:
                waiting = asyncio.gather(*works(client))
                await asyncio.sleep(0.5)
                supply.nodes.append(scripted())
                run, *_ = await asyncio.wait_for(waiting, 15)
                assert run.text == "ran x"

    asyncio.run(play())


async def judged(client: SandboxClient, num: int) -> dict[int, PairVerdict]:
    pairs = tuple(AnswerPair(gold=str(n), answer=str(n % 2)) for n in range(num))
    verdicts = [verdict async for verdict in client.verify(VerifyRequest(pairs=pairs))]
    assert len({index for index, _ in verdicts}) == len(verdicts)
    return dict(verdicts)


def test_answers_are_compared_through_a_lost_connection() -> None:
    async def play() -> None:
        async with (
            serving(scripted(latency_s=0.05)) as server,
            relayed("127.0.0.1", server.port) as relay,
            through(relay) as client,
        ):
            judging = asyncio.create_task(judged(client, 60))
            await asyncio.sleep(0.2)
            relay.cut()
            assert await judging == {n: PairVerdict.EQUAL if n < 2 else PairVerdict.UNEQUAL for n in range(60)}
            assert relay.num_connections >= 2
            assert await judged(client, 0) == {}

    asyncio.run(play())


def test_verdicts_of_a_reply_that_ends_in_the_middle_of_a_line_are_asked_for_again() -> None:
    asked: list[int] = []

    async def verify(request: web.Request) -> web.Response:
        asked.append(len((await request.json())["pairs"]))
        lines = b"".join(VerdictLine(index=n, verdict=PairVerdict.EQUAL).line() for n in range(asked[-1]))
        return web.Response(body=lines[:-9] if len(asked) == 1 else lines)

    async def play() -> None:
        app = web.Application()
        app.router.add_post("/v1/verify", verify)
        async with test_utils.TestServer(app) as server, SandboxClient(str(server.make_url(""))) as client:
            assert await judged(client, 3) == dict.fromkeys(range(3), PairVerdict.EQUAL)
        assert asked == [3, 1]

    asyncio.run(play())


def test_sessions_are_opened_forked_used_and_closed() -> None:
    async def play() -> None:
        node = scripted()
        async with serving(node) as server, SandboxClient(server.url) as client:
            session = await client.open_session(SessionLimits())
            await client.run(RunRequest(code="a = 1", session=session))
            fork = await client.fork_session(session)
            await client.run(RunRequest(code="a = 2", session=fork))
            assert [[cell.code for cell in cells] for cells in node.cells.values()] == [["a = 1"], ["a = 1", "a = 2"]]
            await client.close_session(session)
            await client.close_session(session)
            for work in (client.run(RunRequest(code="a", session=session)), client.fork_session(session)):
                with pytest.raises(SessionLost):
                    await work
            with pytest.raises(UserError, match="memory_mib"):
                await client.open_session(SessionLimits(memory_mib=0))
            assert (await client.health())[server.url].num_sessions == 1

    asyncio.run(play())


def test_what_is_no_request_is_the_callers_mistake() -> None:
    async def play() -> None:
        async with SandboxClient("http://127.0.0.1:1") as client:
            with pytest.raises(TypeError, match=r"RunRequest\(code=\.\.\.\).* str"):
                await client.run("print(1)")

    asyncio.run(play())


def test_requests_that_cannot_be_are_rejected_and_harm_no_other() -> None:
    async def play() -> None:
        async with serving(scripted()) as server, SandboxClient(server.url) as client:
            odd = [
                RunRequest(code="\ud800"),
                RunRequest(code="x", wall_s=float("inf")),
                RunRequest(code="x" * 300_000),
                RunRequest(code="", id="i" * 999),
            ]
            fine = [RunRequest(code=str(n)) for n in range(5)]
            results = await asyncio.gather(*map(client.run, [*odd, *fine]))
            assert [result.outcome for result in results] == [RunOutcome.REJECTED] * 4 + [RunOutcome.STDOUT] * 5

    asyncio.run(play())


def test_a_fault_of_the_service_is_told_as_what_it_is() -> None:
    async def play() -> None:
        node = ScriptedNode(
            answer={"bad": "\ud800", "internal": scripted_result("", RunOutcome.INTERNAL, reason="why")}, num_slots=4
        )
        async with serving(node) as server, SandboxClient(server.url) as client:
            assert (await client.run(RunRequest(code="internal"))).reason == "why"
            with pytest.raises(MachineError, match="cannot be written"):
                await client.run(RunRequest(code="bad"))
            assert (await client.run(RunRequest(code="unknown to the script"))).outcome is RunOutcome.INTERNAL

    asyncio.run(play())
