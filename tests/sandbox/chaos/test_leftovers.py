"""A service whose processes were all killed, in any state: the next one starts, works, and finds nothing of it in its way."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from .ledger import Ledger, make_calls
from .service import Service

pytestmark = [pytest.mark.slow, pytest.mark.sandbox, pytest.mark.timeout(180)]

_REMOVED_S = 10.0  # for what programs had left, which goes in the background
_NUM_CALLS = 300
_NUM_DEATHS = 2


def leftovers(temporary: Path) -> set[str]:
    """What a service of this user may leave on disk; the self-test uses /var/tmp."""
    found = {str(path) for path in temporary.iterdir()}
    return found | {entry.path for entry in os.scandir("/var/tmp") if entry.name.startswith("strop-canary-")}


@pytest.mark.parametrize("level", ["namespaces", "confined"])
def test_a_service_starts_clean_after_everything_was_killed(tmp_path: Path, level: str) -> None:
    async def scene(temporary: Path) -> None:
        service = Service(tmp_path, level=level, warm="bare", temporary=temporary)
        before = leftovers(temporary)
        for number in range(_NUM_DEATHS):
            await service.start()
            async with service.client(patience_s=60.0) as client:
                ledger, calls = Ledger(), make_calls(_NUM_CALLS, seed=10 + number)
                playing = asyncio.create_task(ledger.play(client, calls, in_flight=64))
                await asyncio.sleep(0.3)
                assert not playing.done()
                await service.kill()  # with calls in flight, files open, fork servers full of children
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
        if level == "confined":
            assert leftovers(temporary) - before, "nothing was left, so nothing is proven"
        await service.start()
        async with service.client(patience_s=60.0) as client:
            ledger, calls = Ledger(), make_calls(_NUM_CALLS, seed=20)
            await ledger.play(client, calls, in_flight=64)
            ledger.check(calls, within_s=15.0, may_fault=lambda entry: False)
        await service.end()
        deadline = asyncio.get_running_loop().time() + _REMOVED_S
        while left := leftovers(temporary) - before:
            assert asyncio.get_running_loop().time() < deadline, f"left on disk: {left}"
            await asyncio.sleep(0.1)

    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        os.chmod(temporary, 0o755)  # programs have users of their own
        asyncio.run(scene(Path(temporary)))
