"""The supervisor of one machine: slots, profiles, the watchdog, and fork servers that stop, die or grow old."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable

import pytest

from strop.errors import MachineError, SessionLost
from strop.sandbox import IsolationLevel, RunOutcome, RunRequest, RunResult, SandboxConfig
from strop.sandbox.protocol import AnswerPair, PairVerdict, SessionLimits, VerifyRequest
from strop.sandbox.supervisor import fork_servers
from strop.sandbox.supervisor.fork_servers import BOOT, ENVIRONMENT, ForkServer, command, profile_of
from strop.sandbox.supervisor.node import Node
from strop.sandbox.supervisor.watchdog import Slots

SLEEP = RunRequest(code="import time; time.sleep(0.6); print('slept')")


def play(scene: Callable[[Node], Awaitable[None]], **settings: object) -> None:
    async def run() -> None:
        async with Node(SandboxConfig(**settings)) as node:
            await scene(node)

    asyncio.run(run())


async def answer(node: Node, request: RunRequest) -> RunResult:
    """As a front asks: what the node's own fault cost is asked once more."""
    try:
        return await node.run(request)
    except MachineError:
        return await node.run(request)


def forking_pid(server: ForkServer) -> int:
    """Of the process that forks: the only child of the one that was started."""
    with open(f"/proc/{server.pid}/task/{server.pid}/children") as children:
        return int(children.read())


def test_the_first_program_of_a_fork_server_sees_the_same_addresses_as_the_next_ones() -> None:
    async def play() -> None:
        async with Node(SandboxConfig(fork_servers=1)) as node:
            code = "class A: pass\nprint(A(), id(1.5 * 2), [id(bytes(size)) for size in range(0, 500, 16)])"
            texts = []
            for exit_code in (0, 3, 1, 0):  # the exit code of one program does not move the objects of the next one
                texts.append((await node.run(RunRequest(code=code))).text)
                await node.run(RunRequest(code=f"raise SystemExit({exit_code})"))
            assert set(texts) == {texts[0]}

    asyncio.run(play())


def test_a_fork_server_whose_supervisor_died_before_it_began_ends_at_once() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            boot = str(BOOT), "main"
            words = command(*boot, level=IsolationLevel.PROCESS, profile="bare", control=theirs.fileno(), supervisor=dead.pid)
            orphan = subprocess.Popen(words, env=ENVIRONMENT, pass_fds=(theirs.fileno(),), start_new_session=True)
        assert orphan.wait(timeout=10) == 1
        assert ours.recv(100) == b"", "it began to serve"


@pytest.mark.parametrize(
    ("code", "profile"),
    [
        ("print(1)", "bare"),
        ("import math, json", "bare"),
        ("import numpy as np", "numpy"),
        ("from numpy.linalg import det", "numpy"),
        ("if True:\n    import os, numpy", "numpy"),
        ("import numpy, sympy", "full"),
        ("from scipy import stats", "full"),
        ("# numpy is not imported\nprint('import')", "bare"),
    ],
)
def test_a_program_runs_where_its_imports_are_loaded(code: str, profile: str) -> None:
    assert profile_of(code) == profile


def test_a_module_of_the_profile_is_loaded_before_the_program_starts() -> None:
    async def scene(node: Node) -> None:
        code = "import sys\nprint('sympy' in sys.modules)\nif 0:\n    import sympy"
        assert (await node.run(RunRequest(code=code))).text == "True\n"
        assert (await node.run(RunRequest(code=code, profile="bare"))).text == "False\n"

    play(scene)


def test_slots_are_given_in_the_order_of_asking_and_a_sleeper_lends_its_own() -> None:
    async def scene() -> None:
        slots, order = Slots(num_busy=1, num_alive=2), []

        async def hold(name: str) -> None:
            await slots.acquire()
            order.append(name)

        holders = [asyncio.create_task(hold(name)) for name in "abc"]
        await asyncio.sleep(0)
        assert order == ["a"]
        slots.lend()  # a sleeps
        await asyncio.sleep(0)
        assert order == ["a", "b"]
        slots.lend()  # b sleeps as well; but no third may exist
        await asyncio.sleep(0)
        assert order == ["a", "b"]
        slots.take_back()
        slots.release()  # b ends
        await asyncio.sleep(0)
        assert order == ["a", "b", "c"]
        await asyncio.gather(*holders)

    asyncio.run(scene())


