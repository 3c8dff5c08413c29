"""The queue before the nodes: fair, bounded, and every call answered exactly once whatever becomes of nodes and callers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from functools import partial

import pytest
from dispatching import dispatching, judged, node, pairs
from links import until
from services import echo

from strop.errors import MachineError, Overloaded, SessionLost
from strop.sandbox.protocol import PairVerdict, RunOutcome, RunRequest, SessionLimits, VerifyRequest
from strop.sandbox.server.dispatcher import DispatchConfig


def test_every_call_is_answered_once_while_supervisors_die() -> None:
    """The ledger is exact: an answer for each call, its own, and no call on more than two supervisors."""

    async def play() -> None:
        draw = random.Random(5)
        nodes = [node(f"n{number}", slots=draw.randint(20, 60), latency_s=0.01) for number in range(4)]
        async with dispatching(*nodes) as front:
            requests = [RunRequest(code=str(number), seed=number) for number in range(3000)]
            answers = [front.submit(request, client=f"client {draw.randint(0, 4)}") for request in requests]
            for one in nodes[:3]:
                await until(lambda: len(one.requests) > 200)  # noqa: B023
                one.die()
            await asyncio.wait_for(front.admission.wait_empty(), 20)
            num_retries = front.box.num_retries
        results = [answer.result() for answer in answers]
        internal = [result for result in results if result.outcome is RunOutcome.INTERNAL]
        assert len(internal) < 60  # those that lost two
        assert all(
            result in internal or result.text == echo(request) for result, request in zip(results, requests, strict=True)
        )
        starts = Counter(request.code for one in nodes for request in one.requests)
        assert set(starts) == {request.code for request in requests}
        assert max(starts.values()) <= 2
        assert sum(starts.values()) == 3000 + num_retries
        assert num_retries > 0
        assert front.tally.outcomes.total() == 3000

    asyncio.run(play())


def test_who_submits_a_call_is_told_once_when_a_node_takes_it() -> None:
    async def play() -> None:
        started: list[str] = []
        async with dispatching(node(slots=1, latency_s=60)) as front:
            for name, call_id in (("first", "a"), ("second", "b"), ("first again", "a"), ("second again", "b")):
                request = RunRequest(code=call_id, id=call_id)
                front.submit(request, on_start=partial(started.append, name))
            await until(lambda: len(started) == 2)
            front.cancel("a")
            await until(lambda: len(started) > 2)
            front.submit(RunRequest(code="x", wall_s=-1.0), on_start=pytest.fail)
        assert started == ["first", "first again", "second", "second again"]

    asyncio.run(play())


def test_a_lone_call_overtakes_what_another_client_has_queued() -> None:
    async def play() -> None:
        async with dispatching(node(slots=2, latency_s=0.02)) as front:
            many = [
                asyncio.create_task(front.run(RunRequest(code=str(number), seed=number), client="many"))
                for number in range(5000)
            ]
            await asyncio.sleep(0.05)
            started_at = time.monotonic()
            await front.run(RunRequest(code="lone"), client="lone")
            assert time.monotonic() - started_at < 0.2
            assert sum(task.done() for task in many) < 500
            for task in many:
                task.cancel()
            await asyncio.wait(many)
            assert front.admission.held.num == 0
            await until(lambda: front.box.num_running == 0)

    asyncio.run(play())


def test_calls_beyond_what_may_be_held_are_overloaded_and_never_reach_a_node() -> None:
    async def play() -> None:
        config = DispatchConfig(max_held=100, client_share=0.5)
        one = node(slots=2, latency_s=0.05)
        async with dispatching(one, config=config) as front:
            greedy = [
                asyncio.create_task(front.run(RunRequest(code=f"g{number}", seed=number), client="greedy"))
                for number in range(80)
            ]
            await asyncio.sleep(0)
            modest = await front.run(RunRequest(code="modest"), client="modest")
            assert modest.outcome is RunOutcome.STDOUT
            outcomes = Counter(result.outcome for result in await asyncio.gather(*greedy))
            assert outcomes == {RunOutcome.STDOUT: 50, RunOutcome.OVERLOADED: 30}
            assert len(one.requests) == 51

    asyncio.run(play())


def test_bytes_are_bounded_as_well_as_calls() -> None:
    async def play() -> None:
        config = DispatchConfig(max_held_bytes=1_000_000, client_share=1.0)
        async with dispatching(node(slots=1, latency_s=0.01), config=config) as front:
            tasks = [asyncio.create_task(front.run(RunRequest(code="#" * 200_000, seed=number))) for number in range(8)]
            outcomes = Counter(result.outcome for result in await asyncio.gather(*tasks))
            assert outcomes == {RunOutcome.STDOUT: 4, RunOutcome.OVERLOADED: 4}
            assert (front.admission.held.num, front.admission.held.num_bytes, len(front.admission._by_client)) == (0, 0, 0)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (RunRequest(code="x" * 262_145), "the code has more than 262144 bytes, which is the limit"),
        (RunRequest(code="ü" * 131_073), "the code has more than 262144 bytes"),
        (RunRequest(code="print('\ud800')"), "lone surrogate"),
        (RunRequest(code="a\0b"), "NUL"),
        (RunRequest(code="x", stdin="y" * 8_000_001), "the input has more than 8000000 bytes"),
        (RunRequest(code="x", wall_s=float("inf")), "wall_s is inf"),
        (RunRequest(code="x", wall_s=float("nan")), "wall_s is nan"),
        (RunRequest(code="x", wall_s=0.0), "wall_s is 0"),
        (RunRequest(code="x", memory_mib=-1), "memory_mib is -1"),
        (RunRequest(code="x", max_processes=10**400), "a number of many digits"),
        (RunRequest(code="x", output_bytes=10**9), "output_bytes"),
        (RunRequest(code="x", id="i" * 300), "id has more than 256 bytes"),
        (RunRequest(code="x", profile="a\nb"), "profile"),
    ],
)
def test_a_request_over_a_limit_is_rejected_with_its_reason(request_: RunRequest, reason: str) -> None:
    async def play() -> None:
        one = node()
        async with dispatching(one) as front:
            result = await front.run(request_)
            assert result.outcome is RunOutcome.REJECTED
            assert reason in result.reason
            assert reason in result.text
            assert one.requests == []

    asyncio.run(play())


def test_a_caller_who_leaves_frees_the_slot() -> None:
    async def play() -> None:
        one = node(slots=1, latency_s=60)
        async with dispatching(one) as front:
            tasks = [asyncio.create_task(front.run(RunRequest(code=str(number)))) for number in range(3)]
            await until(lambda: one.num_in_flight == 1)
            tasks[0].cancel()
            tasks[1].cancel()
            await until(lambda: len(one.requests) == 2)
            assert [request.code for request in one.requests] == ["0", "2"]
            assert one.num_cancelled == 1
            tasks[2].cancel()
            await asyncio.wait(tasks)
            await until(lambda: front.admission.held.num == 0)
            assert front.tally.num_cancelled == 3

    asyncio.run(play())


def test_a_front_that_finishes_ends_what_it_has_and_takes_nothing_new() -> None:
    async def play() -> None:
        async with dispatching(node(slots=2, latency_s=0.05)) as front:
            calls = [asyncio.create_task(front.run(RunRequest(code=str(n), seed=n))) for n in range(20)]
            await asyncio.sleep(0)
            finishing = asyncio.create_task(front.finish(grace_s=10))
            await asyncio.sleep(0)
            assert (await front.run(RunRequest(code="late"))).outcome is RunOutcome.OVERLOADED
            with pytest.raises(Overloaded):
                await front.open_session(SessionLimits())
            await finishing
            assert [result.outcome for result in await asyncio.gather(*calls)] == [RunOutcome.STDOUT] * 20

    asyncio.run(play())


def test_closing_answers_every_call_that_is_left() -> None:
    async def play() -> None:
        one = node(slots=2, latency_s=60)
        async with dispatching(one) as front:
            session = await front.open_session(SessionLimits())
            calls = [asyncio.create_task(front.run(RunRequest(code=str(n)))) for n in range(5)]
            cell = asyncio.create_task(front.run(RunRequest(code="cell", session=session)))
            comparing = asyncio.create_task(judged(front, VerifyRequest(pairs=pairs(2))))
            await until(lambda: one.num_in_flight == 2)
            await front.finish(grace_s=0.05)
            await front.close()
            await front.close()
            assert {result.outcome for result in await asyncio.gather(*calls)} == {RunOutcome.INTERNAL}
            assert set((await comparing).values()) == {PairVerdict.INTERNAL}
            with pytest.raises(SessionLost):
                await cell
            with pytest.raises(MachineError, match="closed"):
                await front.run(RunRequest(code="later"))
            assert front.admission.held.num == 0

    asyncio.run(play())
