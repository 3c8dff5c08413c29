"""The whole service with real processes: a supervisor that dies is started again, and SIGTERM ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from links import peer_of_node_process, until
from services import scripted, serving
from test_client import free_port

from strop.errors import MachineError, UserError
from strop.sandbox.client import SandboxClient
from strop.sandbox.config import SandboxConfig
from strop.sandbox.local import open_service
from strop.sandbox.node_process import LogLine, spawn_node
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest
from strop.sandbox.server.server import CodeServer, ServeConfig

TOKEN = "correct horse battery"
ANY_LEVEL = SandboxConfig(min_level=IsolationLevel.PROCESS, max_running=2, fork_servers=1)


@contextlib.contextmanager
def process(port: int, *, grace_s: float = 10.0, latency_s: float = 0.05, slots: int = 4) -> Iterator[subprocess.Popen[bytes]]:
    """A scripted service as a process of its own."""
    script = Path(__file__).with_name("scripted_process.py")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    arguments = [sys.executable, str(script), *map(str, (port, grace_s, latency_s, slots))]
    running = subprocess.Popen(arguments, env=environment)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


async def running(client: SandboxClient, num: int) -> None:
    """Returns once so many calls run."""
    async with asyncio.timeout(20):
        while sum(node.num_running for one in (await client.health()).values() for node in one.nodes) < num:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_sigterm_finishes_what_runs_and_takes_nothing_new() -> None:
    async def play() -> None:
        port = free_port()
        with process(port, latency_s=0.5) as service:
            async with SandboxClient(f"http://127.0.0.1:{port}", connect_s=10, reconnect_s=0.5) as client:
                await client.run(RunRequest(code="first"))
                calls = [asyncio.create_task(client.run(RunRequest(code=str(n), seed=n))) for n in range(40)]
                await running(client, 4)
                service.terminate()
                await asyncio.sleep(0.1)
                late = asyncio.create_task(client.run(RunRequest(code="late")))
                assert [result.text for result in await asyncio.gather(*calls)] == [f"ran {n}" for n in range(40)]
                assert await asyncio.to_thread(service.wait, 20) == 0
                with pytest.raises(MachineError, match="out of reach"):
                    await asyncio.wait_for(late, 10)

    asyncio.run(play())


def test_what_runs_beyond_the_grace_is_answered_too() -> None:
    async def play() -> None:
        port = free_port()
        with process(port, grace_s=0.5, latency_s=60) as service:
            async with SandboxClient(f"http://127.0.0.1:{port}", connect_s=10) as client:
                calls = [asyncio.create_task(client.run(RunRequest(code=str(n), seed=n))) for n in range(20)]
                await running(client, 4)
                service.terminate()
                results = await asyncio.wait_for(asyncio.gather(*calls), 20)
                assert {result.outcome for result in results} == {RunOutcome.INTERNAL}
                assert "closed" in results[0].reason
                assert await asyncio.to_thread(service.wait, 20) == 0

    asyncio.run(play())


def test_an_address_that_is_taken_is_named() -> None:
    async def play() -> None:
        async with serving(scripted()) as server:
            with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{server.port}"):
                async with serving(scripted(), port=server.port):
                    pass

    asyncio.run(play())


def test_a_supervisor_that_dies_is_started_again() -> None:
    others = {node.pid for node in nodes_of(psutil.Process())}  # of a test before this one, on their way out

    def own_pids() -> set[int]:
        return {node.pid for node in nodes_of(psutil.Process())} - others

    async def play() -> None:
        async with CodeServer(ServeConfig(port=0, node=ANY_LEVEL)) as server, SandboxClient(server.url) as client:
            assert (await client.run(RunRequest(code="print(6 * 7)"))).text == "42\n"
            (killed,) = own_pids()
            psutil.Process(killed).kill()
            results = await asyncio.gather(*(client.run(RunRequest(code=f"print({n})")) for n in range(20)))
            assert [result.text for result in results] == [f"{n}\n" for n in range(20)]
            assert own_pids() - {killed}
        assert own_pids() - {killed} == set()

    asyncio.run(play())


def test_a_supervisor_that_cannot_start_says_why() -> None:
    async def play() -> None:
        with pytest.raises(MachineError, match="did not start"):
            await spawn_node(SandboxConfig.model_construct(fork_servers=0), "n")  # which the supervisor itself does not accept

    asyncio.run(play())


def test_a_supervisor_dies_with_the_process_that_started_it() -> None:
    program = (
        "import asyncio\n"
        "from strop.sandbox.config import SandboxConfig\n"
        "from strop.sandbox.protocol import IsolationLevel\n"
        "from strop.sandbox.node_process import spawn_node\n"
        "async def main():\n"
        "    node = await spawn_node(SandboxConfig(min_level=IsolationLevel.PROCESS), 'n')\n"
        "    print('started', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        below = psutil.Process(parent.pid).children(recursive=True)
        assert below
        parent.kill()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not alive


def nodes_of(parent: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in parent.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line any more
            found += [child] if "strop.sandbox.supervisor.node" in child.cmdline() else []
    return found


def test_a_line_of_the_supervisors_log_keeps_its_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="strop.sandbox")

    async def play() -> None:
        async with peer_of_node_process() as (_, peer, _):
            for level in (logging.WARNING, logging.INFO):
                peer.send((0, LogLine(level, "all is well"), False))
            await until(lambda: len(caplog.records) == 2)

    asyncio.run(play())
    said = "supervisor: all is well"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(30, said), (20, said)]


def test_a_service_that_is_opened_without_its_token_says_where_to_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(scripted(), token=TOKEN) as server:
            config = SandboxConfig(url=server.url)
            for wrong in ("", "wrong"):
                monkeypatch.setenv("STROP_SANDBOX_TOKEN", wrong)
                with pytest.raises(
                    UserError, match=r"environment variable STROP_SANDBOX_TOKEN; `strop sandbox run` .* --token-file"
                ):
                    async with open_service(config):
                        pass
            monkeypatch.setenv("STROP_SANDBOX_TOKEN", TOKEN)
            async with open_service(config) as service:
                assert (await service.run(RunRequest(code="1"))).text == "ran 1"

    asyncio.run(main())
