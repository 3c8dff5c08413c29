"""The filter: what the kernel answers to real programs under it, and what it decides about calls of other architectures."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from strop.sandbox.inside import seccomp

CONFINED = Path(__file__).with_name("confined.py")

REFUSED_NAMES = """
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_getfd kcmp migrate_pages move_pages
    mount umount2 open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr pivot_root chroot statmount
    listmount unshare setns bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register vmsplice
    lookup_dcookie nfsservctl uselib seccomp add_key request_key keyctl shmget shmat shmctl shmdt semget semop semctl semtimedop
    msgget msgsnd msgrcv msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr memfd_create memfd_secret
    create_module init_module delete_module finit_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl
    quotactl_fd settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname syslog vhangup open_by_handle_at
    name_to_handle_at fanotify_init fanotify_mark modify_ldt ioperm iopl flock inotify_init inotify_init1 inotify_add_watch
"""
OWN_FILE_NAMES = "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat file_setattr"
WRITABLE_FILE_NAMES = """
    setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat utime utimes futimesat utimensat
"""
ALWAYS_EPERM = REFUSED_NAMES.split()
ALWAYS_EACCES = ["bind", "connect", "listen", "accept", "accept4"]
IN_THE_GROUP_EPERM = ["setsid", "setpgid"]
ON_OWN_FILES_EPERM, ON_WRITABLE_FILES_EPERM = OWN_FILE_NAMES.split(), WRITABLE_FILE_NAMES.split()
ON_SHARED_FILES_EPERM = ON_OWN_FILES_EPERM + ON_WRITABLE_FILES_EPERM
SIGNALS_EPERM = ["tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"]

NAMESPACED = {"is_namespaced": True}
ALONE = {"is_namespaced": False, "has_own_uid": True}  # root in a container: every call has its own uid
SCOPED = {"is_namespaced": False, "are_signals_scoped": True}
SHARED = {"is_namespaced": False}
KINDS = {"namespaced": NAMESPACED, "alone": ALONE, "scoped": SCOPED, "shared": SHARED}

# Every call with arguments that change nothing even where it is let through.
ASK_ALL = """
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
def ask(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(argument) for argument in arguments])
    return ctypes.get_errno() if result < 0 else 0
