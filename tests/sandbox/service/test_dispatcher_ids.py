"""Ids of calls: two requests with one id are one call, and its answer waits a while for a client that lost its connection."""

from __future__ import annotations

import asyncio

import pytest
from dispatching import dispatching, node
from links import until
from services import echo

from scripted_node import ScriptedNode
from strop.errors import MachineError
from strop.sandbox.protocol import RunOutcome, RunRequest
from strop.sandbox.server.dispatcher import DispatchConfig


def test_two_requests_with_one_id_are_one_call_also_later() -> None:
    async def play() -> None:
        one = node(latency_s=0.05)
        async with dispatching(one) as front:
            request = RunRequest(code="x", id="7")
            first, second = await asyncio.gather(front.run(request, client="a"), front.run(request, client="a"))
            third = await front.run(request, client="a")
            assert first == second == third
            assert len(one.requests) == 1
            await front.run(request, client="b")  # an id belongs to its client
            assert len(one.requests) == 2
            other = await front.run(RunRequest(code="y", id="7"), client="a")
            assert other.outcome is RunOutcome.REJECTED

    asyncio.run(play())


def test_answers_are_kept_for_a_bounded_time_and_in_bounded_size() -> None:
    async def play() -> None:
        one = node(slots=100)
        async with dispatching(one, config=DispatchConfig(keep_s=0.3, max_kept_bytes=6000)) as front:
            for number in range(30):
                await front.run(RunRequest(code=str(number), id=str(number)))
            assert len(front.kept) == 6000 // (512 + len("ran 10"))
            await front.run(RunRequest(code="x" * 4000, id="large"))
            assert front.kept.num_bytes <= 6000
            assert (await front.run(RunRequest(code="x" * 4000, id="large"))).text == f"ran {'x' * 4000}"
            assert len(one.requests) == 31
            await asyncio.sleep(0.3)
            await front.run(RunRequest(code="29", id="29"))
            assert one.requests[-1].code == "29"
            assert len(front.kept) == 1  # the others are too old

    asyncio.run(play())


def test_a_call_with_an_id_outlives_a_lost_connection_for_its_client_to_come_back() -> None:
    async def play() -> None:
        one = ScriptedNode(answer=echo, max_latency_s=0.4)
        async with dispatching(one, config=DispatchConfig(linger_s=0.5)) as front:
            request = RunRequest(code="x", id="7")
            front.submit(request, client="a").cancel()
            again = await front.run(request, client="a")
            assert again.text == "ran x"
            assert (len(one.requests), one.num_cancelled) == (1, 0)

    asyncio.run(play())


def test_a_call_whose_client_does_not_come_back_is_cancelled() -> None:
    async def play() -> None:
        one = node(latency_s=60)
        async with dispatching(one, config=DispatchConfig(linger_s=0.5)) as front:
            for request in (RunRequest(code="x", id="7"), RunRequest(code="y")):
                front.submit(request).cancel()
            await until(lambda: one.num_cancelled == 2 and not front.admission.held.num)

    asyncio.run(play())


def test_a_call_is_cancelled_by_its_id_by_its_own_client_alone() -> None:
    async def play() -> None:
        one = node(latency_s=60)
        async with dispatching(one) as front:
            answer = front.submit(RunRequest(code="x", id="7"), client="a")
            await until(lambda: one.num_in_flight == 1)
            assert not front.cancel("7", client="b")
            assert not answer.done()
            assert front.cancel("7", client="a")
            await until(lambda: one.num_in_flight == 0)
            assert not front.cancel("7", client="a")
            with pytest.raises(MachineError, match="cancelled by its id"):
                await answer

    asyncio.run(play())
