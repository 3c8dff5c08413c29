"""Landlock rules, by what real programs under them can reach. No filter and no namespace helps here."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from strop.sandbox.inside import landlock

CONFINED = Path(__file__).with_name("confined.py")
CONTAINER = Path(__file__).with_name("container.py")
SYSTEM = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", sys.base_prefix, sys.prefix, "/no/such/tree"]
ALL = {"readable": SYSTEM}  # nothing but Landlock stands between the program and the host's files
CHANGES = {"readable": None}  # mounts decide what is read

# Prints the name of each attempt, and the errno it ended with.
ATTEMPT = """
import os, socket, signal, subprocess, sys
def attempt(name, action):
    try:
        action()
    except OSError as error:
        print(name, error.errno)
    else:
        print(name, 0)
"""


def needs(version: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(landlock.abi() < version, reason=f"this kernel has version {landlock.abi()} of Landlock")


pytestmark = needs(1)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


def attempt(code: str, rules: dict[str, object], own: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, str(CONFINED), json.dumps({"rules": rules})],
        input=ATTEMPT + code,
        capture_output=True,
        text=True,
        cwd=own,
        env={"PATH": os.environ["PATH"], "CANARY": "a secret"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: int(number) for name, number in map(str.split, done.stdout.splitlines())}


def test_files_outside_the_listed_trees_are_out_of_reach(own):
    secret = own.parent / "secret"
    secret.write_text("canary")
    (own / "link").symlink_to(secret)
    code = f"""
secret = {str(secret)!r}
attempt("read", lambda: open(secret))
attempt("read-link", lambda: open("link"))
attempt("list", lambda: os.listdir(".."))
attempt("dotdot", lambda: open("../secret"))
attempt("environ", lambda: open(f"/proc/{{os.getppid()}}/environ"))
attempt("passwd", lambda: open("/etc/passwd"))
attempt("write", lambda: open(secret, "w"))
attempt("truncate", lambda: os.truncate(secret, 0))
attempt("unlink", lambda: os.unlink(secret))
attempt("create", lambda: open("../new", "w"))
attempt("mkdir", lambda: os.mkdir("../new"))
attempt("rename-out", lambda: (open("mine", "w").close(), os.rename("mine", "../mine")))
attempt("rename-in", lambda: os.rename(secret, "stolen"))
attempt("hard-link", lambda: os.link(secret, "stolen"))
attempt("execute", lambda: os.execv(secret, [secret]))
"""
    answers = attempt(code, ALL, own)
    refused = {name for name, number in answers.items() if number in (errno.EACCES, errno.EXDEV)}
    assert refused == answers.keys()
    assert secret.read_text() == "canary"
    assert sorted(path.name for path in own.parent.iterdir()) == ["own", "secret"]


def test_the_own_directory_and_the_listed_trees_serve_honest_programs(own):
    code = """
attempt("create", lambda: open("a", "w").write("x"))
attempt("rename", lambda: (os.mkdir("d"), os.rename("a", "d/b")))
attempt("append-and-truncate", lambda: os.truncate(open("d/b", "a").name, 0))
attempt("link", lambda: os.link("d/b", "c"))
attempt("symlink", lambda: os.symlink("c", "s"))
attempt("fifo", lambda: os.mkfifo("f"))
attempt("list", lambda: os.listdir("."))
attempt("remove", lambda: (os.unlink("d/b"), os.rmdir("d")))
attempt("unnamed", lambda: os.open(".", os.O_TMPFILE | os.O_RDWR))
attempt("run", lambda: subprocess.run(["sh", "-c", "echo > e"], check=True))
attempt("import", lambda: __import__("sqlite3").connect("x.db").execute("create table t(x)"))
attempt("numpy", lambda: __import__("numpy.fft"))
attempt("script", lambda: (open("p", "w").write("#!/bin/sh\\nexit 0\\n"), os.chmod("p", 0o755)))
attempt("run-script", lambda: subprocess.run("./p", check=True))
for name in ("null", "zero", "full", "random", "urandom"):
    attempt(name, lambda: open(f"/dev/{name}", "rb", buffering=0).read(1))
attempt("write-null", lambda: open("/dev/null", "w").write("x"))
attempt("isatty", lambda: os.isatty(os.open("/dev/null", os.O_RDWR)))
"""
    assert {name for name, number in attempt(code, ALL, own).items() if number} == set()


def test_the_listed_trees_are_read_only_and_other_devices_closed(own):
    code = f"""
attempt("write-prefix", lambda: open({sys.prefix!r} + "/pyvenv.cfg", "a"))
attempt("create-in-prefix", lambda: open({sys.prefix!r} + "/strop-canary", "w"))
attempt("tty", lambda: open("/dev/ptmx"))
attempt("list-devices", lambda: os.listdir("/dev"))
attempt("shm", lambda: open("/dev/shm/strop-canary", "w"))
attempt("device", lambda: os.mknod("d", 0o20666, os.makedev(1, 1)))
"""
    assert set(attempt(code, ALL, own).values()) <= {errno.EACCES, errno.EPERM}


def test_where_mounts_decide_what_is_read_only_changes_are_judged(own):
    outside = own.parent / "outside"
    outside.write_text("readable")
    code = f"""
