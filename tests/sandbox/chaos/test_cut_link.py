"""A node behind a cable that is cut while it works: no end is reported, no call is lost, and it is used again afterwards."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from strop.sandbox import RunRequest
from strop.sandbox.client.client import SandboxClient

from .ledger import Ledger, make_calls
from .networks import FRONT_ADDRESS, Cable
from .service import Service

_log = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.sandbox, pytest.mark.timeout(240)]

NOTICED_S = 2.0
_POLL_S = 0.02
_BACK_S = 30.0  # for a node to join again; it believes in its link for 10 s after the front has given it up
_NUM_BEFORE, _NUM_DURING, _NUM_AFTER = 400, 600, 400


async def wait_nodes(client: SandboxClient, num: int, *, within_s: float) -> float:
    """How long it took until the service had so many nodes."""
    since = time.monotonic()
    while len(nodes := (await client.health()).nodes) != num:
        assert time.monotonic() - since < within_s, f"after {within_s:g} s the nodes are {nodes}"
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - since


async def node_names(client: SandboxClient, num: int) -> set[str]:
    """Of those who answered so many calls."""
    results = await asyncio.gather(*(client.run(RunRequest(code=f"print({number})")) for number in range(num)))
    assert [result.text for result in results] == [f"{number}\n" for number in range(num)]
    return {result.node for result in results}


@pytest.mark.parametrize("cut_s", [5.0, 15.0], ids=["for less than the node is patient", "for longer"])
def test_a_cut_cable_costs_no_call_and_is_noticed_within_two_seconds(tmp_path: Path, cut_s: float) -> None:
    async def scene(cable: Cable) -> None:
        service = Service(
            tmp_path, num_local=1, nodes_host=FRONT_ADDRESS, warm="bare,numpy", run_joined=("ip", "netns", "exec", cable.node)
        )
        async with service, service.client(patience_s=60.0) as client:
            calls = make_calls(_NUM_BEFORE + _NUM_DURING, seed=6)
            ledger = Ledger()
            assert len(await node_names(client, 60)) == 2
            is_cut = asyncio.Event()

            def count(num: int) -> None:
                if num == _NUM_BEFORE:
                    cable.cut()
                    is_cut.set()

            playing = asyncio.create_task(ledger.play(client, calls, in_flight=64, done=count))
            await is_cut.wait()
            cut_at = time.monotonic()
            noticed_s = await wait_nodes(client, 1, within_s=NOTICED_S)
            await playing
            ledger.check(calls, within_s=15.0, may_fault=lambda entry: False)
            assert len(await node_names(client, 60)) == 1
            await asyncio.sleep(max(0.0, cut_at + cut_s - time.monotonic()))
            cable.mend()
            back_s = await wait_nodes(client, 2, within_s=_BACK_S)
            _log.info("%s; noticed after %.2f s, back %.1f s after the cable was", ledger.summary(), noticed_s, back_s)
            assert len(await node_names(client, 200)) == 2
            after, later = make_calls(_NUM_AFTER, seed=7), Ledger()
            await later.play(client, after, in_flight=64)
            later.check(after, within_s=10.0, may_fault=lambda entry: False)
            await service.end()

    with Cable() as cable:
        cable.run_at_front(lambda: asyncio.run(scene(cable)))
