"""Copies of sessions: they have the state of their origin and share nothing with it, whatever a program does."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from session_support import (
    BARE,
    Notebook,
    Notebooks,
    below,
    eventually,
    mounts_below,
    num_descriptors,
    num_mounts_of,
    privileged_below,
    status_of,
)

from strop.errors import MachineError, SessionLost, UserError
from strop.sandbox import IsolationLevel, RunOutcome, RunRequest, SandboxConfig
from strop.sandbox.protocol import SessionLimits
from strop.sandbox.supervisor.node import Node

FORK_FLAGS = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | signal.SIGCHLD  # user, pid, mount, ipc
ASK_FOR_NAMESPACES = f"""
import ctypes, os, threading
libc = ctypes.CDLL(None, use_errno=True)
def ask(*call):
    ctypes.set_errno(0)
    return libc.syscall(*call), ctypes.get_errno()
CLONE, UNSHARE, MOUNT, FLAGS = {"56, 272, 165" if os.uname().machine == "x86_64" else "220, 97, 40"}, {FORK_FLAGS}
"""


@pytest.fixture(scope="module")
def notebooks() -> Iterator[Notebooks]:
    notebooks = Notebooks()
    yield notebooks
    notebooks.close()


@pytest.fixture
def session(notebooks: Notebooks) -> Iterator[Notebook]:
    with notebooks.open() as session:
        yield session


def test_copies_have_the_state_of_their_origin_and_share_nothing_after(session: Notebook) -> None:
    session.run("x = ['common']\nopen('common', 'w').write('common')")
    with session.fork() as branch:
        for one, name in ((session, "origin"), (branch, "branch")):
            one.run(f"x.append('{name}')\nopen('{name}', 'w').write('')\nopen('common', 'a').write(' {name}')")
        for one, name in ((session, "origin"), (branch, "branch")):
            files = sorted(["common", name])
            looked = one.run("import os\nprint(x, sorted(os.listdir()), open('common').read(), os.getpid())")
            assert looked.text == f"['common', '{name}'] {files} common {name} 1\n"


def test_random_numbers_go_on_from_the_same_state_in_both(session: Notebook) -> None:
    session.run("import random\nrandom.random()")
    with session.fork() as branch:
        code = "random.random(), os.urandom(4)"
        assert session.run(f"import os\n{code}").text == branch.run(f"import os\n{code}").text
        assert session.run("random.random()").text != "0.0"


@pytest.mark.parametrize("is_origin_killed", [True, False])
def test_the_end_of_one_copy_leaves_the_other_alone(session: Notebook, is_origin_killed: bool) -> None:
    session.run("x = 5")
    with session.fork() as branch:
        killed, other = (session, branch) if is_origin_killed else (branch, session)
        os.kill(killed.interpreter.pid, signal.SIGKILL)
        assert eventually(lambda: killed.is_lost)
        with pytest.raises(SessionLost, match=r"ended between two cells \(signal 9\)"):
            killed.run("x")
        assert other.run("x").text == "5"
        with other.fork() as third:
            assert third.run("import os\nx + 1\nos._exit(4)").exit_code == 4
            assert other.run("x").text == "5"


def test_a_fork_bomb_in_one_copy_does_not_starve_the_other(session: Notebook) -> None:
    session.run("import os, time")
    with session.fork() as branch, ThreadPoolExecutor(1) as threads:
        bomb = threads.submit(branch.run, "while True:\n    try: os.fork()\n    except OSError: pass", wall_s=2.0)
        time.sleep(0.5)
        assert len(below(branch.interpreter.pid)) < 32
        count = "n = 0\nwhile n < 20:\n    if os.fork() == 0:\n        time.sleep(1)\n        os._exit(0)\n    n += 1\nn"
        assert session.run(count, wall_s=10.0).text == "20"
        bomb.result()


def test_copies_of_copies_of_copies(session: Notebook) -> None:
    session.run("path = 'a'")
    branches = [session]
    try:
        for letter in "bcd":
            branches.append(branches[-1].fork())
            branches[-1].run(f"path += '{letter}'\nopen(path, 'w').close()")
        for branch, path in zip(branches, ["a", "ab", "abc", "abcd"], strict=True):
            files = [path[: end + 1] for end in range(1, len(path))]
            assert branch.run("import os\nprint(path, sorted(os.listdir()), os.getpid())").text == f"{path} {files} 1\n"
        branches[1].close()
        branches[0].close()
        assert branches[3].run("path").text == "'abcd'"
        assert branches[2].run("path").text == "'abc'"
    finally:
        for branch in branches:
            branch.close()


def test_a_line_of_copies_has_an_end_that_is_said(session: Notebook) -> None:
    session.run("n = 0")
    for _ in range(24):
        session.fork().close()
        session.run("n += 1")
    assert session.run("n").text == "24"
    with pytest.raises(UserError, match="24 deep"):
        session.fork()
    assert session.run("n").text == "24"


def test_files_below_tmp_are_copied_with_links_modes_and_the_working_directory(session: Notebook) -> None:
    session.run(
        "import os\nopen('file', 'w').write('text')\nos.symlink('file', 'link')\nos.mkfifo('pipe')\n"
        "os.makedirs('deep/er')\nos.chmod('deep/er', 0o500)\nos.utime('file', (5, 6))\nos.chdir('deep')"
    )
    with session.fork() as branch:
        for one, name in ((session, "1"), (branch, "2")):
            one.run(f"open('../file', 'a').write('{name}')\nos.utime('../file', (5, 6))")
        for one, name in ((session, "1"), (branch, "2")):
            looked = one.run(
                "print(open('../link').read(), int(os.stat('../file').st_mtime), oct(os.stat('er').st_mode), os.getcwd(),"
                " sorted(os.listdir('..')))"
            )
            assert looked.text == f"text{name} 6 0o40500 /tmp/work/deep ['deep', 'file', 'link']\n"


@pytest.mark.parametrize(
    ("hold", "release", "reason"),
    [
        ("import os\nkept = open('kept', 'w')", "kept.close()", "holds '/tmp/work/kept' open"),
        ("import os\nends = os.pipe()", "for end in ends: os.close(end)", r"holds 'pipe:\[\d+\]' open"),
        ("import mmap\nkept = mmap.mmap(-1, 4096)", "kept.close()", "holds shared memory"),
        (
            "import mmap\nwith open('kept', 'w+b') as file:\n    file.write(bytes(4096))\n    file.flush()\n"
            "    kept = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)",
            "kept.close()",
            "holds '/tmp/work/kept' open",  # mmap keeps a descriptor of its own
        ),
        (
            "import threading\nend = threading.Event()\nthread = threading.Thread(target=end.wait)\nthread.start()",
            "end.set()\nthread.join()",
            "runs threads",
        ),
        ("import subprocess\nchild = subprocess.Popen(['sleep', '60'])", "child.kill()\nchild.wait()", "runs child processes"),
    ],
    ids=["file", "pipe", "memory", "mapped file", "thread", "process"],
)
def test_a_session_that_cannot_be_forked_says_why_and_goes_on(session: Notebook, hold: str, release: str, reason: str) -> None:
    session.run(f"x = 1\n{hold}")
    with pytest.raises(MachineError, match=reason):
        session.fork()
    assert session.run(f"{release}\nx").text == "1"
    with session.fork() as branch:
        assert branch.run("x").text == "1"


def test_limits_hold_in_a_copy(notebooks: Notebooks) -> None:
    with notebooks.open(SessionLimits(profile="bare", memory_mib=64)) as session:
        session.run("import os, time")
        with session.fork() as branch:
            assert branch.run("while True: pass", wall_s=0.3).outcome is RunOutcome.TIMEOUT
            assert "MemoryError" in branch.run("x = bytearray(200 << 20)").text
            assert "PermissionError" in branch.run("open('/usr/new', 'w')").text + branch.run("open('/new', 'w')").text or (
                "Read-only file system" in branch.run("open('/usr/new', 'w')").text
            )
            assert "OSError" in branch.run("with open('big', 'wb') as file: file.write(bytes(20 << 20))").text
            hog = branch.run("for _ in range(4): os.fork()\nx = b'x' * (40 << 20)\ntime.sleep(5)")
            assert (hog.outcome, hog.reason) == (RunOutcome.KILLED, "memory")
        assert session.run("1").text == "1"


def test_at_the_strict_level_a_copy_has_every_namespace_of_its_own() -> None:
    async def play() -> None:
        async with Node(SandboxConfig(level=IsolationLevel.STRICT)) as node:
            session = await node.open_session(BARE)
            await node.run(RunRequest(code="x = 1", session=session))
            branch = await node.fork_session(session)
            pids = [node._sessions._sessions[name].interpreter.pid for name in (session, branch)]
            for kind in ("pid", "mnt", "ipc", "user", "net", "uts"):
                assert len({os.readlink(f"/proc/{pid}/ns/{kind}") for pid in (*pids, os.getpid())}) == 3, kind
            for name in (session, branch):
                assert (await node.run(RunRequest(code="x", session=name))).text == "1"

    asyncio.run(play())


def test_a_fork_waits_for_the_cell_that_runs(session: Notebook) -> None:
    with ThreadPoolExecutor(1) as threads:
        cell = threads.submit(session.run, "import time\ntime.sleep(0.5)\nx = 1")
        time.sleep(0.2)
        with session.fork() as branch:
            assert branch.run("x").text == "1"
        cell.result()


def test_copies_of_one_session_are_forked_at_once(session: Notebook) -> None:
    session.run("x = 1")
    with session.fork() as branch, ThreadPoolExecutor(4) as threads:
        copies = list(threads.map(Notebook.fork, [session, branch, session, branch]))
        for one in [session, branch, *copies]:
            assert one.run("x += 1\nx").text == "2"
            one.close()


def test_a_fork_that_the_session_has_no_process_left_for_leaves_it_alone(session: Notebook) -> None:
    session.run("import os, time\ntry:\n    while os.fork(): pass\n    os._exit(0)\nexcept OSError: x = 1\ntime.sleep(0.2)")
    with pytest.raises(MachineError, match="Resource temporarily unavailable"):  # zombies count
        session.fork()
    assert session.run("x").text == "1"


# Theft


def test_who_asks_for_namespaces_or_mounts_gets_nothing(session: Notebook) -> None:
    session.run(ASK_FOR_NAMESPACES)
    for call in ("CLONE, FLAGS, 0, 0, 0, 0", "UNSHARE, FLAGS & ~0xFF", "MOUNT, b'none', b'/tmp', b'tmpfs', 0, 0"):
        assert session.run(f"ask({call})").text == "(-1, 1)"
    with session.fork() as branch:
        for one in (session, branch):
            assert one.run("ask(CLONE, FLAGS, 0, 0, 0, 0), ask(UNSHARE, FLAGS & ~0xFF)").text == "((-1, 1), (-1, 1))"
        assert not privileged_below(os.getpid())


@pytest.mark.parametrize("asker", ["thread", "process"])
def test_who_races_an_ordered_fork_gets_nothing(session: Notebook, asker: str) -> None:
    session.run(ASK_FOR_NAMESPACES)
    session.run(
        "def steal():\n    while True:\n        if ask(CLONE, FLAGS, 0, 0, 0, 0)[0] == 0:\n"
        "            for fs in (b'tmpfs', b'proc'): libc.mount(b'none', b'/tmp', fs, 0, None)\n"
        "            libc.setuid(0)\n            import time\n            while True: time.sleep(1)\n"
    )
    if asker == "thread":
        session.run("for _ in range(3): threading.Thread(target=steal, daemon=True).start()")
    else:
        session.run("for _ in range(3):\n    if os.fork() == 0: steal()")
    num_mounts = num_mounts_of(session.interpreter.pid)
    branches = []
    for _ in range(5):
        try:
            branches.append(session.fork())
        except (MachineError, SessionLost):
            continue
        finally:
            assert eventually(lambda: not privileged_below(os.getpid())), "a thief kept capabilities"
    for age, one in enumerate([*branches, session], start=1):
        assert one.run("1 + 1", wall_s=2.0).text == "2"
        for pid in [one.interpreter.pid, *below(one.interpreter.pid)]:
            assert num_mounts_of(pid) == num_mounts + min(age, len(branches))  # a /tmp for each fork that it went through
            assert not int(status_of(pid)["CapPrm"], 16)
    for branch in branches:
        branch.close()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("inside('kernel').drop_capabilities = lambda: None", "a copy kept capabilities"),
        ("os.register_at_fork(after_in_child=lambda: kept.append(os.pipe()))", "a copy holds 'pipe"),
        ("inside('cells').os.close = lambda _: None", "a copy holds 'socket"),
        ("os.register_at_fork(after_in_child=lambda: kept.append(mmap.mmap(-1, 4096)))", "a copy holds shared memory"),
        ("inside('cells').os.chdir = lambda _: None", "a copy stayed in a directory of its origin"),
        ("inside('cells').kernel.drop_capabilities = lambda: os.fork() or os._exit(0)", "a copy"),
        ("inside('cells')._clone = lambda flags: os.fork()", "could not be forked"),
        ("inside('cells')._copy_tree = None", "could not be forked"),
    ],
    ids=["capabilities", "pipe", "line of its origin", "memory", "directory", "process", "no clone", "broken"],
)
def test_a_copy_that_shares_something_is_refused(session: Notebook, change: str, fault: str) -> None:
    session.run("import mmap, os, sys\nkept, x = [], 1\ndef inside(name): return sys.modules[f'strop_inside.{name}']")
    session.run(change)
    with pytest.raises((MachineError, SessionLost), match=fault):
        session.fork()
    assert eventually(lambda: not privileged_below(os.getpid()))
    assert session.run("x").text == "1"  # the session goes on


def test_nobody_raises_the_limit_of_processes_that_copies_have_room_for(session: Notebook) -> None:
    session.run(ASK_FOR_NAMESPACES + "from resource import *")
    with session.fork() as branch:
        for one in (session, branch):
            assert one.run("getrlimit(RLIMIT_NPROC)[0]").text == "32"
            assert one.run("setrlimit(RLIMIT_NPROC, (64, getrlimit(RLIMIT_NPROC)[1]))").outcome is RunOutcome.ERROR
            limits = "(ctypes.c_uint64 * 2)(64, 64)"
            assert one.run(f"ask(302 if CLONE == 56 else 261, 0, 6, {limits}, None)").text == "(-1, 1)"
            assert one.run(f"ask(160 if CLONE == 56 else 164, 6, {limits})").text == "(-1, 1)"


def test_a_session_that_hides_its_memory_is_not_forked_and_goes_on(session: Notebook) -> None:
    session.run("import ctypes\nx = 1\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)")  # PR_SET_DUMPABLE
    with pytest.raises(MachineError, match="could not be forked"):
        session.fork()
    assert session.run("x").text == "1"


def test_a_session_that_does_not_become_a_stem_is_killed_with_its_copies(session: Notebook) -> None:
    session.run("import sys\ndef stay():\n    while True: pass\nsys.modules['strop_inside.cells']._become_stem = stay")
    pid, num_held = session.interpreter.pid, num_descriptors()
    with pytest.raises(SessionLost, match="did not free its memory"):
        session.fork()
    with pytest.raises(SessionLost, match="did not free its memory"):
        session.run("1")
    assert eventually(lambda: not status_of(pid))
    assert eventually(lambda: num_descriptors() < num_held)  # also none of the copies is left


# What is left


def test_nothing_is_left_of_sessions_and_copies() -> None:
    async def play() -> None:
        async with Node() as node:
            warm = await node.open_session(BARE)
            await node.close_session(await node.fork_session(warm))  # starts the helper
            await node.close_session(warm)
            await asyncio.sleep(0.5)
            gc.collect()  # descriptors that earlier tests left
            before = num_descriptors(), len(below(os.getpid())), mounts_below(os.getpid())
            for _ in range(3):
                names = [await node.open_session(BARE)]
                for _ in range(3):
                    names.append(await node.fork_session(names[-1]))
                await asyncio.gather(*(node.run(RunRequest(code="open('file', 'w')", session=name)) for name in names))
                await node.run(RunRequest(code="import os\nos._exit(1)", session=names[1]))
                for name in names:
                    await node.close_session(name)
            for _ in range(200):
                after = num_descriptors(), len(below(os.getpid())), mounts_below(os.getpid())
                if after == before:
                    return
                await asyncio.sleep(0.02)
            assert after == before

    asyncio.run(play())


def test_a_fork_that_is_cancelled_leaves_the_session_as_it_was() -> None:
    async def play() -> None:
        async with Node() as node:
            session = await node.open_session(BARE)
            await node.run(RunRequest(code="x = 1", session=session))
            await node.close_session(await node.fork_session(session))
            await asyncio.sleep(0.5)
            gc.collect()  # descriptors that earlier tests left
            before = num_descriptors(), len(below(os.getpid()))
            delays_ms = (0, 1, 2, 4, 6, 8)
            for after_ms in delays_ms:
                fork = asyncio.create_task(node.fork_session(session))
                await asyncio.sleep(after_ms / 1000)
                fork.cancel()
                (branch,) = await asyncio.gather(fork, return_exceptions=True)
                if isinstance(branch, str):  # too fast to be cancelled
                    await node.close_session(branch)
                assert (await node.run(RunRequest(code="x", session=session, wall_s=30.0))).text == "1"

            def is_tidy() -> bool:
                """Each fork that began leaves a stem: one process, and six descriptors of it."""
                num_new = len(below(os.getpid())) - before[1]
                return num_new <= len(delays_ms) and num_descriptors() <= before[0] + 6 * len(delays_ms)

            assert await asyncio.to_thread(eventually, is_tidy, within_s=20.0)
            assert len(node._sessions) == 1

    asyncio.run(play())


# As another user


AS_ANOTHER_USER = r"""
import asyncio
from strop.sandbox import RunRequest, SandboxConfig
from strop.sandbox.supervisor.node import Node
from strop.sandbox.protocol import IsolationLevel, SessionLimits