outside = {str(outside)!r}
attempt("read", lambda: open(outside).read())
attempt("list", lambda: os.listdir(".."))
attempt("own", lambda: open("a", "w").write("x"))
attempt("null", lambda: open("/dev/null", "w").write("x"))
attempt("write", lambda: open(outside, "w"))
attempt("create", lambda: open("../new", "w"))
attempt("remove", lambda: os.unlink(outside))
attempt("move", lambda: os.rename("a", "../a"))
"""
    answers = attempt(code, CHANGES, own)
    assert {name for name, number in answers.items() if number == 0} == {"read", "list", "own", "null"}
    assert set(answers.values()) <= {0, errno.EACCES, errno.EXDEV}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root could mount without it")
@pytest.mark.parametrize("rules", [ALL, CHANGES])
def test_no_mount_is_possible_afterwards(rules, own):
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def mount():
    if libc.unshare(0x00020000) or libc.mount(b"none", b".", b"tmpfs", ctypes.c_ulong(0), None):
        raise OSError(ctypes.get_errno(), "mount")
attempt("mount", mount)
"""
    assert attempt(code, rules, own) == {"mount": errno.EPERM}


@pytest.mark.parametrize("rules", [ALL, CHANGES])
@needs(4)
def test_tcp_is_closed(rules, own):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"""
attempt("connect", lambda: socket.create_connection(("127.0.0.1", {port}), 1))
attempt("bind", lambda: socket.create_server(("127.0.0.1", 0)))
"""
        assert attempt(code, rules, own) == {"connect": errno.EACCES, "bind": errno.EACCES}
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize("rules", [ALL, CHANGES])
@needs(6)
def test_abstract_sockets_of_others_are_out_of_reach_and_own_ones_are_not(rules, own):
    name = f"\0strop-test-{os.getpid()}-{threading.get_ident()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        listener.bind(name)
        listener.listen()
        mailbox.bind(f"{name}-mail")
        code = f"""
attempt("others", lambda: socket.socket(socket.AF_UNIX).connect({name!r}))
attempt("datagram", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", {name + "-mail"!r}))
mine = socket.socket(socket.AF_UNIX)
mine.bind({name + "-mine"!r}); mine.listen()
attempt("mine", lambda: socket.socket(socket.AF_UNIX).connect({name + "-mine"!r}))
"""
        assert attempt(code, rules, own) == {"others": errno.EPERM, "datagram": errno.EPERM, "mine": 0}


@pytest.mark.parametrize("rules", [ALL, CHANGES])
@needs(6)
def test_signals_reach_the_program_and_its_children_only(rules, own):
    victim = subprocess.Popen(["sleep", "30"])
    try:
        code = f"""
child = subprocess.Popen(["sleep", "30"])
attempt("parent", lambda: os.kill(os.getppid(), 0))
attempt("victim", lambda: os.kill({victim.pid}, signal.SIGKILL))
attempt("self", lambda: os.kill(os.getpid(), 0))
attempt("child", lambda: os.kill(child.pid, signal.SIGKILL))
child.wait()
"""
        assert attempt(code, rules, own) == {"parent": errno.EPERM, "victim": errno.EPERM, "self": 0, "child": 0}
        assert victim.poll() is None
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()


@pytest.mark.parametrize(
    ("version", "lost"),
    [
        (1, {"truncate", "connect", "signal"}),  # moves between directories are then refused even in its own
        (2, {"truncate", "connect", "signal"}),
        (3, {"connect", "signal"}),
        (4, {"signal"}),
        (5, {"signal"}),
        (6, set()),
        (7, set()),
    ],
)
def test_an_older_kernel_loses_what_its_version_lacks_and_nothing_else(version, lost, own):
    if landlock.abi() < version:
        pytest.skip(f"this kernel has version {landlock.abi()} of Landlock")
    secret = own.parent / "secret"
    secret.write_text("canary")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = f"""
attempt("read", lambda: open({str(secret)!r}))
attempt("write", lambda: open({str(secret)!r}, "w"))
attempt("truncate", lambda: os.truncate({str(secret)!r}, 6))
attempt("connect", lambda: socket.create_connection(("127.0.0.1", {listener.getsockname()[1]}), 1))
attempt("signal", lambda: os.kill(os.getppid(), 0))
"""
        answers = attempt(code, {**ALL, "version": version}, own)
    assert {name for name, number in answers.items() if number == 0} == lost


def test_a_kernel_without_it_or_a_profile_against_it_is_an_error_not_a_weaker_cage():
    code = """
import sys; sys.path.insert(0, {!r})
from strop.sandbox.inside import landlock
print(landlock.abi())
try:
    landlock.prepare(readable=[])
except OSError as error:
    print(error)
"""
    code = code.format(str(Path(__file__).parents[2] / "src"))
    command = [sys.executable, str(CONTAINER), "--deny-landlock", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("0\n[Errno 38] no Landlock here")