"""


def run(code: str, kind: dict[str, bool] | None, *, cwd: Path | None = None, timeout_s: float = 60.0) -> str:
    """What the program printed; its standard error is shown when the test fails."""
    done = confine(code, kind, cwd=cwd, timeout_s=timeout_s)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    return done.stdout


def confine(
    code: str, kind: dict[str, bool] | None, *, cwd: Path | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    settings = {} if kind is None else {"filter": kind}
    return subprocess.run(
        [sys.executable, str(CONFINED), json.dumps(settings)],
        input=code,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        start_new_session=True,
        check=False,
        cwd=cwd,
    )


@cache
def answers(kind: str) -> dict[str, int]:
    """Name -> errno of every call that any rule speaks of, all arguments -1."""
    numbers = seccomp.numbers()
    names = [*ALWAYS_EPERM, *ALWAYS_EACCES, *IN_THE_GROUP_EPERM, *ON_SHARED_FILES_EPERM, *SIGNALS_EPERM]
    asked = {name: numbers[name] for name in names}
    code = f"{ASK_ALL}print(json.dumps({{name: ask(number, *[-1] * 6) for name, number in {asked}.items()}}))"
    errnos: dict[str, int] = json.loads(run(code, KINDS[kind]))
    return errnos


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_are_refused_at_every_level(kind):
    assert {name for name in ALWAYS_EPERM if answers(kind)[name] != errno.EPERM} == set()
    assert {name for name in ALWAYS_EACCES if answers(kind)[name] != errno.EACCES} == set()  # no socket gets a connection


@pytest.mark.parametrize("name", IN_THE_GROUP_EPERM)
def test_without_a_pid_namespace_nothing_leaves_the_process_group(name):
    leave = (
        f"pid = os.fork()\nif pid == 0: os.{name.replace('setpgid', 'setpgrp')}(); os._exit(0)\nprint(os.waitpid(pid, 0)[1])"
    )
    assert run(f"import os\n{leave}", NAMESPACED) == "0\n"
    for kind in ("alone", "scoped", "shared"):
        assert answers(kind)[name] == errno.EPERM
        assert "PermissionError" in confine(f"import os\n{leave}", KINDS[kind]).stderr


def test_attributes_of_the_hosts_files_cannot_be_changed_by_their_owner_or_through_write_access():
    refused = {kind: {name for name in ON_SHARED_FILES_EPERM if answers(kind)[name] == errno.EPERM} for kind in KINDS}
    everything = set(ON_SHARED_FILES_EPERM)
    assert refused == {
        "namespaced": set(), "alone": set(ON_WRITABLE_FILES_EPERM), "scoped": everything, "shared": everything
    }  # fmt: skip


def test_signals_are_refused_only_where_nothing_else_keeps_them_inside():
    refused = {kind: {name for name in SIGNALS_EPERM if answers(kind)[name] in (0, errno.EPERM)} for kind in KINDS}
    assert refused == {"namespaced": set(), "alone": set(), "scoped": set(), "shared": set(SIGNALS_EPERM)}


def ask(calls: list[str], kind: dict[str, bool] = NAMESPACED) -> list[int]:
    """The errnos of expressions over `n` (numbers by name) and `ask`; 0 for a call that did not fail."""
    code = f"import os, signal\nn = {seccomp.numbers()}\n{ASK_ALL}\nprint(json.dumps([{', '.join(calls)}]))"
    errnos: list[int] = json.loads(run(code, kind))
    return errnos


ARGUMENTS = [
    ("ask(n['clone'], 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)", errno.EPERM),  # a user namespace
    ("ask(n['clone'], 0x00020000 | signal.SIGCHLD, 0, 0, 0, 0)", errno.EPERM),  # a mount namespace
    ("ask(n['clone'], 0x00008000 | signal.SIGCHLD, 0, 0, 0, 0)", errno.EPERM),  # a child of our parent
    ("ask(n['clone3'], 0, 0)", errno.ENOSYS),
    ("ask(469 + 1, -1, -1, -1)", errno.ENOSYS),  # younger than the list
    ("ask(1000, -1, -1, -1)", errno.ENOSYS),
    ("ask(n['prlimit64'], os.getppid(), 0, 0, 0)", errno.EPERM),
    ("ask(n['prlimit64'], 0, 0, 0, 0)", 0),
    ("ask(n['prlimit64'], 1 << 32, 0, 0, 0)", 0),  # the kernel reads 32 bits of a pid, and so do we
    ("ask(n['prlimit64'], os.getppid() | 1 << 32, 0, 0, 0)", errno.EPERM),
    ("ask(n['sched_setaffinity'], os.getppid(), 0, 0)", errno.EPERM),
    ("ask(n['sched_setaffinity'], 0, 0, 0)", errno.EINVAL),  # an empty mask, so it reached the kernel
    ("ask(n['sched_setscheduler'], os.getppid(), 0, 0)", errno.EPERM),
    ("ask(n['sched_setparam'], os.getppid(), 0)", errno.EPERM),
    ("ask(n['sched_setattr'], os.getppid(), 0, 0)", errno.EPERM),
    ("ask(n['setpriority'], 0, os.getppid(), 19)", errno.EPERM),
    ("ask(n['setpriority'], 0, 0, 19)", 0),
    ("ask(n['setpriority'], 2, 0, 19)", errno.EPERM),  # every process of the uid
    ("ask(n['ioprio_set'], 1, os.getppid(), 0)", errno.EPERM),
    ("ask(n['ioprio_set'], 1, 0, 0)", 0),
    ("ask(n['personality'], 0x0040000)", errno.EPERM),
    ("ask(n['personality'], 0xFFFFFFFF)", 0),
    ("ask(n['fcntl'], 0, 8, os.getppid())", errno.EPERM),  # F_SETOWN: whom to signal
    ("ask(n['fcntl'], 0, 15, 0)", errno.EPERM),
    ("ask(n['fcntl'], 0, 1024, 0)", errno.EPERM),  # F_SETLEASE
    ("ask(n['fcntl'], 0, 1026, 0)", errno.EPERM),
    ("ask(n['fcntl'], 0, 1, 0)", 0),  # F_GETFD
    ("ask(n['socket'], 1, 1, 0)", 0),
    ("ask(n['socket'], 1, 5 | 0o2000000, 0)", 0),  # SOCK_SEQPACKET | SOCK_CLOEXEC
    ("ask(n['socket'], 1, 2, 0)", errno.EACCES),  # a datagram could be sent to any address
    ("ask(n['socket'], 1, 3, 0)", errno.EACCES),  # SOCK_RAW, which becomes a datagram
    *((f"ask(n['socket'], {family}, 1, 0)", errno.EACCES) for family in (0, 2, 10, 16, 17, 38, 40, 44, 0x10001)),
    ("ask(n['socketpair'], 1, 2, 0, 0)", errno.EACCES),
    ("ask(n['socketpair'], 2, 1, 0, 0)", errno.EACCES),
]


def test_arguments_decide():
    calls, expected = zip(*ARGUMENTS, strict=True)
    assert dict(zip(calls, ask([*calls]), strict=True)) == dict(zip(calls, expected, strict=True))


def test_where_nothing_scopes_signals_a_program_reaches_only_all_its_kin():
    targets = ["0", "os.getppid()", "-1", "-os.getpgrp()"]
    assert ask([f"ask(n['kill'], {target}, 0)" for target in targets], SHARED) == [0, *[errno.EPERM] * 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_reads_as_permission_error(kind):
    code = """
