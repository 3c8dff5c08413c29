"""No room where temporary files lie. Calls are answered rightly or fail with a fault of ours, and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from strop.sandbox import RunOutcome, RunRequest
from strop.sandbox.client import SandboxClient

from .ledger import Ledger, make_calls
from .processes import Part
from .service import Service

pytestmark = [pytest.mark.slow, pytest.mark.sandbox, pytest.mark.timeout(120)]

_SIZE_MIB, _NUM_FILES = 4, 400
_NUM_CALLS = 150
_IN_FLIGHT = 32
_REST_S = 10.0
_FILL = """
import os
os.makedirs('d')
taken = 0
with open('d/f', 'wb', buffering=0) as file:
    try:
        while True:
            taken += file.write(b'x' * 65536)
    except OSError as error:
        print(error.strerror)
print(len(input()))
"""


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """Where one will be mounted, in a mount namespace of the service."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a small disk for the service is mounted by root, in a mount namespace that util-linux's unshare makes")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        yield Path(place)


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, small_disk: Path, level: str) -> AsyncIterator[tuple[Service, SandboxClient, Path]]:
    """The service, a client, and the small disk as this process reaches it."""
    options = f"size={_SIZE_MIB}m,nr_inodes={_NUM_FILES},mode=1777"
    mount = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {options} none "$0" && exec "$@"', str(small_disk))
    service = Service(tmp_path, level=level, warm="bare", run_front=mount, temporary=small_disk)
    async with service, service.client(patience_s=60.0) as client:
        [front] = (await service.parts())[Part.FRONT]
        yield service, client, Path(f"/proc/{front.pid}/root{small_disk}")


async def num_descriptors(service: Service) -> int:
    parts = await service.parts()
    return sum(len(os.listdir(f"/proc/{process.pid}/fd")) for part in (Part.FRONT, Part.SUPERVISOR) for process in parts[part])


async def check_calls(client: SandboxClient, *, seed: int, may_fault: bool = False) -> int:
    """How many were faults of ours."""
    calls, ledger = make_calls(_NUM_CALLS, seed=seed), Ledger()
    await ledger.play(client, calls, in_flight=_IN_FLIGHT)
    ledger.check(calls, within_s=30.0, may_fault=lambda entry: may_fault)
    return len(ledger.faults)


def holds_something(directory: Path) -> bool:
    try:
        return bool(os.listdir(directory))
    except FileNotFoundError:  # removed meanwhile
        return False


async def check_rest(service: Service, disk: Path, *, descriptors: int) -> None:
    """Nothing of it is left but the directories of children that wait for their work."""
    deadline = asyncio.get_running_loop().time() + _REST_S
    while True:
        entries, num = os.listdir(disk), await num_descriptors(service)
        full = [name for name in entries if holds_something(disk / name)]
        if not full and len(entries) <= 2 * (os.cpu_count() or 1) and num <= descriptors:
            return
        assert asyncio.get_running_loop().time() < deadline, (
            f"at rest there are {entries}, {full} with something in them, and {num} descriptors after {descriptors}"
        )
        await asyncio.sleep(0.1)


def fill(disk: Path, kind: str) -> Path:
    """Take all its bytes, or all its files, as somebody else would."""
    filler = disk / "filler"
    filler.mkdir()
    with contextlib.suppress(OSError):
        if kind == "bytes":
            with (filler / "f").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        for number in range(10 * _NUM_FILES):
            (filler / str(number)).touch()
    return filler


@pytest.mark.parametrize("kind", ["bytes", "files"])
@pytest.mark.parametrize("level", ["namespaces", "confined"])
def test_a_full_temporary_directory_costs_at_most_typed_faults(tmp_path: Path, small_disk: Path, level: str, kind: str) -> None:
    async def scene() -> None:
        async with serving(tmp_path, small_disk, level) as (service, client, disk):
            await check_calls(client, seed=30)
            descriptors = await num_descriptors(service)
            filler = fill(disk, kind)
            num_faults = await check_calls(client, seed=31, may_fault=level == "confined")
            if (level, kind) == ("confined", "files"):
                assert num_faults > 0, "the disk was not full, so nothing is proven"
            shutil.rmtree(filler)
            await check_calls(client, seed=32)
            await check_rest(service, disk, descriptors=descriptors + 8)
            await service.end()

    asyncio.run(scene())


@pytest.mark.parametrize("level", ["namespaces", "confined"])
def test_a_program_that_fills_its_disk_is_told_so_and_the_next_one_has_room(
    tmp_path: Path, small_disk: Path, level: str
) -> None:
    async def scene() -> None:
        async with serving(tmp_path, small_disk, level) as (service, client, disk):
            await check_calls(client, seed=33)
            descriptors = await num_descriptors(service)
            for _ in range(3):
                result = await client.run(RunRequest(code=_FILL, stdin="abc", file_mib=1024))
                assert (result.outcome, result.text) == (RunOutcome.STDOUT, "No space left on device\n3\n"), result
                # What it left is removed in the background.
                await check_rest(service, disk, descriptors=descriptors + 8)
            await check_calls(client, seed=34)
            await service.end()

    asyncio.run(scene())
