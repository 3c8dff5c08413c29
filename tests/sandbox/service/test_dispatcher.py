"""The queue before the nodes: fair, bounded, and every call answered exactly once whatever becomes of nodes and callers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from links import linked, until

from strop.errors import MachineError, NoNodes, Overloaded, SessionLost, UserError
from strop.sandbox.protocol import (
    AnswerPair,
    IsolationLevel,
    PairVerdict,
    RunOutcome,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
)
from strop.sandbox.scripted import ScriptedNode
from strop.sandbox.service import floor
from strop.sandbox.service.config import DispatchConfig, RequestLimits
from strop.sandbox.service.dispatcher import Dispatcher
from strop.sandbox.service.jobs import Answer


def echo(request: RunRequest) -> str:
    return f"ran {request.code}"


def node(name: str = "n", *, slots: int = 4, latency_s: float = 0.0, fault_rate: float = 0.0) -> ScriptedNode:
    return ScriptedNode(answer=echo, name=name, num_slots=slots, max_latency_s=latency_s, fault_rate=fault_rate)


def test_every_call_is_answered_once_while_nodes_join_drain_fail_and_die() -> None:
    """The ledger is exact: an answer for each call, its own, and no call on more than two nodes."""

    async def play() -> None:
        draw = random.Random(5)
        answers: dict[str, list[Answer]] = {}
        async with Dispatcher() as front:
            nodes = [node(f"n{number}", slots=draw.randint(1, 9), latency_s=0.01) for number in range(6)]
            for first in nodes[:3]:
                front.add_node(first)
            requests = [RunRequest(code=str(number), seed=number) for number in range(3000)]
            for request in requests:
                answers[request.code] = []
                front.submit(request, answers[request.code].append, client=f"client {draw.randint(0, 4)}")
            await asyncio.sleep(0.1)
            nodes[0].die()
            front.add_node(nodes[3])
            await asyncio.sleep(0.1)
            draining = asyncio.create_task(front.drain_node(nodes[1]))
            front.add_node(nodes[4])
            nodes[2].die()
            await asyncio.sleep(0.1)
            front.add_node(nodes[5])
            await asyncio.wait_for(front.admission.wait_empty(), 20)
            await draining
        results = [answers[request.code] for request in requests]
        assert all(len(given) == 1 for given in results)
        assert all(
            isinstance(given[0], RunResult) and given[0].text == echo(request)
            for given, request in zip(results, requests, strict=True)
        )
        starts = Counter(request.code for one in nodes for request in one.requests)
        assert set(starts) == {request.code for request in requests}
        assert max(starts.values()) <= 2
        assert sum(starts.values()) == 3000 + front.tally.num_retries
        assert front.tally.num_retries > 0
        assert front.tally.outcomes == {RunOutcome.STDOUT: 3000}

    asyncio.run(play())


def test_a_lone_call_overtakes_what_another_client_has_queued() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            front.add_node(node(slots=2, latency_s=0.02))
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
            await until(lambda: front.floor.num_running == 0)

    asyncio.run(play())


def test_calls_beyond_what_may_be_held_are_overloaded_and_never_reach_a_node() -> None:
    async def play() -> None:
        config = DispatchConfig(max_held=100, client_share=0.5)
        async with Dispatcher(config) as front:
            one = node(slots=2, latency_s=0.05)
            front.add_node(one)
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
        async with Dispatcher(config) as front:
            front.add_node(node(slots=1, latency_s=0.01))
            tasks = [asyncio.create_task(front.run(RunRequest(code="#" * 200_000, seed=number))) for number in range(8)]
            outcomes = Counter(result.outcome for result in await asyncio.gather(*tasks))
            assert outcomes == {RunOutcome.STDOUT: 4, RunOutcome.OVERLOADED: 4}
            assert (front.admission.held.num, front.admission.held.num_bytes, front.admission.num_clients) == (0, 0, 0)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (RunRequest(code="x" * 1001), "the code has 1001 bytes, the limit is 1000"),
        (RunRequest(code="ü" * 501), "the code has 1002 bytes"),
        (RunRequest(code="ü" * 1001), "the code has more than 1001 bytes"),
        (RunRequest(code="print('\ud800')"), "lone surrogate"),
        (RunRequest(code="a\0b"), "NUL"),
        (RunRequest(code="x", stdin="y" * 2001), "the input has 2001 bytes"),
        (RunRequest(code="x", wall_s=float("inf")), "wall_s is inf"),
        (RunRequest(code="x", wall_s=float("nan")), "wall_s is nan"),
        (RunRequest(code="x", wall_s=0.0), "wall_s is 0"),
        (RunRequest(code="x", memory_mib=-1), "memory_mib is -1"),
        (RunRequest(code="x", max_processes=10**400), "a number of many digits"),
        (RunRequest(code="x", output_bytes=10**9), "output_bytes"),
        (RunRequest(code="x", id="i" * 300), "id has 300 bytes"),
        (RunRequest(code="x", profile="a\nb"), "profile"),
    ],
)
def test_a_request_over_a_limit_is_rejected_with_its_reason(request_: RunRequest, reason: str) -> None:
    async def play() -> None:
        limits = RequestLimits(max_code_bytes=1000, max_stdin_bytes=2000)
        async with Dispatcher(DispatchConfig(limits=limits)) as front:
            one = node()
            front.add_node(one)
            result = await front.run(request_)
            assert result.outcome is RunOutcome.REJECTED
            assert reason in result.reason
            assert reason in result.text
            assert one.requests == []

    asyncio.run(play())


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


def test_queue_time_is_reported_and_no_part_of_the_limit() -> None:
    async def play() -> None:
        async with Dispatcher(DispatchConfig(answer_grace_s=0.1)) as front:
            front.add_node(ScriptedNode(answer=echo, num_slots=1, max_latency_s=0.2))
            results = await asyncio.gather(
                *(front.run(RunRequest(code=str(number), seed=number, wall_s=0.2)) for number in range(20))
            )
            assert max(result.timings.queue_s for result in results) > 1.0
            assert {result.outcome for result in results} == {RunOutcome.STDOUT}

    asyncio.run(play())


def test_calls_wait_a_while_for_a_first_node_and_then_are_told_that_there_is_none() -> None:
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
            with pytest.raises(NoNodes):  # by now at once
                await asyncio.wait_for(front.run(RunRequest(code="later")), 0.1)
            with pytest.raises(NoNodes):
                await judged(front, VerifyRequest(pairs=pairs(2)))
            with pytest.raises(NoNodes):
                await front.open_session(SessionLimits())
            assert (front.tally.num_without_node, front.admission.held.num) == (2, 0)
            front.add_node(node())
            assert (await front.run(RunRequest(code="again"))).text == "ran again"

    asyncio.run(play())


def test_a_queue_without_a_node_is_told_to_the_log_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor, "_LONELY_S", 0.1)

    async def play() -> None:
        async with Dispatcher() as front:
            calls = [asyncio.create_task(front.run(RunRequest(code=str(number)))) for number in range(3)]
            await until(lambda: "has had no node" in caplog.text)
            await asyncio.sleep(1.1)  # the next look
            front.add_node(node())
            await asyncio.gather(*calls)
        assert caplog.text.count("has had no node") == 1

    asyncio.run(play())


def test_a_call_that_waits_longer_than_it_may_is_overloaded() -> None:
    async def play() -> None:
        async with Dispatcher(DispatchConfig(max_wait_s=0.5)) as front:
            front.add_node(node(slots=1, latency_s=60))
            running = asyncio.create_task(front.run(RunRequest(code="running")))
            await asyncio.sleep(0)
            result = await asyncio.wait_for(front.run(RunRequest(code="waiting")), 3)
            assert result.outcome is RunOutcome.OVERLOADED
            assert not running.done()
            running.cancel()

    asyncio.run(play())


def test_a_caller_who_leaves_frees_the_slot() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            one = node(slots=1, latency_s=60)
            front.add_node(one)
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


# Ids


def test_two_requests_with_one_id_are_one_call_also_later() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            one = node(latency_s=0.05)
            front.add_node(one)
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


def test_answers_are_kept_for_a_bounded_time_and_in_bounded_number() -> None:
    async def play() -> None:
        async with Dispatcher(DispatchConfig(keep_s=0.3, max_kept=10, max_kept_bytes=6000)) as front:
            one = node(slots=100)
            front.add_node(one)
            for number in range(30):
                await front.run(RunRequest(code=str(number), id=str(number)))
            assert len(front.runs.kept) == 10
            await front.run(RunRequest(code="x" * 4000, id="large"))
            assert front.runs.kept.num_bytes <= 6000
            await until(lambda: len(front.runs.kept) == 0)
            await front.run(RunRequest(code="29", id="29"))
            assert one.requests[-1].code == "29"

    asyncio.run(play())


def test_a_call_with_an_id_outlives_a_lost_connection_for_its_client_to_come_back() -> None:
    async def play() -> None:
        async with Dispatcher(DispatchConfig(linger_s=0.5)) as front:
            one = ScriptedNode(answer=echo, max_latency_s=0.4)
            front.add_node(one)
            request = RunRequest(code="x", id="7")
            answers: list[Answer] = []
            leave = front.submit(request, answers.append, client="a")
            assert leave is not None
            leave(may_return=True)
            again = await front.run(request, client="a")
            assert again.text == "ran x"
            assert (len(one.requests), one.num_cancelled, answers) == (1, 0, [])

    asyncio.run(play())


def test_a_call_whose_client_does_not_come_back_is_cancelled() -> None:
    async def play() -> None:
        async with Dispatcher(DispatchConfig(linger_s=0.2)) as front:
            one = node(latency_s=60)
            front.add_node(one)
            for request in (RunRequest(code="x", id="7"), RunRequest(code="y")):
                leave = front.submit(request, lambda answer: None)
                assert leave is not None
                leave(may_return=True)
            await until(lambda: one.num_cancelled == 0 and one.num_in_flight == 1)  # the one without an id never started
            await until(lambda: one.num_in_flight == 0)
            assert front.admission.held.num == 0

    asyncio.run(play())


def test_a_call_is_cancelled_by_its_id_by_its_own_client_alone() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            one = node(latency_s=60)
            front.add_node(one)
            front.submit(RunRequest(code="x", id="7"), lambda answer: pytest.fail("nobody listens"), client="a")
            await until(lambda: one.num_in_flight == 1)
            assert not front.cancel("7", client="b")
            assert front.cancel("7", client="a")
            await until(lambda: one.num_in_flight == 0)
            assert not front.cancel("7", client="a")

    asyncio.run(play())


# Answers to compare


def pairs(num: int) -> tuple[AnswerPair, ...]:
    return tuple(AnswerPair(gold=str(number), answer=str(number if number % 2 else -1)) for number in range(num))


async def judged(front: Dispatcher, request: VerifyRequest, client: str = "") -> dict[int, PairVerdict]:
    verdicts = [verdict async for verdict in front.verify(request, client=client)]
    assert len({index for index, _ in verdicts}) == len(verdicts)
    return dict(verdicts)


def test_pairs_are_spread_over_free_slots_and_joined_when_there_are_none() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            one = node(slots=4, latency_s=0.001)
            front.add_node(one)
            verdicts = await judged(front, VerifyRequest(pairs=pairs(64)))
            assert one.num_verify_calls == 4  # 16 each
            assert verdicts == {n: PairVerdict.EQUAL if n % 2 else PairVerdict.UNEQUAL for n in range(64)}
            one.num_slots = 1
            many = await asyncio.gather(*(judged(front, VerifyRequest(pairs=pairs(16))) for _ in range(9)))
            assert [len(verdicts) for verdicts in many] == [16] * 9
            assert one.num_verify_calls == 4 + 3  # 16, then twice 64
            assert front.admission.held.num == 0

    asyncio.run(play())


def test_pairs_without_a_verdict_are_judged_once_more_when_their_node_dies() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            first, second = node("first", slots=1, latency_s=0.01), node("second", slots=8)
            front.add_node(first)
            verdicts: dict[int, PairVerdict] = {}
            async for index, verdict in front.verify(VerifyRequest(pairs=pairs(40))):
                assert index not in verdicts
                verdicts[index] = verdict
                if len(verdicts) == 5:
                    front.add_node(second)
                    first.die()
            assert verdicts == {n: PairVerdict.EQUAL if n % 2 else PairVerdict.UNEQUAL for n in range(40)}

    asyncio.run(play())


def test_answers_without_an_encoding_or_a_bearable_length_are_unreadable_alone() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            front.add_node(node())
            odd = (
                AnswerPair(gold="\ud800", answer="1"),
                AnswerPair(gold="1", answer="1"),
                AnswerPair(gold="1", answer="1" * 70_000),
            )
            assert await judged(front, VerifyRequest(pairs=odd)) == {0: "unreadable", 1: "equal", 2: "unreadable"}
            assert await judged(front, VerifyRequest(pairs=())) == {}
            with pytest.raises(UserError):
                await judged(front, VerifyRequest(pairs=odd, pair_wall_s=float("nan")))

    asyncio.run(play())


def test_a_reader_of_verdicts_who_leaves_withdraws_the_rest() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            one = node(slots=1, latency_s=0.01)
            front.add_node(one)
            verdicts = front.verify(VerifyRequest(pairs=pairs(600)))
            await anext(verdicts)
            await verdicts.aclose()
            await until(lambda: front.admission.held.num == 0 and one.num_in_flight == 0)

    asyncio.run(play())


# Sessions


def test_the_cells_of_a_session_take_turns_on_one_node_and_forks_wait_for_theirs() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            nodes = [node(f"n{number}", slots=8, latency_s=0.02) for number in range(3)]
            for one in nodes:
                front.add_node(one)
            session = await front.open_session(SessionLimits())
            cells = [asyncio.create_task(front.run(RunRequest(code=f"cell {n}", seed=n, session=session))) for n in range(5)]
            await asyncio.sleep(0)
            fork = asyncio.create_task(front.fork_session(session))
            await asyncio.sleep(0)
            after = asyncio.create_task(front.run(RunRequest(code="after the fork", session=session)))
            await asyncio.gather(*cells, after)
            home = next(one for one in nodes if one.cells)
            histories = [[cell.code for cell in cells] for cells in home.cells.values()]
            assert histories == [[*(f"cell {n}" for n in range(5)), "after the fork"], [f"cell {n}" for n in range(5)]]
            assert (await front.run(RunRequest(code="in the fork", session=await fork))).node == home.name
            await front.close_session(session)
            await front.close_session(session)
            with pytest.raises(SessionLost, match="closed"):
                await front.run(RunRequest(code="late", session=session))
            with pytest.raises(SessionLost):
                await front.fork_session(session)
            with pytest.raises(SessionLost):
                await front.run(RunRequest(code="x", session="never there"))

    asyncio.run(play())


def test_sessions_are_spread_over_nodes() -> None:
    async def play() -> None:
        async with Dispatcher(DispatchConfig(max_sessions=12)) as front:
            nodes = [node("small", slots=2), node("large", slots=4)]
            for one in nodes:
                front.add_node(one)
            for _ in range(12):
                await front.open_session(SessionLimits())
            assert [len(one.cells) for one in nodes] == [4, 8]
            with pytest.raises(Overloaded):
                await front.open_session(SessionLimits())
            with pytest.raises(UserError):
                await front.open_session(SessionLimits(lease_s=float("inf")))

    asyncio.run(play())


def test_a_cell_never_runs_again_its_session_is_lost_with_its_node() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            doomed, other = node("doomed", latency_s=60), node("other")
            front.add_node(doomed)
            session = await front.open_session(SessionLimits())
            front.add_node(other)
            calls = [asyncio.create_task(front.run(RunRequest(code=str(n), session=session))) for n in range(3)]
            calls.append(asyncio.create_task(front.fork_session(session)))
            await until(lambda: doomed.num_in_flight == 1)
            doomed.die("power cut")
            failures = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(failure) for failure in failures] == [SessionLost] * 4
            assert (len(doomed.requests), other.requests) == (1, [])
            assert front.tally.num_sessions_lost == 1
            assert front.admission.held.num == 0

    asyncio.run(play())


def test_a_cell_that_its_node_could_not_run_loses_its_session() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            one = node(fault_rate=1.0)
            front.add_node(one)
            session = await front.open_session(SessionLimits())
            with pytest.raises(SessionLost, match="scripted fault"):
                await front.run(RunRequest(code="x", session=session))
            with pytest.raises(SessionLost, match="scripted fault"):
                await front.run(RunRequest(code="x", session=session))
            assert len(one.requests) == 1
            await until(lambda: not one.cells)

    asyncio.run(play())


def test_shared_calls_do_not_hold_up_the_cells_of_a_session() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            one = node(slots=1, latency_s=0.01)
            front.add_node(one)
            session = await front.open_session(SessionLimits())
            many = [asyncio.create_task(front.run(RunRequest(code=str(n), seed=n), client="many")) for n in range(1000)]
            await asyncio.sleep(0.02)
            for number in range(3):
                await asyncio.wait_for(front.run(RunRequest(code="cell", seed=number, session=session)), 0.5)
            assert sum(task.done() for task in many) < 100
            for task in many:
                task.cancel()

    asyncio.run(play())


def test_a_session_without_cells_for_longer_than_its_lease_is_forgotten() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            front.add_node(node())
            session = await front.open_session(SessionLimits(lease_s=0.01))
            front.sessions.find(session).used_at -= 61.0  # the slack that the node has to end it
            await until(lambda: len(front.sessions) == 0)
            with pytest.raises(SessionLost, match="lease"):
                await front.run(RunRequest(code="x", session=session))

    asyncio.run(play())


# The end


def test_a_front_that_finishes_ends_what_it_has_and_takes_nothing_new() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            front.add_node(node(slots=2, latency_s=0.05))
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
        front = Dispatcher()
        one = node(slots=2, latency_s=60)
        front.add_node(one)
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


def test_the_level_of_the_service_is_that_of_its_weakest_node() -> None:
    async def play() -> None:
        async with Dispatcher() as front:
            strong = node("strong")
            front.add_node(strong)
            assert front.level is IsolationLevel.NAMESPACES
            front.add_node(replace(strong, level=IsolationLevel.CONFINED))
            assert front.level is IsolationLevel.CONFINED

    asyncio.run(play())
