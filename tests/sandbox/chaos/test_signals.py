"""Signals to the parts of a service while it works: the ledger of its client stays exact, and everything comes back in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.errors import MachineError
from strop.sandbox import RunRequest
from strop.sandbox.client import SandboxClient
from strop.sandbox.client_service import SILENCE_S

from .agent import Agent, Deed, Plan
from .ledger import Call, Entry, Ledger, make_calls
from .notebooks import Notebooks
from .processes import Part
from .service import TOKEN, Service

_log = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.sandbox, pytest.mark.timeout(300)]

IN_FLIGHT = 96
MAX_CALLS = 20_000  # far more than are answered before the last act
PATIENCE_S = 60.0
# From an act to the last attempt that it can cost: a lost supervisor is noticed after 1.8 s, a fork server after 5.25 s.
_MISSED_S = 6.0
_LINK_SILENCE_S = 1.8  # then what a stopped supervisor says is heard no more


async def play(
    directory: Path, plan: Plan, *, within_s: float, seed: int, fault_share: float, level: str = "namespaces", num: int = 1
) -> None:
    """Calls while an agent acts, until it has done all that is planned; then the service is whole again and ends in order.

    Args:
        num: of services; the agent acts on the first one.
        within_s: every call has to be answered by then, whatever died under it.
        fault_share: of the calls, that may fail with a fault of ours: those that lost two attempts.
    """
    calls, ledger, notebooks = make_calls(MAX_CALLS, seed=seed), Ledger(), Notebooks()
    asked: list[Call] = []

    def while_it_acts() -> Iterator[Call]:
        for call in calls:
            if agent.has_done_all:
                return
            asked.append(call)
            yield call

    async with contextlib.AsyncExitStack() as opened:
        services = [Service(directory / str(number), level=level) for number in range(num)]
        for one in services:
            await opened.enter_async_context(one)
        service = services[0]
        agent = Agent(service, plan, seed)
        urls = [one.url for one in services]
        async with SandboxClient(urls, token=TOKEN, patience_s=PATIENCE_S, connect_s=PATIENCE_S) as client:
            stop = asyncio.Event()
            others = [asyncio.create_task(agent.act(stop=stop))]
            others += [asyncio.create_task(notebooks.play(client, stop=stop)) for _ in range(2)]
            started_at = time.monotonic()
            await ledger.play(client, while_it_acts(), in_flight=IN_FLIGHT)
            _log.info("%s; faults: %s; load %.1f", ledger.summary(), dict(ledger.reasons()), os.getloadavg()[0])
            _log.info("%s", agent.summary())
            stop.set()
            await asyncio.gather(*others)
            _log.info("%s; in all %.1f s", notebooks.summary(), time.monotonic() - started_at)
            assert agent.has_done_all, f"too few acts: {agent.summary()}"
            notebooks.check()

            def may_fault(entry: Entry) -> bool:
                """Two attempts were lost, each by an act of its own."""
                return agent.deaths_during(entry.asked_at, entry.answered_at, slack_s=_MISSED_S) >= 2

            ledger.check(asked, within_s=within_s, may_fault=may_fault, stopped_s=_LINK_SILENCE_S)
            assert len(ledger.faults) <= fault_share * len(asked), ledger.summary()
            await service.wait_whole(within_s=30.0)
            await check_good_as_new(client, seed=seed)
        ending_at = time.monotonic()
        for one in services:
            await one.end()
        _log.info("ended in %.1f s", time.monotonic() - ending_at)


async def check_good_as_new(client: SandboxClient, *, seed: int) -> None:
    """Nothing that was done to it is left: the next calls are right, and fast."""
    calls, ledger = make_calls(300, seed=seed + 50), Ledger()
    await ledger.play(client, calls, in_flight=16)
    ledger.check(calls, within_s=5.0, may_fault=lambda entry: False)


def test_fork_servers_that_die_or_stop(tmp_path: Path) -> None:
    servers = (Part.FORK_SERVER_OUTER, Part.FORK_SERVER_INNER)
    deeds = tuple((deed, part) for deed in Deed for part in servers)
    plan = Plan(deeds=deeds, pause_s=(0.1, 1.0))
    asyncio.run(play(tmp_path, plan, within_s=30.0, seed=1, fault_share=0.01))


def test_a_front_that_dies(tmp_path: Path) -> None:
    plan = Plan(deeds=((Deed.KILL, Part.FRONT),), pause_s=(1.0, 4.0))
    asyncio.run(play(tmp_path, plan, within_s=30.0, seed=3, fault_share=0.0))


def test_a_front_that_stops(tmp_path: Path) -> None:
    plan = Plan(deeds=((Deed.PAUSE, Part.FRONT), (Deed.FREEZE, Part.FRONT)), pause_s=(0.5, 2.0), stop_s=(0.1, 13.0))
    asyncio.run(play(tmp_path, plan, within_s=45.0, seed=4, fault_share=0.0))


def test_one_service_of_two_that_dies_or_stops(tmp_path: Path) -> None:
    plan = Plan(deeds=tuple((deed, Part.FRONT) for deed in Deed), pause_s=(1.0, 3.0), stop_s=(0.5, 8.0))
    asyncio.run(play(tmp_path, plan, within_s=30.0, seed=9, fault_share=0.0, num=2))


def test_everything_at_once(tmp_path: Path) -> None:
    deeds = tuple((deed, part) for deed in Deed for part in Part)
    plan = Plan(deeds=deeds, pause_s=(0.1, 1.0), stop_s=(0.05, 5.0))
    # The one supervisor meets every act; the longest wait seen on a busy machine is 53 s.
    asyncio.run(play(tmp_path, plan, within_s=70.0, seed=5, fault_share=0.02))


def test_fork_servers_and_supervisors_that_die_where_programs_have_no_namespaces(tmp_path: Path) -> None:
    deeds = tuple((deed, part) for deed in Deed for part in (Part.FORK_SERVER_OUTER, Part.SUPERVISOR))
    plan = Plan(deeds=deeds, pause_s=(1.0, 4.0))  # a supervisor needs a second or two to start, and then some time to work
    asyncio.run(play(tmp_path, plan, within_s=30.0, seed=8, fault_share=0.02, level="confined"))


def test_calls_to_a_front_that_stays_stopped_fail_when_the_patience_with_it_ends(tmp_path: Path) -> None:
    reconnect_s = 5.0

    async def scene() -> None:
        async with Service(tmp_path, warm="bare") as service:
            client = SandboxClient(service.url, token=TOKEN, reconnect_s=reconnect_s)
            async with client:
                assert (await client.run(RunRequest(code="print(1)"))).text == "1\n"
                [front] = (await service.parts())[Part.FRONT]
                front.send(signal.SIGSTOP)
                asked_at = time.monotonic()
                with pytest.raises(MachineError, match="out of reach"):
                    await client.run(RunRequest(code="print(2)"))
                # The stream it had falls silent, then one more that is tried.
                assert time.monotonic() - asked_at < reconnect_s + 2 * SILENCE_S
                front.send(signal.SIGCONT)
                assert (await client.run(RunRequest(code="print(3)"))).text == "3\n"

    asyncio.run(scene())
