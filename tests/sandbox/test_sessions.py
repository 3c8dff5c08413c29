"""Sessions: cells that share their state, what stops a cell, and what ends a session."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from session_support import BARE, Notebook, Notebooks, below, eventually, num_descriptors, outcome_of, status_of

from strop.errors import MachineError, SessionLost, UserError
from strop.sandbox import IsolationLevel, LocalSandbox, RunOutcome, RunRequest, SandboxConfig
from strop.sandbox.protocol import SessionLimits
from strop.sandbox.supervisor import sessions
from strop.sandbox.supervisor.node import Node
from strop.sandbox.supervisor.process_status import pid_of
from strop.sandbox.supervisor.processes import Child


@pytest.fixture(scope="module")
def notebooks() -> Iterator[Notebooks]:
    notebooks = Notebooks()
    yield notebooks
    notebooks.close()


@pytest.fixture
def session(notebooks: Notebooks) -> Iterator[Notebook]:
    with notebooks.open() as session:
        yield session


def test_state_lasts_from_cell_to_cell(session: Notebook) -> None:
    assert outcome_of(session.run("x = 20")) == (RunOutcome.EMPTY, "")
    assert outcome_of(session.run("def double(n):\n    return 2 * n")) == (RunOutcome.EMPTY, "")
    assert outcome_of(session.run("double(x) + 2")) == (RunOutcome.ECHO, "42")
    assert outcome_of(session.run("print(double(x))\nx")) == (RunOutcome.STDOUT, "40\n")


def test_state_survives_errors_and_exits(session: Notebook) -> None:
    session.run("x = 1")
    assert session.run("x = 2\n1 / 0").outcome is RunOutcome.ERROR
    assert session.run("x = 3\nsyntax error").outcome is RunOutcome.ERROR
    assert outcome_of(session.run("x")) == (RunOutcome.ECHO, "2")
    stopped = session.run("import sys\nx = 4\nsys.exit(7)")
    assert (stopped.outcome, stopped.exit_code, stopped.text) == (RunOutcome.ERROR, 7, "The program exited with code 7.\n")
    assert outcome_of(session.run("sys.exit()")) == (RunOutcome.EMPTY, "")
    assert outcome_of(session.run("x")) == (RunOutcome.ECHO, "4")


def test_a_traceback_shows_the_lines_of_earlier_cells(session: Notebook) -> None:
    session.run("def divide(n):\n    return 1 / n\n")
    assert session.run("divide(0)").text == (
        "Traceback (most recent call last):\n"
        '  File "<cell 2>", line 1, in <module>\n'
        "    divide(0)\n"
        '  File "<cell 1>", line 2, in divide\n'
        "    return 1 / n\n"
        "           ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
    )


def test_a_cell_runs_once_also_when_the_session_is_forked(session: Notebook) -> None:
    session.run("count = 0")
    slow = session.run("import time\ncount += 1\nopen('count', 'a').write('x')\ntime.sleep(2)\ncount", wall_s=4.0)
    assert (slow.outcome, slow.text) == (RunOutcome.ECHO, "1")
    started_at = time.monotonic()
    with session.fork() as branch:
        assert time.monotonic() - started_at < 1.0  # the cell took two seconds
        for one in (session, branch):
            assert outcome_of(one.run("count, open('count').read()")) == (RunOutcome.ECHO, "(1, 'x')")


def test_each_cell_has_its_own_input(session: Notebook) -> None:
    assert session.run("print(input())", stdin="first\nrest").text == "first\n"
    assert session.run("print(input())", stdin="second").text == "second\n"
    assert "EOFError" in session.run("input()").text


def test_output_is_cut_for_each_cell_alone(notebooks: Notebooks) -> None:
    async def play() -> None:
        async with Node() as node:
            session = await node.open_session(BARE)
            long = await node.run(RunRequest(code="print('x' * 5000)", session=session, output_bytes=1000))
            assert "[... 4001 bytes left out ...]" in long.text
            assert (await node.run(RunRequest(code="print('y')", session=session, output_bytes=1000))).text == "y\n"

    asyncio.run(play())


def test_what_a_thread_prints_between_cells_comes_with_the_next_one(session: Notebook) -> None:
    session.run("import threading, time\nthreading.Timer(0.2, print, ['late']).start()")
    time.sleep(0.4)
    assert session.run("print('next')").text == "late\nnext\n"


def test_cells_of_one_session_run_in_turn(session: Notebook) -> None:
    session.run("import time\nseen = []")
    code = "seen.append('in')\ntime.sleep(0.05)\nseen.append('out')"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(session.run, [code] * 8))
    assert session.run("seen == ['in', 'out'] * 8").text == "True"


def test_the_same_cells_give_the_same_texts(notebooks: Notebooks) -> None:
    cells = [
        "import random, os\nrandom.random(), os.urandom(4).hex()",
        "object()",
        "class A: pass\nA()",
        "id(A), hash('text')",
        "import tempfile\nprint(sorted(os.listdir('/tmp')), os.getcwd(), os.getpid())",
        "1 / 0",
    ]
    texts = []
    for _ in range(3):
        with notebooks.open(SessionLimits(profile="bare", seed=5)) as session:
            texts.append([session.run(cell).text for cell in cells])
    assert texts[0] == texts[1] == texts[2]
    with notebooks.open(SessionLimits(profile="bare", seed=6)) as session:
        assert session.run(cells[0]).text != texts[0][0]


# What stops a cell, and what ends a session


def test_a_cell_over_its_limit_is_interrupted_and_the_state_survives(session: Notebook) -> None:
    session.run("x = 1")
    started_at = time.monotonic()
    result = session.run("print('begun')\nx = 2\nwhile True: pass", wall_s=0.5)
    assert time.monotonic() - started_at < 1.0
    assert outcome_of(result) == (RunOutcome.TIMEOUT, "begun\n")
    assert session.run("x").text == "2"


def test_an_interrupt_that_comes_late_does_not_hit_the_next_cell(session: Notebook) -> None:
    session.run("n = 0")
    for _ in range(30):  # some end just when they are interrupted
        session.run("import time\ntime.sleep(0.0995)", wall_s=0.1)
        assert session.run("n += 1\nn").outcome is RunOutcome.ECHO
    assert session.run("n").text == "30"


@pytest.mark.parametrize(
    "code",
    [
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)",
        "while True:\n    try:\n        for _ in range(10**9): pass\n    except BaseException: pass",
        "import itertools\nany(itertools.repeat(0))",
    ],
    ids=["handler", "catcher", "C code"],
)
def test_a_cell_that_cannot_be_interrupted_ends_its_session(session: Notebook, code: str) -> None:
    started_at = time.monotonic()
    assert session.run(code, wall_s=0.5).outcome is RunOutcome.TIMEOUT
    assert time.monotonic() - started_at < 1.0
    with pytest.raises(SessionLost, match=r"cell 1 was stopped \(timeout\) and did not end when it was interrupted"):
        session.run("1")


@pytest.mark.parametrize(
    ("code", "outcome", "text", "reason"),
    [
        (
            "import os\nprint('a', flush=True)\nos._exit(3)",
            RunOutcome.ERROR,
            "a\nThe program exited with code 3.\n",
            "exit code 3",
        ),
        ("import ctypes\nctypes.string_at(0)", RunOutcome.KILLED, "", "signal 11"),
    ],
    ids=["exit", "crash"],
)
def test_a_cell_that_ends_its_session_has_its_outcome(
    session: Notebook, code: str, outcome: RunOutcome, text: str, reason: str
) -> None:
    assert outcome_of(session.run(code)) == (outcome, text)
    with pytest.raises(SessionLost, match=rf"cell 1 ended it \({reason}\)"):
        session.run("1")
    with pytest.raises(SessionLost, match=reason):
        session.fork()


def test_a_flood_is_stopped_and_the_state_survives(session: Notebook) -> None:
    session.run("x = 1")
    flood = session.run("while True: print('x' * 1000)")
    assert (flood.outcome, flood.reason) == (RunOutcome.KILLED, "output")
    assert session.run("x").text == "1"


def test_a_session_over_its_memory_is_killed(notebooks: Notebooks) -> None:
    with notebooks.open(SessionLimits(profile="bare", memory_mib=64)) as session:
        assert "MemoryError" in session.run("x = bytearray(200 << 20)").text
        hog = "import os\nfor _ in range(4): os.fork()\nx = b'x' * (40 << 20)\nimport time\ntime.sleep(5)"
        result = session.run(hog)
        assert (result.outcome, result.reason) == (RunOutcome.KILLED, "memory")
        with pytest.raises(SessionLost, match=r"cell 2 was stopped \(memory\)"):
            session.run("1")


def test_a_session_that_computes_between_its_cells_is_ended(session: Notebook) -> None:
    session.run("import threading\ndef burn():\n    while True: pass\nthreading.Thread(target=burn, daemon=True).start()")

    assert eventually(lambda: session.is_lost, within_s=20.0)
    with pytest.raises(SessionLost, match="between its cells it computed for more than 5 s"):
        session.run("1")


def test_a_session_that_hides_its_line_is_lost_and_nobody_waits(session: Notebook) -> None:
    started_at = time.monotonic()
    result = session.run("import os\nos.closerange(3, 100)", wall_s=3.0)
    assert result.outcome in (RunOutcome.ERROR, RunOutcome.KILLED)
    assert time.monotonic() - started_at < 1.0
    with pytest.raises(SessionLost):
        session.run("1")


SAY = "import os, struct, sys, threading, time\ndef say(*words):\n    for word in words: os.write(4, word)\n"
FORGED = "[struct.pack(form, b'd', number, 0, b'v') + b'forged' for form in ('<cIBc', '<cQBc') for number in range(9)]"
OWN_END = "struct.pack('<c8sBc', b'd', sys._getframe(3).f_locals['nonce'], 0, b'v') + b'forged'"  # from its runner's own frame
BROKEN_OFF = r"was stopped \(policy\): its interpreter was busy after its end, or other code wrote to its line"


def test_nobody_says_that_a_later_cell_is_done(notebooks: Notebooks) -> None:
    with notebooks.open(BARE) as forger, notebooks.open(BARE) as neighbour, ThreadPoolExecutor(1) as threads:
        honest = threads.submit(neighbour.run, "import time\ntime.sleep(0.6)\n'honest'")
        forger.run(f"{SAY}threading.Timer(0.3, say, {FORGED}).start()")
        started_at = time.monotonic()
        result = forger.run("time.sleep(3)\n'never'", wall_s=1.0)
        assert (result.outcome, result.reason, result.text) == (RunOutcome.KILLED, "policy", "")
        assert time.monotonic() - started_at < 1.0
        with pytest.raises(SessionLost, match=f"cell 2 {BROKEN_OFF}"):
            forger.run("1")
        assert honest.result().text == "'honest'"


@pytest.mark.parametrize("words", [FORGED, r"(b'x', b'h' * 70_000, b'\xff' * 9)"])
def test_what_is_said_between_cells_is_not_heard(session: Notebook, words: str) -> None:
    session.run(f"{SAY}threading.Timer(0.1, say, {words}).start()")
    time.sleep(0.4)
    assert session.run("1 + 1").text == "2"
    assert session.run("1 + 2").text == "3"


def test_who_says_something_all_the_time_is_not_listened_to_for_long(session: Notebook) -> None:
    session.run(f"{SAY}def babble():\n    while True: say(b'x')")
    session.run("threading.Timer(0.1, babble).start()")
    time.sleep(0.3)
    result = session.run("time.sleep(60)", wall_s=30.0)
    assert (result.outcome, result.reason) == (RunOutcome.KILLED, "policy")
    assert result.timings.run_s < 1.0


@pytest.mark.parametrize(
    "later", ["while True: pass", "time.sleep(60)", "time.sleep(0.3)\n'again'"], ids=["computes", "sleeps", "says so again"]
)
def test_who_says_the_end_of_its_own_cell_does_not_go_on_after_it(session: Notebook, later: str) -> None:
    started_at = time.monotonic()
    result = session.run(f"{SAY}say({OWN_END})\n{later}", wall_s=30.0)
    assert (result.outcome, result.reason) == (RunOutcome.KILLED, "policy")
    assert time.monotonic() - started_at < 3.0
    with pytest.raises(SessionLost, match=f"cell 1 {BROKEN_OFF}"):
        session.run("1")


def test_a_session_whose_cell_something_else_took_from_the_line_is_ended(session: Notebook) -> None:
    session.run("import os, socket, threading\nline = socket.socket(fileno=os.dup(4))")
    session.run("threading.Thread(target=lambda: [line.recv(9) for _ in range(9)], daemon=True).start()")
    results = [session.run("1", wall_s=0.5)]
    while results[-1].text == "1" and len(results) < 9:  # the line may have been its own first
        results.append(session.run("1", wall_s=0.5))
    assert (results[-1].outcome, results[-1].reason) == (RunOutcome.KILLED, "policy")
    with pytest.raises(SessionLost, match=BROKEN_OFF):
        session.run("1")


def test_a_thread_that_computes_does_not_keep_the_next_cells_from_running(session: Notebook) -> None:
    session.run("import threading\ngoes_on = True\ndef burn():\n    while goes_on: pass\n")
    session.run("for _ in range(3): threading.Thread(target=burn).start()")
    for number in range(5):
        assert session.run(f"{number} + 1").text == str(number + 1)
    assert session.run("goes_on = False").outcome is RunOutcome.EMPTY


def test_processes_that_nobody_waits_for_count_as_well(session: Notebook) -> None:
    session.run(
        "import os, signal, threading, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "def burn():\n    while True:\n        if os.fork() == 0:\n            until = time.monotonic() + 0.25\n"
        "            while time.monotonic() < until: pass\n            os._exit(0)\n        time.sleep(0.125)\n"
        "threading.Thread(target=burn, daemon=True).start()"
    )
    assert eventually(lambda: session.is_lost, within_s=20.0)
    with pytest.raises(SessionLost, match="between its cells it computed for more than 5 s"):
        session.run("1")


def test_the_allowance_between_cells_does_not_begin_again_with_each_of_them(session: Notebook) -> None:
    session.run("import threading\ndef burn():\n    while True: pass\nthreading.Thread(target=burn, daemon=True).start()")
    for _ in range(10):
        time.sleep(1.2)
        if session.is_lost:
            break
        session.run("1")
    with pytest.raises(SessionLost, match="between its cells it computed for more than 5 s"):
        session.run("1")


def test_cells_without_input_use_up_no_descriptors(session: Notebook) -> None:
    lowest_free = "import os\nfree = os.dup(0)\nos.close(free)\nfree"
    before = session.run(lowest_free).text
    for _ in range(5):
        session.run("1")
    assert session.run(lowest_free).text == before


def test_a_cell_of_a_session_without_descriptors_says_so_and_the_session_goes_on(session: Notebook) -> None:
    session.run("import os\nheld = []\ntry:\n    while True: held.append(os.dup(0))\nexcept OSError: pass")
    starved = session.run("1")
    assert (starved.outcome, starved.exit_code) == (RunOutcome.ERROR, 1)
    assert "left no free file descriptor" in starved.text


def test_the_end_of_a_session_that_dies_as_it_starts_is_said_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with Node() as node:
            await node.close_session(await node.open_session(BARE))
            await asyncio.sleep(0.3)
            before = num_descriptors()
            birth = sessions._birth

            async def die(child: Child, line: socket.socket, undo: contextlib.ExitStack) -> int:
                listener = await birth(child, line, undo)
                os.kill(pid_of(child.pidfd), signal.SIGKILL)
                assert eventually(lambda: child.is_dead)
                return listener

            monkeypatch.setattr(sessions, "_birth", die)
            with pytest.raises(MachineError, match="a session did not start: its process ended"):
                await node.open_session(BARE)
            assert await asyncio.to_thread(eventually, lambda: num_descriptors() <= before)
            assert len(node._sessions) == 0

    asyncio.run(play())


@pytest.mark.parametrize(
    ("limits", "fault"),
    [
        ({"memory_mib": 0}, "memory_mib is 0"),
        ({"memory_mib": 1 << 50}, "memory_mib is"),
        ({"max_processes": 0}, "max_processes is 0"),
        ({"max_processes": 1 << 32}, "max_processes is"),
        ({"file_mib": -1}, "file_mib is -1"),
        ({"file_mib": 1 << 32}, "file_mib is"),
        ({"lease_s": 0.0}, r"lease_s is 0\.0"),
        ({"lease_s": float("nan")}, "lease_s is nan"),
        ({"lease_s": float("inf")}, "lease_s is inf"),
        ({"profile": "none"}, "there is no profile 'none'"),
    ],
)
def test_limits_that_no_session_can_have_are_refused(limits: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        asyncio.run(LocalSandbox().open_session(replace(BARE, **limits)))


def test_without_descriptors_every_failure_says_so_and_sessions_go_on() -> None:
    async def play() -> None:
        async with Node() as node:
            faults: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
            session = await node.open_session(BARE)
            await node.run(RunRequest(code="x = 1", session=session))
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            for num_left in range(12):
                held = []
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
                try:
                    with contextlib.suppress(OSError):
                        while True:
                            held.append(os.dup(0))
                    for _ in range(min(num_left, len(held))):
                        os.close(held.pop())
                    for attempt in (
                        node.run(RunRequest(code="x", session=session)),
                        node.open_session(BARE),
                        node.fork_session(session),
                    ):
                        with contextlib.suppress(MachineError, SessionLost):
                            await asyncio.wait_for(attempt, 20.0)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                    for one in held:
                        os.close(one)
            assert faults == []
            fresh = await node.open_session(BARE)
            assert (await node.run(RunRequest(code="1 + 1", session=fresh))).text == "2"

    asyncio.run(play())


def test_a_lease_that_runs_out_ends_the_session(notebooks: Notebooks) -> None:
    session = notebooks.open(SessionLimits(profile="bare", lease_s=0.4))
    pid = session.interpreter.pid
    for _ in range(3):  # each cell begins it again, and it does not run out while one runs
        time.sleep(0.2)
        assert session.run("import time\ntime.sleep(0.2)").outcome is RunOutcome.EMPTY
    assert eventually(lambda: not status_of(pid))
    with pytest.raises(SessionLost, match=r"its lease of 0\.4 s ran out"):
        session.run("1")


def test_a_closed_session_is_gone(session: Notebook) -> None:
    pid = session.interpreter.pid
    session.close()
    session.close()
    assert eventually(lambda: not status_of(pid))
    with pytest.raises(SessionLost, match="it was closed"):
        session.run("1")


def test_closing_a_session_ends_its_running_cell(session: Notebook) -> None:
    with ThreadPoolExecutor(1) as threads:
        cell = threads.submit(session.run, "import time\ntime.sleep(60)", wall_s=30.0)
        time.sleep(0.3)
        session.close()
        with pytest.raises(SessionLost, match="it was closed"):
            cell.result(timeout=2.0)


def test_no_session_has_an_unknown_name(notebooks: Notebooks) -> None:
    with pytest.raises(SessionLost, match="has no session 'nobody'"):
        notebooks.wait(notebooks.node.run(RunRequest(code="1", session="nobody")))


def test_the_death_of_the_fork_server_loses_the_session_and_runs_nothing_again() -> None:
    async def play() -> None:
        async with Node(SandboxConfig(fork_servers=1)) as node:
            session = await node.open_session(BARE)
            branch = await node.fork_session(session)
            cells = [
                asyncio.create_task(node.run(RunRequest(code="import time\ntime.sleep(30)", session=name, wall_s=60.0)))
                for name in (session, branch)
            ]
            await asyncio.sleep(0.3)
            (server,) = node.pool("bare")._servers
            os.kill(server.pid, signal.SIGKILL)
            for cell in cells:
                with pytest.raises(SessionLost, match="its fork server died"):
                    await asyncio.wait_for(cell, 2.0)
            assert (await node.run(RunRequest(code="print(1)"))).text == "1\n"

    asyncio.run(play())


@pytest.mark.parametrize("level", [IsolationLevel.NAMESPACES, IsolationLevel.CONFINED, IsolationLevel.PROCESS])
def test_nothing_outlives_its_fork_server(level: IsolationLevel) -> None:
    async def play() -> None:
        async with Node(SandboxConfig(fork_servers=1, level=level, min_level=level)) as node:
            await node.open_session(BARE)
            (server,) = node.pool("bare")._servers
            pids = below(server.pid)
            assert len(pids) >= 2  # the session, and a spare child
            os.kill(server.pid, signal.SIGKILL)
            assert await asyncio.to_thread(eventually, lambda: not any(status_of(pid) for pid in pids))

    asyncio.run(play())


def test_a_node_keeps_so_many_sessions_and_says_so_beyond() -> None:
    async def play() -> None:
        async with Node(SandboxConfig(max_sessions=2)) as node:
            first, _ = [await node.open_session(BARE) for _ in range(2)]
            with pytest.raises(MachineError, match="has 2 sessions, which is its limit"):
                await node.open_session(BARE)
            with pytest.raises(MachineError, match="has 2 sessions"):
                await node.fork_session(first)
            await node.close_session(first)
            await node.open_session(BARE)

    asyncio.run(play())


def test_fifty_sessions_at_once_never_mix(notebooks: Notebooks) -> None:
    with ThreadPoolExecutor(50) as threads:
        sessions = list(threads.map(lambda _: notebooks.open(BARE), range(50)))
        try:
            for turn in range(3):
                texts = threads.map(
                    lambda at: at[1].run(f"total = globals().get('total', 0) + {at[0]}\ntotal, input()", stdin=str(at[0])).text,
                    enumerate(sessions),
                )
                assert list(texts) == [f"({number * (turn + 1)}, '{number}')" for number in range(50)]
        finally:
            list(threads.map(Notebook.close, sessions))


def test_a_cancelled_cell_is_stopped_and_the_next_one_runs() -> None:
    async def play() -> None:
        async with Node() as node:
            session = await node.open_session(BARE)
            cell = asyncio.create_task(node.run(RunRequest(code="x = 1\nwhile True: pass", session=session, wall_s=60.0)))
            await asyncio.sleep(0.3)
            cell.cancel()
            assert (await asyncio.wait_for(node.run(RunRequest(code="x", session=session)), 2.0)).text == "1"

    asyncio.run(play())


def test_a_session_holds_no_slot_between_its_cells() -> None:
    async def play() -> None:
        async with Node(SandboxConfig(max_running=1, max_alive=1)) as node:
            for _ in range(3):
                await node.run(RunRequest(code="1", session=await node.open_session(BARE)))
            assert (await asyncio.wait_for(node.run(RunRequest(code="print(1)")), 2.0)).text == "1\n"

    asyncio.run(play())


@pytest.mark.parametrize("level", [IsolationLevel.CONFINED, IsolationLevel.PROCESS])
def test_without_namespaces_sessions_work_and_a_fork_is_refused(level: IsolationLevel) -> None:
    async def play() -> None:
        async with Node(SandboxConfig(level=level, min_level=level)) as node:
            session = await node.open_session(BARE)
            await node.run(RunRequest(code="x = 1\nopen('file', 'w').write('text')", session=session))
            assert (await node.run(RunRequest(code="x, open('file').read()", session=session))).text == "(1, 'text')"
            with pytest.raises(UserError, match=f"can be forked at level L2 or above.*L{level.rank}"):
                await node.fork_session(session)
            assert (
                await node.run(RunRequest(code="while True: pass", session=session, wall_s=0.3))
            ).outcome is RunOutcome.TIMEOUT
            assert (await node.run(RunRequest(code="x", session=session))).text == "1"

    asyncio.run(play())
