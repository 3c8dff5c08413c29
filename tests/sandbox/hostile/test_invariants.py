"""The outside checks see what they claim to see: each is shown the damage it looks for."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strop.sandbox import IsolationLevel, RunOutcome, RunResult, scripted_result

from . import invariants
from .case import NAMESPACES, Case, echo, stdout
from .cases import CASES
from .host import Host

CASE = Case("one", "nothing", "1", expect=echo("1"), wall_s=1.0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("TMPDIR", "")
    monkeypatch.setenv("STROP_TEST_SECRET", "")
    monkeypatch.setattr("tempfile.tempdir", None)
    host = Host(settle_s=0.3)
    yield host
    host.close()


def leave_process(host: Host) -> Callable[[], None]:
    process = subprocess.Popen(["sleep", "60"])

    def end() -> None:
        process.kill()
        process.wait()

    return end


def leave_marked_orphan(host: Host) -> Callable[[], None]:
    """A daemon that no longer descends from us."""
    rename = f"import ctypes, os, time; ctypes.CDLL(None).prctl(15, {host.mark.encode()!r}, 0, 0, 0); time.sleep(60)"
    silent = "stdin=-3, stdout=-3, stderr=-3"  # DEVNULL
    script = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {rename!r}], {silent}).pid)"
    pid = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/comm").read_text().strip() != host.mark and time.monotonic() < deadline:
        time.sleep(0.01)
    return lambda: os.kill(pid, 9)


def leave_descriptor(host: Host) -> Callable[[], None]:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    return lambda: os.close(descriptor)


def leave_file(host: Host) -> Callable[[], None]:
    path = Path("/dev/shm") / f"{host.mark}-left"
    path.touch()
    return path.unlink


def leave_directory(host: Host) -> Callable[[], None]:
    path = Path(os.environ["TMPDIR"]) / "call"
    path.mkdir()
    return path.rmdir


def leave_system_v(host: Host) -> Callable[[], None]:
    libc = ctypes.CDLL(None)
    segment = libc.shmget(0, 4096, 0o1600)
    return lambda: libc.shmctl(segment, 0, None)  # IPC_RMID


def leave_shared_memory(host: Host) -> Callable[[], None]:
    held = mmap.mmap(-1, 64 << 20)
    held[:] = bytes(len(held))
    return held.close


@pytest.mark.parametrize(
    ("leave", "finding"),
    [
        (leave_process, "1 processes are left"),
        (leave_marked_orphan, "of the program is left"),
        (leave_descriptor, "holds 1 descriptors more"),
        (leave_file, "-left is left"),
        (leave_directory, "1 working directories are left"),
        (leave_system_v, "System V object is left: shm"),
        (leave_shared_memory, "shared memory grew"),
    ],
)
def test_what_is_left_behind_is_found(host: Host, leave: Callable[[Host], Callable[[], None]], finding: str) -> None:
    before = host.at_rest()
    undo = leave(host)
    try:
        assert any(finding in found for found in host.after(before).leftovers_since(before))
    finally:
        undo()
    assert host.after(before).leftovers_since(before) == []


def test_a_part_of_the_service_that_died_is_missed(host: Host) -> None:
    def start() -> Callable[[], None]:
        """A process that has started another."""
        process = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], process_group=0)

        def end() -> None:
            os.killpg(process.pid, 9)
            process.wait()

        return end

    undo = start()
    before = host.at_rest()
    undo()
    undo_other = start()  # as many processes as before
    try:
        assert any("the service lost its process" in found for found in host.after(before).leftovers_since(before))
    finally:
        undo_other()


def knock_tcp(host: Host) -> None:
    socket.create_connection(("127.0.0.1", int(host.facts["TCP_PORT"]))).close()


def knock_udp(host: Host) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("127.0.0.1", int(host.facts["UDP_PORT"])))


def knock_abstract(host: Host) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(host.facts["ABSTRACT"]))


def knock_path(host: Host) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(host.facts["UNIX_SOCKET"]))


def overwrite(host: Host) -> None:
    Path(str(host.facts["SECRET_FILE"])).write_text("mine")


def plant(host: Host) -> None:
    (Path(str(host.facts["OPEN_DIRECTORY"])) / "planted").touch()


@pytest.mark.parametrize(
    ("touch", "finding"),
    [
        (knock_tcp, "TCP listener"),
        (knock_udp, "UDP listener"),
        (knock_abstract, "abstract listener"),
        (knock_path, "unix listener"),
        (overwrite, "a program changed"),
        (plant, "a program changed"),
    ],
)
def test_a_touch_of_the_host_is_found(host: Host, touch: Callable[[Host], None], finding: str) -> None:
    assert host.touches() == []
    touch(host)
    assert [finding in found for found in host.touches()] == [True]


def result(text: str, outcome: RunOutcome = RunOutcome.STDOUT, level: IsolationLevel = NAMESPACES) -> RunResult:
    made = scripted_result(text, outcome)
    return RunResult(
        outcome=outcome, reason="", text=text, exit_code=made.exit_code, timings=made.timings, level=level, peak_memory_bytes=0
    )


def test_a_reply_that_tells_too_much_or_cannot_be_sent_is_found(host: Host) -> None:
    def findings(reply: RunResult) -> str:
        return "; ".join(invariants.of_reply(reply, NAMESPACES, host))

    assert findings(result("fine \x00 \x1b é")) == ""
    assert "canary of file" in findings(result(f"<{Path(str(host.facts['SECRET_FILE'])).read_text()}>"))
    assert "canary of env" in findings(result(os.environ["STROP_TEST_SECRET"]))
    assert "canary of code" in findings(result(host.honest_call[0]))
    assert "canary of stdin" in findings(result(host.honest_call[1]))
    assert "a place of the runner" in findings(result(f"File {sys.prefix}/lib/x.py"))
    assert "cannot be sent" in findings(result("\ud800"))
    assert "characters" in findings(result("x" * 80_000))
    assert "a program caused internal" in findings(result("", RunOutcome.INTERNAL))
    assert "a program caused overloaded" in findings(result("", RunOutcome.OVERLOADED))
    assert "ran at level process" in findings(result("", level=IsolationLevel.PROCESS))


def test_a_late_or_a_wrong_reply_is_found() -> None:
    assert invariants.of_time(CASE, 1.4) == []
    assert invariants.of_time(CASE, 3.1) != []
    assert invariants.of_next_call(result("1\n"), 0.1, "1\n") == []
    assert invariants.of_next_call(result("2\n"), 0.1, "1\n") != []
    assert invariants.of_next_call(result("1\n"), 9.0, "1\n") != []
    assert invariants.of_victim(result("1\n"), 0.1, "1\n") == []
    assert invariants.of_victim(result("1\n", RunOutcome.TIMEOUT), 0.1, "1\n") != []
    assert invariants.of_victim(result("1\n"), 60.0, "1\n") != []
    assert invariants.of_answer(CASE, NAMESPACES, result("1", RunOutcome.ECHO)) == []
    assert invariants.of_answer(CASE, NAMESPACES, result("1")) != []
    assert invariants.of_answer(CASE, NAMESPACES, result("2", RunOutcome.ECHO)) != []
    assert invariants.of_repetition(CASE, NAMESPACES, result("1"), result("1")) == []
    assert invariants.of_repetition(CASE, NAMESPACES, result("1"), result("2")) != []
    assert invariants.of_repetition(CASE, NAMESPACES, result("1"), result("1", RunOutcome.ECHO)) != []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the cases mean to do
def test_every_case_compiles_or_means_not_to_and_says_what_it_attacks() -> None:
    not_python = {"tabs-and-spaces", "surrogate-in-code", "nul-in-code", "deep-parens-source", "deep-operators", "long-sum"}
    for case in CASES.values():
        assert case.attacks, case.name
        assert case.expect, case.name
        if case.name in not_python:
            continue
        for code in (case.code, case.alongside, *case.before):
            compile(code.removeprefix("\ufeff").replace("HOST_", "host_"), case.name, "exec", dont_inherit=True)


def test_an_expected_text_is_no_pattern_that_fits_everything() -> None:
    anything = [name for name, case in CASES.items() if not case.repeats_from and case.expect == stdout()]
    assert anything == []