def test_a_cancelled_wait_for_a_slot_gives_it_to_the_next() -> None:
    async def scene() -> None:
        slots = Slots(num_busy=1, num_alive=1)
        await slots.acquire()
        first, second = asyncio.create_task(slots.acquire()), asyncio.create_task(slots.acquire())
        await asyncio.sleep(0)
        slots.release()
        first.cancel()  # it has the slot, and has not noticed yet
        await asyncio.wait({first, second}, timeout=1)
        assert first.cancelled()
        assert second.done()

    asyncio.run(scene())


def test_programs_that_sleep_do_not_keep_others_from_starting() -> None:
    async def scene(node: Node) -> None:
        started_at = time.monotonic()
        results = await asyncio.gather(*(node.run(SLEEP) for _ in range(12)))
        assert {result.text for result in results} == {"slept\n"}
        assert time.monotonic() - started_at < 4.0  # 12 * 0.6 s one after the other

    play(scene, max_running=1)


def test_all_processes_of_a_call_together_are_held_to_a_limit_of_memory() -> None:
    code = """
import os, time
held = bytearray(120 << 20)
for _ in range(6):
    if os.fork() == 0: break
for page in range(0, len(held), 4096): held[page] = os.getpid() % 251
time.sleep(60)
"""

    async def scene(node: Node) -> None:
        result = await node.run(RunRequest(code=code, memory_mib=160, wall_s=20.0))
        assert (result.outcome, result.reason) == (RunOutcome.KILLED, "memory")

    play(scene)


def test_the_peak_of_memory_and_the_time_on_the_cpu_are_reported() -> None:
    async def scene(node: Node) -> None:
        small = await node.run(RunRequest(code="print(1)"))
        large = await node.run(
            RunRequest(code="held = bytearray(b'1') * (100 << 20)\nfor _ in range(3_000_000): pass\nprint(1)")
        )
        assert large.peak_memory_bytes - small.peak_memory_bytes > 90 << 20
        assert large.timings.cpu_s > small.timings.cpu_s + 0.02

    play(scene)


def test_a_limit_of_cpu_time_is_a_timeout_with_its_own_reason() -> None:
    async def scene(node: Node) -> None:
        result = await node.run(RunRequest(code="while True: pass", cpu_s=1, wall_s=20.0))
        assert (result.outcome, result.reason) == (RunOutcome.TIMEOUT, "cpu")

    play(scene)


def test_a_stopped_fork_server_costs_no_call_its_answer() -> None:
    async def scene(node: Node) -> None:
        for server in node.pool("bare")._servers:
            os.kill(forking_pid(server), signal.SIGSTOP)
        requests = [RunRequest(code=f"print({number})", wall_s=0.5) for number in range(8)]
        results = await asyncio.wait_for(asyncio.gather(*(answer(node, request) for request in requests)), 30)
        assert [result.text for result in results] == [f"{number}\n" for number in range(8)]

    play(scene, fork_servers=1)


def test_a_stopped_fork_server_turns_no_answer_into_a_timeout() -> None:
    async def scene(node: Node) -> None:
        call = asyncio.create_task(answer(node, RunRequest(code="import time; time.sleep(0.3); print('in time')", wall_s=1.0)))
        await asyncio.sleep(0.15)
        for server in node.pool("bare")._servers:
            os.kill(forking_pid(server), signal.SIGSTOP)
        assert (await asyncio.wait_for(call, 30)).text == "in time\n"

    play(scene, fork_servers=1)


def test_a_loop_under_a_stopped_fork_server_still_ends_at_its_limit() -> None:
    async def scene(node: Node) -> None:
        call = asyncio.create_task(node.run(RunRequest(code="while True: pass", wall_s=0.6)))
        await asyncio.sleep(0.2)
        started_at = time.monotonic()
        for server in node.pool("bare")._servers:
            os.kill(forking_pid(server), signal.SIGSTOP)
        assert (await asyncio.wait_for(call, 30)).outcome is RunOutcome.TIMEOUT
        assert time.monotonic() - started_at < 1.5

    play(scene, fork_servers=1)


def test_a_stopped_fork_server_holds_no_verdict_up() -> None:
    async def scene(node: Node) -> None:
        asked = VerifyRequest(pairs=(AnswerPair(gold="1/2", answer="0.5"),), pair_wall_s=1.0)
        assert [verdict async for _, verdict in node.verify(asked)] == [PairVerdict.EQUAL]
        for server in node.pool("verify")._servers:
            os.kill(forking_pid(server), signal.SIGSTOP)
        async with asyncio.timeout(40):
            assert [verdict async for _, verdict in node.verify(asked)] == [PairVerdict.EQUAL]

    play(scene, fork_servers=1)


