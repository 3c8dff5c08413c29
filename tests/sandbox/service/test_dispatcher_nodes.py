"""Nodes under the queue: each gets its share, and what fails, forgets, dies or is not there at all costs no call its answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from dispatching import judged, node, pairs
from links import linked, until

from strop.errors import NoNodes
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest, SessionLimits, VerifyRequest
from strop.sandbox.server import floor
from strop.sandbox.server.config import DispatchConfig
from strop.sandbox.server.dispatcher import Dispatcher


def test_a_call_whose_node_died_runs_once_more_and_then_is_internal() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            nodes = [node(f"n{number}", latency_s=60) for number in range(3)]
            for one in nodes:
                front.add_node(one)
            call = asyncio.create_task(front.run(RunRequest(code="x")))
            for num_starts in (1, 2):
                await until(lambda: sum(len(one.requests) for one in nodes) == num_starts)  # noqa: B023
                next(seat.node for seat in front.floor.seats if seat.running).die("power cut")
            result = await asyncio.wait_for(call, 1)
            assert result.outcome is RunOutcome.INTERNAL
            assert "power cut" in result.reason
            assert sum(len(one.requests) for one in nodes) == 2
            assert front.tally.num_retries == 1
            assert len(front.floor.seats) == 1

    asyncio.run(play())


def test_a_call_that_failed_on_one_node_goes_to_another() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            bad, good = node("bad", slots=50, fault_rate=1.0), node("good", slots=50)
            front.add_node(bad)
            front.add_node(good)
            results = await asyncio.gather(*(front.run(RunRequest(code=str(number))) for number in range(40)))
            assert {result.node for result in results} == {"good"}
            assert front.tally.num_retries == len(bad.requests) > 0

    asyncio.run(play())


def test_a_node_that_forgets_a_call_loses_it_to_another() -> None:
    async def play() -> None:
        async with Dispatcher(DispatchConfig(answer_grace_s=0.1)) as front:
            forgetful, good = node("forgetful", slots=50, latency_s=1e6), node("good", slots=1)
            front.add_node(forgetful)
            call = asyncio.create_task(front.run(RunRequest(code="x", wall_s=0.1)))
            await asyncio.sleep(0.01)
            front.add_node(good)
            assert (await asyncio.wait_for(call, 3)).node == "good"
            assert forgetful.num_cancelled == 1  # and its late answer would find nobody

    asyncio.run(play())


def test_shares_of_unequal_nodes_follow_their_slots() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            small, large = node("small", slots=2, latency_s=0.01), node("large", slots=16, latency_s=0.01)
            front.add_node(small)
            front.add_node(large)
            await asyncio.gather(*(front.run(RunRequest(code=str(number), seed=number)) for number in range(900)))
            assert 4 < len(large.requests) / len(small.requests) < 14  # 8 when both are as fast for each slot

    asyncio.run(play())


def test_slots_that_a_node_gains_later_are_used() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            one = node(slots=1, latency_s=60)
            async with linked(one) as remote:
                front.add_node(remote)
                tasks = [asyncio.create_task(front.run(RunRequest(code=str(number)))) for number in range(5)]
                await until(lambda: one.num_in_flight == 1)
                one.num_slots = 4  # as when programs only sleep
                await until(lambda: one.num_in_flight == 4)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    asyncio.run(play())


def test_calls_wait_a_while_for_a_first_node_and_then_fail_at_once() -> None:
    async def play() -> None:
        async with Dispatcher(DispatchConfig(no_node_s=1.0)) as front:
            early = asyncio.create_task(front.run(RunRequest(code="early")))
            await asyncio.sleep(0.1)
            one = node()
            front.add_node(one)
            assert (await early).text == "ran early"
            one.die()
            comparing = asyncio.create_task(judged(front, VerifyRequest(pairs=pairs(2))))
            with pytest.raises(NoNodes, match="has had no node"):
                await asyncio.wait_for(front.run(RunRequest(code="late")), 4)
            with pytest.raises(NoNodes):
                await asyncio.wait_for(comparing, 1)
            calls = [front.run(RunRequest(code="later")), judged(front, VerifyRequest(pairs=pairs(2)))]
            for call in (*calls, front.open_session(SessionLimits())):
                with pytest.raises(NoNodes, match="no node"):
                    await asyncio.wait_for(call, 0.1)
            assert (front.tally.num_without_node, front.admission.held.num) == (2, 0)
            front.add_node(node())
            assert (await front.run(RunRequest(code="again"))).text == "ran again"

    asyncio.run(play())


@pytest.mark.parametrize("config", [DispatchConfig(no_node_s=0.2), DispatchConfig(max_wait_s=0.2)])
def test_a_call_whose_node_died_and_that_finds_no_other_is_not_welcome_again(config: DispatchConfig) -> None:
    async def play() -> None:
        async with Dispatcher(config) as front:
            one = node(latency_s=60)
            front.add_node(one)
            call = asyncio.create_task(front.run(RunRequest(code="x")))
            await until(lambda: len(one.requests) == 1)
            one.die("power cut")
            result = await asyncio.wait_for(call, 4)
            assert result.outcome is RunOutcome.INTERNAL
            assert "power cut" in result.reason
            assert front.tally.num_without_node == 0

    asyncio.run(play())


def test_a_queue_without_a_node_is_told_to_the_log_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor, "_WARN_S", 0.1)

    async def play() -> None:
        async with Dispatcher() as front:
            calls = [asyncio.create_task(front.run(RunRequest(code=str(number)))) for number in range(3)]
            await until(lambda: "has had no node" in caplog.text)
            await asyncio.sleep(1.1)  # the next look
            front.add_node(node())
            await asyncio.gather(*calls)
        assert caplog.text.count("has had no node") == 1

    asyncio.run(play())


def test_the_level_of_the_service_is_that_of_its_weakest_node() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            strong = node("strong")
            front.add_node(strong)
            assert front.level is IsolationLevel.NAMESPACES
            front.add_node(replace(strong, level=IsolationLevel.CONFINED))
            assert front.level is IsolationLevel.CONFINED

    asyncio.run(play())
