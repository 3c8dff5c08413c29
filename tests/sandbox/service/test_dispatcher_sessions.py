"""Sessions in the queue: cells take turns on one node, run once, and are lost with it."""

from __future__ import annotations

import asyncio

import pytest
from dispatching import node
from links import until

from strop.errors import NodeLost, NoNodes, Overloaded, SessionLost
from strop.sandbox.protocol import RunRequest, SessionLimits
from strop.sandbox.scripted import ScriptedNode
from strop.sandbox.server.config import DispatchConfig
from strop.sandbox.server.dispatcher import Dispatcher


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

    asyncio.run(play())


def test_a_session_is_opened_on_another_node_if_its_node_dies_meanwhile() -> None:
    class Fragile(ScriptedNode):
        async def open_session(self, limits: SessionLimits) -> str:
            self.die("power cut")
            raise NodeLost("power cut")

    async def play() -> None:
        async with Dispatcher() as front:
            front.add_node(Fragile(answer={}))
            with pytest.raises(NoNodes) as failure:
                await front.open_session(SessionLimits())
            assert "power cut" in str(failure.value.__context__)
            front.add_node(Fragile(answer={}, num_slots=100))
            front.add_node(node())
            session = await front.open_session(SessionLimits())
            assert (await front.run(RunRequest(code="x", session=session))).text == "ran x"

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
