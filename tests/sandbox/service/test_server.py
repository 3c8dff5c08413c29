"""The whole service with real processes: nodes join over TCP, die, stop and drain; SIGTERM ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from links import until
from services import scripted, serving
from test_client import free_port

from strop.errors import MachineError, UserError
from strop.sandbox.client.client import SandboxClient
from strop.sandbox.config import SandboxConfig
from strop.sandbox.local import open_service
from strop.sandbox.node_end import serve_node
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest
from strop.sandbox.server.config import ServeConfig
from strop.sandbox.server.server import CodeServer
from strop.sandbox.spawn import log_line, spawn_node
from strop.sandbox.supervisor.__main__ import join_front
from strop.sandbox.supervisor.node import Node

TOKEN = "correct horse battery"
ANY_LEVEL = SandboxConfig(min_level=IsolationLevel.PROCESS, max_running=2, fork_servers=1)


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    script = Path(__file__).with_name("scripted_process.py")
    running = subprocess.Popen([sys.executable, str(script), *map(str, arguments)], stderr=subprocess.PIPE)
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        assert running.stderr is not None
        running.stderr.close()


@contextlib.contextmanager
def joining(
    server: CodeServer, name: str, *, slots: int = 8, latency_s: float = 0.02, token: str = TOKEN
) -> Iterator[subprocess.Popen[bytes]]:
    with process("node", "127.0.0.1", server.nodes_port, token, name, slots, latency_s) as running:
        yield running


async def running(client: SandboxClient, num: int) -> None:
    """Returns once so many calls run."""
    async with asyncio.timeout(20):
        while sum(node.num_running for one in (await client.health()).values() for node in one.nodes) < num:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_calls_survive_nodes_that_are_killed_and_stopped_and_a_stopped_one_is_noticed_within_two_seconds() -> None:
    async def play() -> float:
        async with serving(nodes_port=0, nodes_token=TOKEN) as server, SandboxClient(server.url) as client:
            with joining(server, "killed") as killed, joining(server, "stopped") as stopped, joining(server, "steady"):
                seats = server.dispatcher.floor.seats
                await until(lambda: len(seats) == 3, limit_s=60)
                calls = [asyncio.create_task(client.run(RunRequest(code=str(n), seed=n))) for n in range(1500)]
                await until(lambda: server.dispatcher.tally.outcomes.total() > 300, limit_s=20)
                killed.kill()
                await until(lambda: len(seats) == 2, limit_s=5)  # the kernel hangs up for it
                num_before = server.dispatcher.tally.outcomes.total()  # a call may lose one node, not two
                await until(lambda: server.dispatcher.tally.outcomes.total() > num_before + 200, limit_s=20)
                stopped.send_signal(signal.SIGSTOP)
                stopped_at = time.monotonic()
                await until(lambda: len(seats) == 1, limit_s=20)
                noticed_s = time.monotonic() - stopped_at
                results = await asyncio.gather(*calls)
                stopped.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.2)  # what it has finished meanwhile finds nobody
                assert server.dispatcher.tally.num_nodes_lost == 2
        assert [result.text for result in results] == [f"ran {n}" for n in range(1500)]
        assert set(Counter(result.node for result in results)) == {"killed", "stopped", "steady"}
        return noticed_s

    assert any(asyncio.run(play()) < 2.0 for _ in range(3))  # others may have the machine's cores for a while


def test_a_node_without_the_token_does_not_join_and_is_told() -> None:
    async def play() -> None:
        async with serving(nodes_port=0, nodes_token=TOKEN) as server:
            with joining(server, "false", token="wrong token") as false:
                assert false.stderr is not None
                assert b"has not the token" in await asyncio.to_thread(false.stderr.read)
            assert server.dispatcher.floor.seats == []

    asyncio.run(play())


def test_a_stranger_at_the_door_of_the_nodes_harms_nobody() -> None:
    async def play() -> None:
        async with serving(nodes_port=0) as server:
            for words in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, b"", b"\0\0\0\2{}"):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.nodes_port)
                writer.write(words)
                writer.write_eof()
                await asyncio.wait_for(reader.read(), 1)
                writer.close()
            with joining(server, "true", token=""):
                await until(lambda: len(server.dispatcher.floor.seats) == 1, limit_s=60)

    asyncio.run(play())


def test_sigterm_finishes_what_runs_and_takes_nothing_new() -> None:
    async def play() -> None:
        port, nodes_port = free_port(), free_port()
        with process("service", port, nodes_port, 10, 0.5) as service:
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
        port, nodes_port = free_port(), free_port()
        with process("service", port, nodes_port, 0.5, 60) as service:
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
        async with serving() as server:
            with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{server.port}"):
                async with serving(port=server.port):
                    pass

    asyncio.run(play())


def test_a_local_node_that_dies_is_started_again() -> None:
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


def test_a_node_of_this_machine_that_cannot_start_says_why() -> None:
    async def play() -> None:
        with pytest.raises(MachineError, match="did not start"):
            await spawn_node(SandboxConfig.model_construct(fork_servers=0))  # which the node itself does not accept

    asyncio.run(play())


def test_a_node_dies_with_the_process_that_started_it() -> None:
    program = (
        "import asyncio\n"
        "from strop.sandbox.config import SandboxConfig\n"
        "from strop.sandbox.protocol import IsolationLevel\n"
        "from strop.sandbox.spawn import spawn_node\n"
        "async def main():\n"
        "    node = await spawn_node(SandboxConfig(min_level=IsolationLevel.PROCESS))\n"
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
            found += [child] if "strop.sandbox.supervisor" in child.cmdline() else []
    return found


@pytest.mark.parametrize(
    ("said", "level", "logged"),
    [
        ("WARNING programs run at level L1", logging.WARNING, "node n: programs run at level L1"),
        ("INFO all is well", logging.INFO, "node n: all is well"),
        ("Traceback (most recent call last):", logging.WARNING, "node n: Traceback (most recent call last):"),
    ],
)
def test_a_line_of_a_nodes_log_keeps_its_level_and_is_not_marked_twice(
    caplog: pytest.LogCaptureFixture, said: str, level: int, logged: str
) -> None:
    caplog.set_level(logging.INFO, logger="strop.sandbox")
    log_line("n", said)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, logged)]


def test_a_node_asks_who_listens_before_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(node: Node) -> None:
        raise AssertionError("the self-test was begun")

    monkeypatch.setattr(Node, "start", start)
    with pytest.raises(UserError, match=r"no front answers at 127\.0\.0\.1:9"):
        asyncio.run(join_front("127.0.0.1:9", SandboxConfig(), name="n", token=""))


def test_joining_is_logged_on_both_ends_and_a_knock_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with serving(nodes_port=0, nodes_token=TOKEN) as server:
            _, knock = await asyncio.open_connection("127.0.0.1", server.nodes_port)
            knock.close()
            await knock.wait_closed()
            link = await asyncio.open_connection("127.0.0.1", server.nodes_port)
            serve = asyncio.create_task(serve_node(scripted("far", slots=4), *link, token=TOKEN))
            joined = f"joined 127.0.0.1:{server.nodes_port} as far (L2)"
            await until(lambda: joined in caplog.messages and "node far joined" in caplog.text)
        await serve

    caplog.set_level(logging.INFO, logger="strop.sandbox")
    asyncio.run(play())
    assert not [record for record in caplog.records if "could not join" in record.getMessage()]


def test_a_service_that_is_opened_without_its_token_says_where_to_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(scripted(), token=TOKEN) as server:
            config = SandboxConfig(url=server.url, token_env="THE_TOKEN")
            for wrong in ("", "wrong"):
                monkeypatch.setenv("THE_TOKEN", wrong)
                with pytest.raises(UserError, match=r"environment variable THE_TOKEN; `strop sandbox run` .* --token-file"):
                    async with open_service(config):
                        pass
            monkeypatch.setenv("THE_TOKEN", TOKEN)
            async with open_service(config) as service:
                assert (await service.run(RunRequest(code="1"))).text == "ran 1"

    asyncio.run(main())
