"""Sessions: cells that share their state, what stops a cell, and what ends a session."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from session_support import BARE, Notebook, Notebooks, below, eventually, outcome_of, status_of

from strop.errors import MachineError, SessionLost, UserError
from strop.sandbox import IsolationLevel, RunOutcome, RunRequest, SandboxConfig
from strop.sandbox.node.node import Node
from strop.sandbox.protocol import SessionLimits


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
    with pytest.raises(SessionLost, match="between two cells it computed for more than 5 s"):
        session.run("1")


def test_a_session_that_hides_its_line_is_lost_and_nobody_waits(session: Notebook) -> None:
    started_at = time.monotonic()
    result = session.run("import os\nos.closerange(3, 100)", wall_s=3.0)
    assert result.outcome in (RunOutcome.ERROR, RunOutcome.KILLED)
    assert time.monotonic() - started_at < 1.0
    with pytest.raises(SessionLost):
        session.run("1")


def test_forged_words_end_only_the_forgers_own_cell(notebooks: Notebooks) -> None:
    forge = (
        "import socket, struct, time\n"
        "line = socket.socket(fileno=4)\n"
        "for number in range(1, 40): line.send(struct.pack('<cIBc', b'd', number, 0, b'v') + b'forged')\n"
        "for word in (b'', b'x', b'h' * 70_000, b'\\xff' * 9): line.send(word) if word else None\n"
        "time.sleep(0.3)\nline.detach()"
    )
    with notebooks.open(BARE) as forger, notebooks.open(BARE) as neighbour:
        with ThreadPoolExecutor(2) as threads:
            forged, honest = (
                threads.submit(forger.run, forge),
                threads.submit(neighbour.run, "import time\ntime.sleep(0.2)\n'honest'"),
            )
            assert honest.result().text == "'honest'"
            assert forged.result().text == "forged"
        for _ in range(3):  # whatever it said in advance, every cell of it ends, and the neighbour's are its own
            try:
                assert not forger.run("1", wall_s=1.0).outcome.is_ours
            except SessionLost:
                break
        assert neighbour.run("2").text == "2"


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
        async with Node(SandboxConfig(zygotes=1)) as node:
            session = await node.open_session(BARE)
            branch = await node.fork_session(session)
            cells = [
                asyncio.create_task(node.run(RunRequest(code="import time\ntime.sleep(30)", session=name, wall_s=60.0)))
                for name in (session, branch)
            ]
            await asyncio.sleep(0.3)
            (zygote,) = node._pool("bare")._zygotes
            os.kill(zygote.pid, signal.SIGKILL)
            for cell in cells:
                with pytest.raises(SessionLost, match="its fork server died"):
                    await asyncio.wait_for(cell, 2.0)
            assert (await node.run(RunRequest(code="print(1)"))).text == "1\n"

    asyncio.run(play())


@pytest.mark.parametrize("level", [IsolationLevel.NAMESPACES, IsolationLevel.CONFINED, IsolationLevel.PROCESS])
def test_nothing_outlives_its_fork_server(level: IsolationLevel) -> None:
    async def play() -> None:
        async with Node(SandboxConfig(zygotes=1, level=level, min_level=level)) as node:
            await node.open_session(BARE)
            (zygote,) = node._pool("bare")._zygotes
            pids = below(zygote.pid)
            assert len(pids) >= 2  # the session, and a spare child
            os.kill(zygote.pid, signal.SIGKILL)
            assert await asyncio.to_thread(eventually, lambda: not any(status_of(pid) for pid in pids))

    asyncio.run(play())


def test_a_node_keeps_so_many_sessions_and_says_so_beyond() -> None:
    async def play() -> None:
        async with Node(SandboxConfig(max_sessions=2)) as node:
            first, _ = [await node.open_session(BARE) for _ in range(2)]
            with pytest.raises(MachineError, match="has 2 sessions, as many as it keeps at once"):
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