def test_a_fork_server_of_a_session_still_runs_programs() -> None:
    async def scene(node: Node) -> None:
        await node.open_session(SessionLimits(profile="bare"))
        texts = [(await node.run(RunRequest(code=f"print({number})"))).text for number in range(4)]
        assert texts == ["0\n", "1\n", "2\n", "3\n"]

    play(scene, fork_servers=1)


def test_a_cell_that_waits_for_a_slot_while_its_session_dies_keeps_nothing() -> None:
    async def scene(node: Node) -> None:
        session = await node.open_session(SessionLimits(profile="bare"))
        loop = RunRequest(code="while True: pass", profile="numpy", wall_s=0.6)
        holder = asyncio.create_task(node.run(loop))
        await asyncio.sleep(0.3)
        cell = asyncio.create_task(node.run(RunRequest(code="1", session=session)))
        await asyncio.sleep(0.1)
        os.kill(forking_pid(node._pools["bare"]._servers[0]), signal.SIGKILL)
        with pytest.raises(SessionLost):
            await cell
        assert (await holder).outcome is RunOutcome.TIMEOUT
        assert (await node.run(RunRequest(code="print(1)"))).text == "1\n"

    play(scene, max_running=1, fork_servers=1, warm=("bare", "numpy"))


def test_threads_of_a_program_fit_into_its_memory() -> None:
    code = """
import threading, time
threads = [threading.Thread(target=time.sleep, args=(0.1,)) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("all")
"""

    async def scene(node: Node) -> None:
        assert (await node.run(RunRequest(code=code))).text == "all\n"

    play(scene)


def test_what_a_program_says_of_its_start_moves_its_times_by_little() -> None:
    code = (
        "import sys, mmap, struct, time\ntime.sleep(0.6)\nframe = sys._getframe()\nwhile frame:\n"
        "    for held in list(frame.f_locals.values()):\n        if isinstance(held, mmap.mmap):\n"
        "            held[:8] = struct.pack('<d', time.monotonic() + 100); print('forged')\n    frame = frame.f_back"
    )

    async def scene(node: Node) -> None:
        result = await node.run(RunRequest(code=code))
        assert result.text.startswith("forged")
        assert result.timings.run_s > 0.3

    play(scene)


def test_fork_servers_are_renewed_while_calls_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers, "_RECYCLE_AFTER", 20)

    async def scene(node: Node) -> None:
        before = {server.pid for server in node.pool("bare")._servers}
        requests = [RunRequest(code=f"print({number})") for number in range(200)]
        results = await asyncio.gather(*map(node.run, requests))
        assert [result.text for result in results] == [f"{number}\n" for number in range(200)]
        assert not before & {server.pid for server in node.pool("bare")._servers}

    play(scene)


def test_a_level_that_was_asked_for_is_the_one_that_runs() -> None:
    async def scene(node: Node) -> None:
        assert (await node.run(RunRequest(code="1"))).level is IsolationLevel.STRICT

    play(scene, level=IsolationLevel.STRICT)


def test_what_was_asked_of_a_closed_node_is_our_fault() -> None:
    async def scene() -> None:
        node = Node()
        await node.close()
        with pytest.raises(MachineError, match="closed"):
            await node.run(RunRequest(code="1"))

    asyncio.run(scene())


HOLD_A_LOCK = """
import fcntl, os, time
file = open(os.__file__)
locked, tell = os.pipe()
if os.fork() == 0:
    for lock in (fcntl.lockf, fcntl.flock):
        try: lock(file, fcntl.LOCK_SH)
        except PermissionError: pass  # the filter refuses flock
    os.write(tell, b'x')
    memory = b'x' * (64 << 20)  # takes a while to free
    time.sleep(60)
os.read(locked, 1);
"""
FIND_A_LOCK = """
import fcntl, os, struct
file = open(os.__file__)
answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))
is_locked = struct.unpack_from('h', answer)[0] != fcntl.F_UNLCK
try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except PermissionError: pass
except BlockingIOError: is_locked = True
is_locked
"""


@pytest.mark.parametrize("level", [IsolationLevel.NAMESPACES, IsolationLevel.CONFINED, IsolationLevel.PROCESS])
def test_a_lock_on_a_shared_file_is_gone_with_its_program(level: IsolationLevel) -> None:
    async def scene(node: Node) -> None:
        for _ in range(8):
            assert (await node.run(RunRequest(code=HOLD_A_LOCK, profile="bare"))).outcome is RunOutcome.EMPTY
            assert (await node.run(RunRequest(code=FIND_A_LOCK, profile="bare"))).text == "False"

    play(scene, level=level, min_level=level, fork_servers=1)
