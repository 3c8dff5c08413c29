"""The link to the supervisor: every call gets its own answer or a typed error, whatever comes over it."""

from __future__ import annotations

import asyncio
import json
import struct
import time

import pytest
from links import FAST, linked, stream_pair, until

from strop.errors import LinkBroken, NodeLost, SessionLost, UserError
from strop.sandbox.link import Ran, encode
from strop.sandbox.node_process import NodeProcess
from strop.sandbox.protocol import AnswerPair, PairVerdict, RunOutcome, RunRequest, SessionLimits, VerifyRequest
from strop.sandbox.scripted import ScriptedNode, scripted_result
from strop.sandbox.supervisor.serve import serve_node


def echo(request: RunRequest) -> str:
    return f"ran {request.code} with {request.stdin}"


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def test_two_hundred_calls_at_once_get_each_its_own_answer() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo, num_slots=200, max_latency_s=0.05)
        async with linked(node) as remote:
            assert (remote.name, remote.level, remote.num_slots) == (node.name, node.level, 200)
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
            assert not remote.is_lost

    asyncio.run(play())


def test_an_answer_to_a_call_that_is_no_longer_awaited_is_dropped() -> None:
    async def play() -> None:
        front, (reader, writer) = await stream_pair()
        writer.write(frame(json.dumps(HELLO).encode()))
        remote = await NodeProcess.connect(*front, "n")
        first = asyncio.create_task(remote.run(RunRequest(code="first")))
        await asyncio.sleep(0.01)
        first.cancel()
        second = asyncio.create_task(remote.run(RunRequest(code="second")))
        await asyncio.sleep(0.01)
        for call, text in ((1, "late"), (2, "right"), (2, "twice")):  # the node had not seen the cancellation yet
            writer.write(encode(Ran(call=call, result=scripted_result(text))))
        assert (await second).text == "right"
        await asyncio.sleep(0.01)
        assert not remote.is_lost
        await remote.close()
        assert reader  # keeps the node's end open until here

    asyncio.run(play())


def test_a_link_that_breaks_fails_every_call_in_flight_and_every_later_one() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo, num_slots=8, max_latency_s=60)
        ours, theirs = await stream_pair()
        serving = asyncio.create_task(serve_node(node, *theirs))
        remote = await NodeProcess.connect(*ours, "n")
        calls = [asyncio.create_task(remote.run(RunRequest(code=str(number)))) for number in range(5)]
        verifying = asyncio.create_task(collect(remote, VerifyRequest(pairs=(AnswerPair(gold="1", answer="1"),))))
        await until(lambda: node.num_in_flight == 6)
        serving.cancel()
        assert "hung up" in await asyncio.wait_for(remote.wait_lost(), 1)
        failures = await asyncio.gather(*calls, verifying, return_exceptions=True)
        assert [type(failure) for failure in failures] == [NodeLost] * 6
        with pytest.raises(NodeLost, match="hung up"):
            await remote.run(RunRequest(code="later"))
        await until(lambda: node.num_in_flight == 0)

    asyncio.run(play())


def test_a_silent_node_is_noticed_within_two_seconds() -> None:
    async def play() -> None:
        front, (_, writer) = await stream_pair()
        writer.write(frame(json.dumps(HELLO).encode()))  # and then never a heartbeat
        remote = await NodeProcess.connect(*front, "n")
        started_at = time.monotonic()
        with pytest.raises(NodeLost, match="silent"):
            await remote.run(RunRequest(code="x"))
        assert 1.0 < time.monotonic() - started_at < 2.0
        writer.close()

    asyncio.run(play())


def test_heartbeats_keep_an_idle_link_alive() -> None:
    async def play() -> None:
        async with linked(ScriptedNode(answer=echo), timing=FAST) as remote:
            await asyncio.sleep(5 * FAST.silence_s)
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
        assert node.cells == {}  # the link closed, and with it the sessions opened over it

    asyncio.run(play())


