"""The link to the supervisor: every call gets its own answer or a typed error, whatever happens to the other end."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

import pytest
from links import linked, peer_of_node_process, until

from scripted_node import ScriptedNode
from strop.errors import MachineError, NodeGone, NodeLost, SessionLost, UserError
from strop.sandbox.node_process import HEARTBEAT_S, Link, NodeProcess
from strop.sandbox.protocol import AnswerPair, PairVerdict, RunRequest, SessionLimits, VerifyRequest
from strop.sandbox.scripted import scripted_result
from strop.sandbox.supervisor.node import serve_node


def echo(request: RunRequest) -> str:
    return f"ran {request.code} with {request.stdin}"


def test_two_hundred_calls_at_once_get_each_its_own_answer() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo, num_slots=200, max_latency_s=0.05)
        async with linked(node) as remote:
            assert (remote.name, remote.level, remote.num_slots) == ("n", node.level, 200)
            requests = [RunRequest(code=f"call {number}", stdin="ünï\n\0", seed=number) for number in range(200)]
            results = await asyncio.gather(*map(remote.run, requests))
            assert [result.text for result in results] == [echo(request) for request in requests]
            assert node.requests == requests  # every field arrived as it was sent

    asyncio.run(play())


def test_a_call_that_nobody_awaits_any_more_is_cancelled_on_the_node() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo, max_latency_s=60)
        async with linked(node) as remote:
            call = asyncio.create_task(remote.run(RunRequest(code="slow")))
            await until(lambda: node.num_in_flight == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: not node.num_in_flight)
            assert node.num_cancelled == 1

    asyncio.run(play())


def test_an_answer_to_a_call_that_is_no_longer_awaited_is_dropped() -> None:
    async def play() -> None:
        async with peer_of_node_process() as (remote, peer, _):
            first = asyncio.create_task(remote.run(RunRequest(code="first")))
            await asyncio.sleep(0.01)
            first.cancel()
            second = asyncio.create_task(remote.run(RunRequest(code="second")))
            await asyncio.sleep(0.01)
            for call, text in ((1, "late"), (2, "right"), (2, "twice")):  # the node had not seen the cancellation yet
                peer.send((call, scripted_result(text), True))
            assert (await second).text == "right"

    asyncio.run(play())


def test_a_link_that_breaks_fails_every_call_in_flight_and_every_later_one() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo, num_slots=8, max_latency_s=60)
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(serve_node(node, theirs))
        remote = await NodeProcess.connect(ours, "n")
        calls = [asyncio.create_task(remote.run(RunRequest(code=str(number)))) for number in range(5)]
        verifying = asyncio.create_task(collect(remote, VerifyRequest(pairs=(AnswerPair(gold="1", answer="1"),))))
        await until(lambda: node.num_in_flight == 6)
        serving.cancel()
        assert "hung up" in await asyncio.wait_for(remote.wait_lost(), 1)
        failures = await asyncio.gather(*calls, verifying, return_exceptions=True)
        assert [type(failure) for failure in failures] == [NodeLost] * 6
        with pytest.raises(NodeGone, match="hung up"):
            await remote.run(RunRequest(code="later"))
        await until(lambda: node.num_in_flight == 0)

    asyncio.run(play())


def test_a_silent_node_is_noticed_within_two_seconds() -> None:
    async def play() -> None:
        async with peer_of_node_process() as (remote, _, _):  # and then never a heartbeat
            started_at = time.monotonic()
            with pytest.raises(NodeLost, match="silent"):
                await remote.run(RunRequest(code="x"))
            assert 1.0 < time.monotonic() - started_at < 2.0

    asyncio.run(play())


def test_heartbeats_keep_an_idle_link_alive_and_bring_the_number_of_slots() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo)
        async with linked(node) as remote:
            node.num_slots = 7
            await until(lambda: remote.num_slots == 7, limit_s=HEARTBEAT_S)
            await asyncio.sleep(2.5)
            assert (await remote.run(RunRequest(code="x"))).text == "ran x with "

    asyncio.run(play())


def test_verdicts_come_one_by_one_and_a_reader_who_leaves_ends_the_work() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo, max_latency_s=0.02)
        pairs = tuple(AnswerPair(gold=str(number), answer=str(number % 3)) for number in range(50))
        async with linked(node) as remote:
            verdicts = remote.verify(VerifyRequest(pairs=pairs))
            assert await anext(verdicts) == (0, PairVerdict.EQUAL)
            await verdicts.aclose()
            await until(lambda: not node.num_in_flight)
            judged = await collect(remote, VerifyRequest(pairs=pairs[:6]))
            assert judged == [(0, "equal"), (1, "equal"), (2, "equal"), (3, "unequal"), (4, "unequal"), (5, "unequal")]

    asyncio.run(play())


def test_sessions_are_opened_forked_and_closed_and_a_lost_one_is_named() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo)
        async with linked(node) as remote:
            session = await remote.open_session(SessionLimits())
            await remote.run(RunRequest(code="a = 1", session=session))
            fork = await remote.fork_session(session)
            await remote.run(RunRequest(code="a = 2", session=fork))
            assert [[cell.code for cell in cells] for cells in node.cells.values()] == [["a = 1"], ["a = 1", "a = 2"]]
            await remote.close_session(session)
            await remote.close_session(session)
            with pytest.raises(SessionLost):
                await remote.run(RunRequest(code="a", session=session))
            with pytest.raises(SessionLost):
                await remote.fork_session(session)

    asyncio.run(play())


@pytest.mark.parametrize(("raised", "seen"), [(UserError, UserError), (MachineError, MachineError), (ValueError, MachineError)])
def test_a_node_that_does_not_start_says_why(raised: type[Exception], seen: type[Exception]) -> None:
    class Faulty(ScriptedNode):
        async def start(self) -> None:
            raise raised("no namespaces here")

    async def play() -> None:
        with pytest.raises(seen, match="no namespaces here"):
            async with linked(Faulty(answer=echo)):
                pass

    asyncio.run(play())


def test_an_unexpected_error_in_a_node_fails_only_its_call() -> None:
    async def play() -> None:
        async with linked(ScriptedNode(answer={"good": "fine"})) as remote:
            with pytest.raises(MachineError, match="KeyError in the supervisor"):
                await remote.run(RunRequest(code="bad"))
            assert (await remote.run(RunRequest(code="good"))).text == "fine"

    asyncio.run(play())


@pytest.mark.parametrize("garbage", [b"", b"\0\0", struct.pack("<I", 4) + b"GET ", struct.pack("<I", 400) + b"half of it"])
def test_a_link_that_ends_in_garbage_fails_the_calls_of_one_side_and_ends_those_of_the_other(garbage: bytes) -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo, max_latency_s=60)
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(serve_node(node, theirs))
        remote = await NodeProcess.connect(ours, "n")
        call = asyncio.create_task(remote.run(RunRequest(code="x")))
        await until(lambda: node.num_in_flight == 1)
        assert isinstance(remote._link, Link)
        assert remote._link._transport is not None
        remote._link._transport.write(garbage)
        remote._link.close()
        await asyncio.wait_for(serving, 1)
        assert (node.num_in_flight, node.num_cancelled) == (0, 1)
        with pytest.raises(NodeLost):
            await call
        await remote.close()

    asyncio.run(play())


async def collect(remote: NodeProcess, request: VerifyRequest) -> list[tuple[int, PairVerdict]]:
    return [judged async for judged in remote.verify(request)]