BOMB = "n = 0\ntry:\n    while os.fork(): n += 1\n    time.sleep(9)\nexcept OSError: pass\nn"

async def main():
    async with Node(SandboxConfig(min_level=IsolationLevel.NAMESPACES)) as node:
        async def text(session, code):
            return (await node.run(RunRequest(code=code, session=session))).text
        first = await node.open_session(SessionLimits(profile="bare"))
        await text(first, "import os, time\nx = ['common']\nopen('file', 'w').write('common')")
        second = await node.fork_session(first)
        third = await node.fork_session(second)
        for name, session in (("first", first), ("second", second), ("third", third)):
            await text(session, f"x.append('{name}')\nopen('file', 'a').write(' {name}')")
        for session in (first, second, third):
            print(await text(session, "x, open('file').read(), os.getpid(), os.getuid()"), await text(session, BOMB))

asyncio.run(main())
"""


def test_another_user_than_root_forks_sessions_as_well() -> None:
    container = str(Path(__file__).with_name("container.py"))
    done = subprocess.run(
        [sys.executable, container, "--allow-namespaces", "--unprivileged", sys.executable, "-c", AS_ANOTHER_USER],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == [
        f"(['common', '{name}'], 'common {name}', 1, 1000) 31" for name in ("first", "second", "third")
    ], done.stderr