def test_text_that_has_no_encoding_is_rejected_and_harms_no_other_call() -> None:
    async def play() -> None:
        async with linked(ScriptedNode(answer=echo)) as remote:
            result = await remote.run(RunRequest(code="print('\ud800')"))
            assert result.outcome is RunOutcome.REJECTED
            with pytest.raises(UserError):
                await remote.open_session(SessionLimits(profile="\ud800"))
            assert (await remote.run(RunRequest(code="x"))).text == "ran x with "

    asyncio.run(play())


def test_an_answer_that_has_no_encoding_fails_that_call_alone() -> None:
    async def play() -> None:
        async with linked(ScriptedNode(answer={"bad": "\ud800", "good": "fine"})) as remote:
            with pytest.raises(Exception, match="cannot be sent"):
                await remote.run(RunRequest(code="bad"))
            assert (await remote.run(RunRequest(code="good"))).text == "fine"

    asyncio.run(play())


HELLO = {"kind": "hello", "level": "namespaces", "num_slots": 2}


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack(">I", 1 << 30),
        frame(b"\xff\xfe"),
        frame(b""),
        frame(b"[" * 9000),
        frame(json.dumps(HELLO | {"num_slots": 0}).encode()),
        frame(json.dumps(HELLO | {"extra": 1}).encode()),
        frame(b'{"kind": "ping"}'),
        frame(json.dumps(HELLO).encode())[:20],
        b"",
    ],
)
def test_what_is_no_hello_is_refused_with_a_typed_error(first: bytes) -> None:
    async def play() -> None:
        front, (reader, writer) = await stream_pair()
        writer.write(first)
        writer.write_eof()
        with pytest.raises(LinkBroken):
            await NodeProcess.connect(*front, "n", timing=FAST)
        await asyncio.wait_for(reader.read(), 1)  # closed
        writer.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    "garbage",
    [
        frame(b"{}"),
        frame(b'{"kind": "ran", "call": 1}'),
        frame(b'{"kind": "judged_all", "call": 1}'),
        frame(b'{"kind": "session_is", "call": 1, "session": "s"}'),
        frame(b'{"kind": "failed", "call": 7, "failure": "machine", "reason": "never asked"}'),
        struct.pack(">I", 0xFFFFFFFF),
        encode(Ran(call=1, result=scripted_result("half")))[:-3],
    ],
)
def test_garbage_from_a_node_loses_that_node_and_fails_its_calls(garbage: bytes) -> None:
    async def play() -> None:
        front, (reader, writer) = await stream_pair()
        writer.write(frame(json.dumps(HELLO).encode()))
        remote = await NodeProcess.connect(*front, "n")
        call = asyncio.create_task(remote.run(RunRequest(code="x")))
        await asyncio.sleep(0)
        writer.write(garbage)
        writer.write_eof()
        with pytest.raises(NodeLost):
            await asyncio.wait_for(call, 1)
        await asyncio.wait_for(reader.read(), 1)
        writer.close()

    asyncio.run(play())


@pytest.mark.parametrize("garbage", [frame(b"{}"), frame(b'{"kind": "slots", "num_slots": 1}'), b"\0\0", b"\xff\xff\xff\xff"])
def test_a_node_whose_front_talks_nonsense_or_hangs_up_stops_every_program(garbage: bytes) -> None:
    async def play() -> None:
        node = ScriptedNode(answer=echo, max_latency_s=60)
        (_, writer), back = await stream_pair()
        serving = asyncio.create_task(serve_node(node, *back))
        writer.write(frame(b'{"kind": "run", "call": 1, "request": {"code": "x"}}'))
        await until(lambda: node.num_in_flight == 1)
        writer.write(garbage)
        writer.write_eof()
        with pytest.raises(LinkBroken):
            await asyncio.wait_for(serving, 1)
        assert (node.num_in_flight, node.num_cancelled) == (0, 1)
        writer.close()

    asyncio.run(play())


async def collect(remote: NodeProcess, request: VerifyRequest) -> list[tuple[int, PairVerdict]]:
    return [judged async for judged in remote.verify(request)]
