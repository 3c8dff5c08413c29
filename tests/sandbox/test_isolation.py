"""What a program may not do to others, looked at from outside it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from strop.sandbox import RunOutcome, Sandbox

IGNORE_ALL_SIGNALS = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
"""


def processes_named(mark: str) -> list[int]:
    """Host pids whose command name is `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == mark:
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "9 ** 9 ** 9",
        "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
        IGNORE_ALL_SIGNALS + "while True: pass",
        "while True:\n    try:\n        while True: pass\n    finally: continue",
        "import os; os.read(os.pipe()[0], 1)",
    ],
)
def test_a_program_that_does_not_end_is_stopped_at_its_limit(box: Sandbox, code: str) -> None:
    started_at = time.perf_counter()
    result = box.run(code, wall_s=0.4)
    assert result.outcome is RunOutcome.TIMEOUT
    assert time.perf_counter() - started_at < 0.9


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print('working')\nwhile True: pass", "working\n"),
        ("print('half a line', end='')\nwhile True: pass", "half a line"),
        ("import sys, time\nsys.stderr.write('a')\nsys.stdout.write('b')\ntime.sleep(60)", "ba"),
        ("print('one', 'é', end=' ')\nfor _ in range(10**6): sum(range(10**4))", "one é "),
    ],
)
def test_what_was_printed_before_a_timeout_is_returned(box: Sandbox, code: str, text: str) -> None:
    result = box.run(code, wall_s=0.3)
    assert (result.outcome, result.text) == (RunOutcome.TIMEOUT, text)


@pytest.mark.parametrize("closing", ["", "os.closerange(0, 256)"])
def test_a_daemon_is_dead_when_the_reply_comes(box: Sandbox, closing: str) -> None:
    code = f"""
    import ctypes, os, time
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, b"strop-daemon", 0, 0, 0)
            os.write(write, b"1")
            {closing}
            time.sleep(60)
        os._exit(0)
    os.read(read, 1)
    print("started")
    """
    started_at = time.perf_counter()
    result = box.run(textwrap.dedent(code))
    assert processes_named("strop-daemon") == []
    assert (result.outcome, result.text) == (RunOutcome.STDOUT, "started\n")
    assert time.perf_counter() - started_at < 2.0


def test_a_fork_bomb_is_bounded_and_a_neighbour_still_right(box: Sandbox) -> None:
    bomb = """
    import os
    while True:
        try: os.fork()
        except OSError: pass
    """
    started_at = time.perf_counter()
    result = box.run(textwrap.dedent(bomb), wall_s=0.5)
    assert result.outcome is RunOutcome.TIMEOUT
    assert time.perf_counter() - started_at < 1.0
    assert box.run("6 * 7").text == "42"


def test_the_number_of_processes_is_limited(box: Sandbox) -> None:
    code = """
    import os, time
    count = 0
    try:
        while count < 1000:
            if os.fork() == 0: time.sleep(60)
            count += 1
    except BlockingIOError:
        pass
    print(count)
    """
    assert int(box.run(textwrap.dedent(code)).text) < 64


@pytest.mark.parametrize(
    "attack",
    [
        "os.kill(0, 9)",
        "os.kill(-1, 9)",
        "os.kill(os.getppid(), 9)",
        "[os.kill(pid, 9) for pid in range(2, 5000) if exists(pid)]",
    ],
)
def test_no_signal_reaches_beyond_the_program(box: Sandbox, attack: str) -> None:
    code = f"""
    import os
    def exists(pid):
        try: os.kill(pid, 0)
        except ProcessLookupError: return False
        return True
    try: {attack}
    except OSError: pass
    print("alive")
    """
    assert box.run(textwrap.dedent(code)).text == "alive\n"
    assert box.run("1 + 1").text == "2"


def test_the_network_is_out_of_reach(box: Sandbox) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        abstract.bind("\0strop-test-listener")
        abstract.listen()
        code = f"""
        import socket
        def attempt(family, kind, address):
            try:
                with socket.socket(family, kind) as s:
                    s.connect(address)
                    s.send(b"hello")
            except OSError as error:
                return type(error).__name__
            return "reached"
        print(attempt(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {tcp.getsockname()[1]})))
        print(attempt(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", {udp.getsockname()[1]})))
        print(attempt(socket.AF_UNIX, socket.SOCK_STREAM, "\\0strop-test-listener"))
        """
        assert box.run(textwrap.dedent(code)).text == "PermissionError\n" * 3
        udp.setblocking(False)
        with pytest.raises(BlockingIOError):
            udp.recv(16)


def test_neither_the_environment_nor_the_files_of_the_trainer_can_be_read(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "answers.txt"
    secret.write_text("canary")
    monkeypatch.setenv("STROP_CANARY", "canary")
    with Sandbox() as fresh:
        code = f"""
        import os
        print(os.environ.get("STROP_CANARY"))
        for path in ({str(secret)!r}, "/etc/passwd", "/proc/1/environ", "/proc/{os.getpid()}/environ", {__file__!r}):
            print(os.path.exists(path))
        """
        assert fresh.run(textwrap.dedent(code)).text == "None\n" + "False\n" * 5


@pytest.mark.parametrize(
    "attack",
    [
        "open(os.__file__, 'a')",
        "open('/usr/planted', 'w')",
        "open('/planted', 'w')",
        "os.setuid(0)",
        "os.chroot('/')",
        "socket.sethostname('mine')",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "check(libc.unshare(0x10000000))",
        "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
    ],
)
def test_nothing_outside_the_working_directory_can_be_changed(box: Sandbox, attack: str) -> None:
    code = f"""
    import ctypes, os, resource, socket
    libc = ctypes.CDLL(None, use_errno=True)
    def check(result):
        if result < 0: raise OSError(ctypes.get_errno(), "refused")
    try: {attack}
    except (OSError, ValueError): print("refused")
    """
    assert box.run(textwrap.dedent(code)).text == "refused\n"


def test_two_calls_do_not_see_each_others_files(box: Sandbox) -> None:
    leave = """
    for path in ("left", "/tmp/left", "/dev/shm/left"):
        open(path, "w").write("left")
    import ctypes
    print(ctypes.CDLL(None).shmget(7, 4096, 0o1600))  # created
    """
    look = """
    import ctypes, os
    print(os.listdir("."), sorted(os.listdir("/tmp")), os.listdir("/dev/shm"), ctypes.CDLL(None).shmget(7, 4096, 0))
    """
    assert box.run(textwrap.dedent(leave)).outcome is RunOutcome.STDOUT
    assert box.run(textwrap.dedent(look)).text == "[] ['shm', 'work'] [] -1\n"


def test_the_working_directory_is_bounded(box: Sandbox) -> None:
    code = """
    import errno
    try:
        for number in range(100):
            open(str(number), "wb").write(bytes(8 << 20))
    except OSError as error:
        print(errno.errorcode[error.errno], number)
    """
    assert box.run(textwrap.dedent(code)).text.startswith("ENOSPC")


ATTEMPT = """
import sys
from strop.errors import UserError
from strop.sandbox import Sandbox
try:
    with Sandbox(min_level=sys.argv[1]) as box:
        loop = box.run("while True: pass", wall_s=0.3)
        print(box.level, box.run("6 * 7").text, loop.outcome, box.run("print(input())", stdin="x").text)
except UserError as error:
    print(error)
"""


def output_of(launcher: list[str], level: str) -> str:
    done = subprocess.run(
        [*launcher, sys.executable, "-c", ATTEMPT, level], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Filters as a default container has them, and a user who is not root on the host either.
CONTAINER = [sys.executable, str(Path(__file__).parent / "container.py")]
WITHOUT_LANDLOCK = [*CONTAINER, "--deny-landlock"]
NOT_ROOT = [*CONTAINER, "--allow-namespaces", "--unprivileged"]


def test_without_namespaces_it_refuses_the_default_level_of_a_service_and_names_the_remedy() -> None:
    text = output_of(CONTAINER, "namespaces")
    assert "sandbox.min_level is 'namespaces' (L2), and this machine does not give it" in text
    assert "sandbox.min_level = 'confined'" in text


def test_without_namespaces_it_confines_by_landlock_and_seccomp() -> None:
    assert output_of(CONTAINER, "confined") == "confined 42 timeout x\n\n"


def test_where_landlock_is_denied_as_well_it_refuses_to_start() -> None:
    text = output_of(WITHOUT_LANDLOCK, "confined")
    assert "sandbox.min_level is 'confined' (L1), and this machine does not give it" in text
    assert "sandbox.min_level = 'process'" in text


def test_without_any_of_them_it_runs_as_plain_processes_only_when_that_was_accepted() -> None:
    assert output_of(WITHOUT_LANDLOCK, "process") == "process 42 timeout x\n\n"


def test_without_root_it_isolates_through_user_namespaces() -> None:
    assert output_of(NOT_ROOT, "namespaces") == "namespaces 42 timeout x\n\n"