import os, socket
for attempt in (lambda: socket.socket(), lambda: socket.socket(socket.AF_INET6), lambda: os.memfd_create("x"),
                lambda: os.chroot("/")):
    try:
        attempt()
    except PermissionError as error:
        print(error)
"""
    denied, refused = "[Errno 13] Permission denied\n", "[Errno 1] Operation not permitted"
    assert run(code, KINDS[kind]) == denied * 2 + f"{refused}\n{refused}: '/'\n"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="these ABIs exist on x86_64 only")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            """
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000" "cd80" "c3"))  # mov eax, getpid of i386; int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
""",
            id="i386",
        ),
        pytest.param("libc.syscall(ctypes.c_long(0x40000000 | 39))", id="x32"),
    ],
)
def test_a_call_of_another_abi_ends_the_program(call):
    assert confine(ASK_ALL + call, NAMESPACED).returncode == -signal.SIGSYS


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            "import threading\nn = []\n"
            "for t in [threading.Thread(target=n.append, args=(i,)) for i in range(8)]: t.start(); t.join()\nprint(sum(n))",
            id="threads",
        ),
        pytest.param(
            "import subprocess\nprint(subprocess.run(['echo', '28'], capture_output=True).stdout.decode())", id="subprocess"
        ),
        pytest.param("import os\nprint(os.popen('echo $((4 * 7))').read())", id="shell"),
        pytest.param("import multiprocessing as m\nwith m.Pool(2) as pool: print(sum(pool.map(abs, [-14, 14])))", id="pool"),
        pytest.param(
            "from concurrent.futures import ProcessPoolExecutor as P\nwith P(2) as pool: print(sum(pool.map(abs, [-14, 14])))",
            id="process-pool-executor",
        ),
        pytest.param(
            "import multiprocessing as m\nq = m.Queue()\np = m.Process(target=q.put, args=(28,))\n"
            "p.start(); print(q.get()); p.join()",
            id="queue",
        ),
        pytest.param(
            "import multiprocessing as m, time\np = m.Process(target=time.sleep, args=(60,))\n"
            "p.start(); p.terminate(); p.join(); print(13 - p.exitcode)",
            id="terminate-a-child",
        ),
        pytest.param(
            "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('echo', '28', stdout=-1)\n"
            "    return (await p.communicate())[0].decode()\nprint(asyncio.run(f()))",
            id="asyncio-subprocess",
        ),
        pytest.param("import asyncio\nprint(asyncio.run(asyncio.to_thread(lambda: 28)))", id="asyncio-thread"),
        pytest.param("import socket\na, b = socket.socketpair()\na.sendall(b'28'); print(b.recv(9).decode())", id="socketpair"),
        pytest.param(
            "import tempfile, os\nwith tempfile.NamedTemporaryFile() as f: f.write(b'x' * 28); f.flush()\n"
            "print(28, os.path.exists(f.name) or '')",
            id="tempfile",
        ),
        pytest.param(
            "import sqlite3\nc = sqlite3.connect('x.db')\nc.execute('create table t(x)')\n"
            "c.execute('insert into t values (28)'); c.commit(); print(c.execute('select x from t').fetchone()[0])",
            id="sqlite3",
        ),
        pytest.param(
            "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print(28))\nsignal.raise_signal(signal.SIGALRM)",
            id="signal",
        ),
        pytest.param(
            "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (28, 28)); print(resource.getrlimit(7)[0])",
            id="rlimit",
        ),
        pytest.param("import os\nos.nice(1); print(28)", id="nice"),
        pytest.param("import numpy as np\nprint(int(np.linalg.norm(np.eye(28)) ** 2 + 0.5))", id="numpy"),
        pytest.param("import sympy\nprint(sympy.binomial(8, 2))", id="sympy"),
        pytest.param(
            "from scipy import special\nprint(int(special.comb(8, 2)))",
            id="scipy",
            marks=pytest.mark.skipif(find_spec("scipy") is None, reason="scipy is not installed"),
        ),
        pytest.param("import shutil\nopen('a', 'w').close(); shutil.copyfile('a', 'b'); print(28)", id="copyfile"),
    ],
)
def test_honest_programs_do_not_notice(code, tmp_path):
    assert run(code, SCOPED, cwd=tmp_path).strip() == "28"  # the kinds with namespaces or an own uid refuse less


def test_without_a_pid_namespace_one_kill_of_the_group_ends_a_fork_bomb(tmp_path):
    """Every fork also tries to get away, and one that the kill could miss would fork on."""
    bomb = """
