"""A service behind a cable that is cut while it works: no end is reported, no call is lost, and it is used again afterwards."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from strop.sandbox import RunRequest
from strop.sandbox.client import SandboxClient

from .ledger import Ledger, make_calls
from .networks import FAR_ADDRESS, Cable
from .service import TOKEN, Service

pytestmark = [pytest.mark.slow, pytest.mark.sandbox, pytest.mark.timeout(240)]

NOTICED_S = 2.0
_BACK_S = 30.0  # for the service to be used again
_NUM_BEFORE, _NUM_DURING, _NUM_AFTER = 400, 600, 400


async def node_names(client: SandboxClient, num: int) -> set[str]:
    """Of the services that answered so many calls."""
    results = await asyncio.gather(*(client.run(RunRequest(code=f"print({number})")) for number in range(num)))
    assert [result.text for result in results] == [f"{number}\n" for number in range(num)]
    return {result.node for result in results}


@pytest.mark.parametrize("cut_s", [3.0, 12.0], ids=["for less than the client is patient", "for longer"])
def test_a_cut_cable_costs_no_call_and_is_noticed_within_two_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut_s: float
) -> None:
    async def scene(cable: Cable) -> None:
        near = Service(tmp_path / "near")
        far = Service(tmp_path / "far", host=FAR_ADDRESS, run_front=("ip", "netns", "exec", cable.far))
        async with near, far, SandboxClient([near.url, far.url], token=TOKEN, patience_s=60.0) as client:
            assert len(await client.health()) == len(await node_names(client, 60)) == 2
            calls, ledger, is_cut = make_calls(_NUM_BEFORE + _NUM_DURING, seed=6), Ledger(), asyncio.Event()

            def count(num: int) -> None:
                if num == _NUM_BEFORE:
                    cable.cut()
                    is_cut.set()

            playing = asyncio.create_task(ledger.play(client, calls, in_flight=64, done=count))
            await is_cut.wait()
            cut_at = time.time()
            await asyncio.sleep(cut_s)
            silences = [record.created for record in caplog.records if f"{far.url} has been silent" in record.getMessage()]
            assert silences
            assert silences[0] - cut_at < NOTICED_S
            cable.mend()
            await playing
            ledger.check(calls, within_s=20.0, may_fault=lambda entry: False)
            async with asyncio.timeout(_BACK_S):
                while len(await node_names(client, 60)) < 2:
                    pass
            after, later = make_calls(_NUM_AFTER, seed=7), Ledger()
            await later.play(client, after, in_flight=64)
            later.check(after, within_s=10.0, may_fault=lambda entry: False)
            await near.end()
            await far.end()

    with Cable() as cable:
        cable.run_near(lambda: asyncio.run(scene(cable)))
