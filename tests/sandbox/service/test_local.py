"""A sandbox of this process, with a scripted supervisor: slots, deadlines, and what is lost with a supervisor that dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from dispatching import node, pairs
from links import until
from services import Supply

from scripted_node import ScriptedNode
from strop.deadline import deadline
from strop.errors import MachineError, NodeLost, NoNodes, SessionLost, UserError
from strop.sandbox import LocalSandbox, PairVerdict, RunOutcome, RunRequest, SessionLimits, VerifyRequest, local

Play = Callable[[LocalSandbox], Coroutine[Any, Any, None]]


def play_with(play: Play, *nodes: ScriptedNode, no_node_s: float = 30.0) -> None:
    """Play with a sandbox whose supervisors are these nodes, each after the death of the one before."""

    async def main() -> None:
        async with LocalSandbox(spawn=Supply(*nodes), no_node_s=no_node_s) as box:
            await play(box)

    asyncio.run(main())


def test_calls_wait_for_a_slot_in_order_and_their_time_begins_with_it() -> None:
    one = node(slots=1, latency_s=0.1)

    async def play(box: LocalSandbox) -> None:
        async def call(number: int) -> str:
            async with deadline(0.5):
                result = await box.run(RunRequest(code=str(number), seed=number))
            return result.text

        assert await asyncio.gather(*map(call, range(20))) == [f"ran {number}" for number in range(20)]
        assert [request.code for request in one.requests] == [str(number) for number in range(20)]
        queued = await asyncio.gather(*(box.run(RunRequest(code="x", seed=number)) for number in range(10)))
        assert max(result.timings.queue_s for result in queued) > 0.1

    play_with(play, one)


def test_slots_that_the_supervisor_gains_are_used() -> None:
    one = node(slots=1, latency_s=600)

    async def play(box: LocalSandbox) -> None:
        calls = [asyncio.create_task(box.run(RunRequest(code=str(number)))) for number in range(3)]
        await until(lambda: one.num_in_flight == 1)
        one.num_slots = 3
        await until(lambda: one.num_in_flight == 3)
        for call in calls:
            call.cancel()

    play_with(play, one)


def test_a_cancelled_call_gives_its_slot_back_at_any_moment() -> None:
    one = node(slots=2, latency_s=0.01)

    async def play(box: LocalSandbox) -> None:
        for round_ in range(20):
            calls = [asyncio.create_task(box.run(RunRequest(code=f"{round_} {number}"))) for number in range(8)]
            await asyncio.sleep(0.001 * (round_ % 7))
            for call in calls[::2]:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert (await asyncio.wait_for(box.run(RunRequest(code="last")), 1)).text == "ran last"
        assert one.num_cancelled > 0

    play_with(play, one)


def test_programs_survive_one_death_of_the_supervisor_and_two_are_our_fault() -> None:
    first, second, third = node(slots=4, latency_s=600), node(slots=4, latency_s=600), node(slots=4)

    async def play(box: LocalSandbox) -> None:
        calls = [asyncio.create_task(box.run(RunRequest(code=str(number)))) for number in range(6)]
        await until(lambda: first.num_in_flight == 4)
        first.die()
        await until(lambda: second.num_in_flight == 4)
        assert sorted(request.code for request in second.requests) == ["0", "1", "2", "3"]
        second.die("again")
        results = await asyncio.gather(*calls)
        assert [result.outcome for result in results] == [RunOutcome.INTERNAL] * 4 + [RunOutcome.STDOUT] * 2
        assert "again" in results[0].reason

    play_with(play, first, second, third)


def test_a_cell_never_runs_again_and_its_session_is_lost_with_the_supervisor() -> None:
    doomed, other = node(latency_s=600), node()

    async def play(box: LocalSandbox) -> None:
        session = await box.open_session(SessionLimits())
        calls = [asyncio.create_task(box.run(RunRequest(code=str(number), session=session))) for number in range(3)]
        calls.append(asyncio.create_task(box.fork_session(session)))
        await until(lambda: doomed.num_in_flight == 1)
        doomed.die("power cut")
        failures = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(failure) for failure in failures] == [SessionLost] * 4
        assert all("power cut" in str(failure) for failure in failures)
        with pytest.raises(SessionLost, match="power cut"):
            await box.run(RunRequest(code="x", session=session))
        assert (len(doomed.requests), other.requests) == (1, [])
        await box.close_session(session)
        await box.run(RunRequest(code="x", session=await box.open_session(SessionLimits())))

    play_with(play, doomed, other)


def test_cells_and_forks_of_a_session_take_turns() -> None:
    one = node(slots=4, latency_s=0.02)

    async def play(box: LocalSandbox) -> None:
        session = await box.open_session(SessionLimits())
        before = [asyncio.create_task(box.run(RunRequest(code=str(n), session=session))) for n in range(3)]
        fork = asyncio.create_task(box.fork_session(session))
        after = asyncio.create_task(box.run(RunRequest(code="3", session=session)))
        copy = await fork
        assert [cell.code for cell in one.cells[copy]] == ["0", "1", "2"]
        await asyncio.gather(*before, after)
        await box.close_session(session)
        await box.close_session(session)
        assert list(one.cells) == [copy]
        with pytest.raises(SessionLost):
            await box.run(RunRequest(code="x", session=session))

    play_with(play, one)


def test_a_cell_that_could_not_run_ends_its_session() -> None:
    one = node(fault_rate=1.0)

    async def play(box: LocalSandbox) -> None:
        session = await box.open_session(SessionLimits())
        for _ in range(2):
            with pytest.raises(SessionLost, match="scripted fault"):
                await box.run(RunRequest(code="x", session=session))
        assert len(one.requests) == 1
        await until(lambda: not one.cells)

    play_with(play, one)


def test_pairs_without_a_verdict_are_judged_once_more() -> None:
    first, second = node(slots=1, latency_s=0.01), node(slots=8)

    async def play(box: LocalSandbox) -> None:
        verdicts: dict[int, PairVerdict] = {}
        async for index, verdict in box.verify(VerifyRequest(pairs=pairs(80))):
            assert index not in verdicts
            verdicts[index] = verdict
            if len(verdicts) == 5:
                first.die()
        assert verdicts == {n: PairVerdict.EQUAL if n % 2 else PairVerdict.UNEQUAL for n in range(80)}
        leaving = box.verify(VerifyRequest(pairs=pairs(600)))
        await anext(leaving)
        with pytest.raises(UserError, match="pair_wall_s"):
            await anext(box.verify(VerifyRequest(pairs=pairs(1), pair_wall_s=float("nan"))))

    play_with(play, first, second)


def test_without_a_supervisor_calls_fail_after_a_while() -> None:
    one = node()

    async def play(box: LocalSandbox) -> None:
        one.die()
        with pytest.raises(NoNodes):
            await asyncio.wait_for(box.run(RunRequest(code="x")), 2)
        began = time.monotonic()
        with pytest.raises(NoNodes):
            await asyncio.wait_for(box.run(RunRequest(code="x")), 2)
        assert time.monotonic() - began > 0.15  # a call that comes later waits as long
        with pytest.raises(NoNodes):
            await asyncio.wait_for(anext(box.verify(VerifyRequest(pairs=pairs(1)))), 2)
        with pytest.raises(NoNodes):
            await asyncio.wait_for(box.open_session(SessionLimits()), 2)

    play_with(play, one, no_node_s=0.2)


def test_a_call_that_may_have_run_is_not_welcome_again() -> None:
    one = node(latency_s=60)

    async def play(box: LocalSandbox) -> None:
        call = asyncio.create_task(box.run(RunRequest(code="x")))
        await until(lambda: len(one.requests) == 1)
        one.die("power cut")
        result = await asyncio.wait_for(call, 4)
        assert result.outcome is RunOutcome.INTERNAL
        assert "power cut" in result.reason

    play_with(play, one, no_node_s=0.3)


def test_the_programs_of_a_client_do_not_hold_up_its_cells() -> None:
    async def play(box: LocalSandbox) -> None:
        session = await box.open_session(SessionLimits())
        many = [asyncio.create_task(box.run(RunRequest(code=str(n), seed=n))) for n in range(1000)]
        await asyncio.sleep(0.02)
        for number in range(3):
            await asyncio.wait_for(box.run(RunRequest(code="cell", seed=number, session=session)), 0.5)
        assert sum(task.done() for task in many) < 100
        for task in many:
            task.cancel()

    play_with(play, node(slots=1, latency_s=0.01))


def test_a_session_without_cells_for_longer_than_its_lease_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_LEASE_SLACK_S", 0.1)

    async def play(box: LocalSandbox) -> None:
        session = await box.open_session(SessionLimits(lease_s=0.01))
        await until(lambda: box.num_sessions == 0)
        with pytest.raises(SessionLost, match="no such session"):
            await box.run(RunRequest(code="x", session=session))

    play_with(play, node())


def test_close_answers_every_call() -> None:
    one = node(slots=1, latency_s=600)

    async def play(box: LocalSandbox) -> None:
        calls = [asyncio.create_task(box.run(RunRequest(code=str(number)))) for number in range(3)]
        await until(lambda: one.num_in_flight == 1)
        await box.close()
        assert [result.outcome for result in await asyncio.gather(*calls)] == [RunOutcome.INTERNAL] * 3
        with pytest.raises(MachineError, match="closed"):
            await box.run(RunRequest(code="x"))

    play_with(play, one)


def test_a_session_is_opened_again_when_its_supervisor_dies_meanwhile() -> None:
    class Fragile(ScriptedNode):
        async def open_session(self, limits: SessionLimits) -> str:
            self.die("power cut")
            raise NodeLost("power cut")

    async def play(box: LocalSandbox) -> None:
        session = await box.open_session(SessionLimits())
        assert (await box.run(RunRequest(code="x", session=session))).text == "ran x"

    play_with(play, Fragile(answer={}), node())


def test_a_supervisor_that_dies_again_and_again_is_replaced_at_once_each_time() -> None:
    nodes = [node(name=str(number)) for number in range(8)]

    async def play(box: LocalSandbox) -> None:
        for one in nodes:
            result = await asyncio.wait_for(box.run(RunRequest(code="x")), 1)
            assert result.node == one.name
            one.die()

    play_with(play, *nodes)