import ctypes, os, resource, time
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))  # should this test fail, it ends by itself
libc = ctypes.CDLL(None)
print("away", flush=True)
deadline = time.monotonic() + 5
while time.monotonic() < deadline:
    try:
        if os.fork() == 0:
            for escape in (os.setsid, os.setpgrp, lambda: libc.prctl(36, 1)):
                try:
                    escape()
                except OSError:
                    pass
            if os.getpgrp() == os.getpid():
                open("escaped", "w").close()
            time.sleep(0.01)
    except OSError:
        time.sleep(0.001)
"""
    tmp_path.chmod(0o777)
    for attempt in range(3):
        # Root is not held by the limit, so each bomb has a uid of its own.
        become = f"os.setresuid(*[{1_234_567 + attempt}] * 3)" if os.geteuid() == 0 else ""
        limited = f"import os, resource\n{become}\nresource.setrlimit(resource.RLIMIT_NPROC, (48, 48))\n"
        process = subprocess.Popen(
            [sys.executable, str(CONFINED), json.dumps({"filter": ALONE})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=tmp_path,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write((limited + bomb).encode())
        process.stdin.close()
        assert process.stdout.readline() == b"away\n"
        time.sleep(0.2)
        members = in_group(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(0.1)
        assert in_group(process.pid) == []
        assert len(members) > 10  # there was something to kill
        process.stdout.close()
    assert not (tmp_path / "escaped").exists()


def in_group(group: int) -> list[int]:
    """The living members of a process group, by their pids."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(pgrp) == group and state != "Z":
                members.append(int(entry.name))
    return members


SESSION = """
import ctypes, os, socket, sys
from strop_inside import seccomp as guard
ours = socket.socket(fileno=int(os.environ["CONTROL"]))
listener = guard.install(guard.build(is_namespaced=True, in_session=True))
assert not os.get_inheritable(listener)
socket.send_fds(ours, [b"l"], [listener])
os.close(listener)
libc = ctypes.CDLL(None, use_errno=True)
def tell(result):
    print(ctypes.get_errno() if result < 0 else 0, flush=True)
tell(libc.unshare(0x04000000))
tell(libc.unshare(0x04000000))
tell(libc.mount(b"none", b"/nowhere", b"tmpfs", ctypes.c_ulong(0), None))
pid = libc.syscall(ctypes.c_long(CLONE), ctypes.c_long(0x04000000 | 17), *[ctypes.c_long(0)] * 4)
if pid == 0:
    os._exit(0)
tell(pid)
tell(libc.umount2(b"/nowhere", 0))
tell(libc.setns(0, 0))
tell(0 if os.fork() else os._exit(0))
"""


