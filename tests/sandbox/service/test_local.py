"""A sandbox of this process, with a scripted supervisor: slots, deadlines, and what is lost with a supervisor that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from dispatching import node, pairs
from links import until

from strop.deadline import deadline
from strop.errors import MachineError, NodeLost, NoNodes, SessionLost, UserError
from strop.sandbox import LocalSandbox, PairVerdict, RunOutcome, RunRequest, SessionLimits, VerifyRequest, local, spawn
from strop.sandbox.scripted import ScriptedNode

Play = Callable[[LocalSandbox], Coroutine[Any, Any, None]]


@pytest.fixture
def play_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Play with a sandbox whose supervisors are these nodes, each after the death of the one before."""

    def start(play: Play, *nodes: ScriptedNode) -> None:
        following = iter(nodes)

        async def spawn_node(*arguments: Any, **options: Any) -> ScriptedNode:
            if (following_node := next(following, None)) is None:
                raise MachineError("there is no other supervisor")
            return following_node

        async def main() -> None:
            async with LocalSandbox() as box:
                await play(box)

        for module in (local, spawn):
            monkeypatch.setattr(module, "spawn_node", spawn_node)
        asyncio.run(main())

    return start


def test_calls_wait_for_a_slot_in_order_and_their_time_begins_with_it(play_with: Callable[..., None]) -> None:
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


def test_slots_that_the_supervisor_gains_are_used(play_with: Callable[..., None]) -> None:
    one = node(slots=1, latency_s=600)

    async def play(box: LocalSandbox) -> None:
        calls = [asyncio.create_task(box.run(RunRequest(code=str(number)))) for number in range(3)]
        await until(lambda: one.num_in_flight == 1)
        one.num_slots = 3
        await until(lambda: one.num_in_flight == 3)
        for call in calls:
            call.cancel()

    play_with(play, one)


def test_a_cancelled_call_gives_its_slot_back_at_any_moment(play_with: Callable[..., None]) -> None:
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


def test_programs_survive_one_death_of_the_supervisor_and_two_are_our_fault(play_with: Callable[..., None]) -> None:
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


def test_a_cell_never_runs_again_and_its_session_is_lost_with_the_supervisor(play_with: Callable[..., None]) -> None:
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


def test_cells_and_forks_of_a_session_take_turns(play_with: Callable[..., None]) -> None:
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


def test_a_cell_that_could_not_run_ends_its_session(play_with: Callable[..., None]) -> None:
    one = node(fault_rate=1.0)

    async def play(box: LocalSandbox) -> None:
        session = await box.open_session(SessionLimits())
        for _ in range(2):
            with pytest.raises(SessionLost, match="scripted fault"):
                await box.run(RunRequest(code="x", session=session))
        assert len(one.requests) == 1
        await until(lambda: not one.cells)

    play_with(play, one)


def test_pairs_without_a_verdict_are_judged_once_more(play_with: Callable[..., None]) -> None:
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


def test_without_a_supervisor_calls_fail_after_a_while(play_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_NO_SUPERVISOR_S", 0.2)
    one = node()

    async def play(box: LocalSandbox) -> None:
        one.die()
        with pytest.raises(NoNodes):
            await asyncio.wait_for(box.run(RunRequest(code="x")), 2)
        with pytest.raises(NoNodes):
            await asyncio.wait_for(anext(box.verify(VerifyRequest(pairs=pairs(1)))), 2)

    play_with(play, one)


def test_a_supervisor_that_never_answers_is_at_fault(play_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_ANSWER_GRACE_S", 0.1)
    one = node(latency_s=600)

    async def play(box: LocalSandbox) -> None:
        result = await box.run(RunRequest(code="x", wall_s=0.1))
        assert (result.outcome, len(one.requests), one.num_in_flight) == (RunOutcome.INTERNAL, 2, 0)
        assert "did not answer" in result.reason

    play_with(play, one)


def test_close_answers_every_call(play_with: Callable[..., None]) -> None:
    one = node(slots=1, latency_s=600)

    async def play(box: LocalSandbox) -> None:
        calls = [asyncio.create_task(box.run(RunRequest(code=str(number)))) for number in range(3)]
        await until(lambda: one.num_in_flight == 1)
        await box.close()
        assert [result.outcome for result in await asyncio.gather(*calls)] == [RunOutcome.INTERNAL] * 3
        with pytest.raises(MachineError, match="closed"):
            await box.run(RunRequest(code="x"))

    play_with(play, one)


def test_a_session_is_opened_again_when_its_supervisor_dies_meanwhile(play_with: Callable[..., None]) -> None:
    class Fragile(ScriptedNode):
        async def open_session(self, limits: SessionLimits) -> str:
            self.die("power cut")
            raise NodeLost("power cut")

    async def play(box: LocalSandbox) -> None:
        session = await box.open_session(SessionLimits())
        assert (await box.run(RunRequest(code="x", session=session))).text == "ran x"

    play_with(play, Fragile(answer={}), node())