def test_a_session_asks_for_its_namespaces_and_the_supervisor_answers():
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, str(CONFINED), "{}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(theirs.fileno(),),
        env={**os.environ, "CONTROL": str(theirs.fileno())},
    )
    assert process.stdin is not None
    with ours, theirs:
        process.stdin.write(SESSION.replace("CLONE", str(seccomp.numbers()["clone"])))
        process.stdin.close()
        _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
    try:
        asked = []
        for answer in ("allow", "refuse", "refuse", "refuse"):
            question = seccomp.receive(listener)
            assert question is not None
            asked.append((question.name, question.pid, question.arguments[0]))
            if answer == "allow":
                assert seccomp.allow(listener, question.id)
            else:
                assert seccomp.refuse(listener, question.id, errno.EAGAIN)
            assert not seccomp.allow(listener, question.id)  # it has its answer
        assert process.stdout is not None
        lines = process.stdout.read().split()
        assert process.wait() == 0
    finally:
        os.close(listener)
        process.kill()
        process.wait()
    assert [(name, pid) for name, pid, _ in asked] == [(name, process.pid) for name in ("unshare", "unshare", "mount", "clone")]
    assert [asked[0][2], asked[3][2]] == [0x04000000, 0x04000000 | 17]
    is_root = os.geteuid() == 0  # allowed means as if there were no filter, not more
    assert lines == [str(0 if is_root else errno.EPERM), *["11"] * 3, "1", "1", "0"]


def test_a_question_whose_asker_died_is_no_question():
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, str(CONFINED), "{}"],
        stdin=subprocess.PIPE,
        pass_fds=(theirs.fileno(),),
        env={**os.environ, "CONTROL": str(theirs.fileno())},
        stdout=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    with ours, theirs:
        process.stdin.write(SESSION.encode())
        process.stdin.close()
        _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
    question = seccomp.receive(listener)
    assert question is not None
    process.kill()
    process.wait()
    assert not seccomp.allow(listener, question.id)
    assert not seccomp.refuse(listener, question.id)
    os.close(listener)


# Decisions, by a reading of the filter that shares nothing with the assembler.


def decide(code: bytes, number: int, arguments: tuple[int, ...] = (), *, architecture: int = 0xC000003E) -> int:
    instructions = list(struct.iter_unpack("<HBBI", code))
    memory = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator, at = 0, 0
    while True:
        operation, when_true, when_false, value = instructions[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", memory, value)
            case 0x54:
                accumulator &= value
            case 0x15:
                at += when_true if accumulator == value else when_false
            case 0x35:
                at += when_true if accumulator >= value else when_false
            case 0x06:
                return value
            case _:
                raise AssertionError(f"an instruction that no rule needs: {operation:#x}")


def test_every_number_up_to_the_last_known_has_the_answer_of_its_name():
    numbers = seccomp.numbers()
    refused = {numbers[name] for name in [*ALWAYS_EPERM, *IN_THE_GROUP_EPERM, *ON_SHARED_FILES_EPERM] if name in numbers}
    unreachable = {numbers[name] for name in ALWAYS_EACCES} | {numbers["socket"], numbers["socketpair"]}
    code = seccomp.build(**SCOPED).code
    for number in range(480):
        expected = 0x7FFF0000
        if number in refused:
            expected = 0x00050000 | errno.EPERM
        elif number in unreachable:
            expected = 0x00050000 | errno.EACCES
        elif number >= 470 or number == 435:
            expected = 0x00050000 | errno.ENOSYS
        elif number in (numbers["personality"], numbers["ioprio_set"]):
            expected = 0x00050000 | errno.EPERM
        assert decide(code, number) == expected, number
    for other in (0xC00000B7, 0x40000003, 0x40000028):  # 64-bit ARM, i386, 32-bit ARM
        assert decide(code, 39, architecture=other) == 0x80000000
    assert decide(code, 0x40000000 | 39) == 0x80000000


def test_the_numbers_are_those_of_the_kernels_headers():
    path = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())}
    newest = max(known.values())
    ours = {name: number for name, number in seccomp.numbers().items() if number <= newest}
    assert len(ours) > 100
    assert ours == {name: known[name] for name in ours}


def test_an_architecture_without_a_table_is_named(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(OSError, match="riscv64"):
        seccomp.build(is_namespaced=True)
