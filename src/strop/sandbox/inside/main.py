"""A fork server and the start of its children: isolates itself, loads modules, waits, forks and reaps.

Its argument is one JSON object. A child inherits the memory of this process and gets its work directly from the supervisor, so
no program, input or output passes through it, only descriptors. Each child is pid 1 of a pid namespace: when it dies, the
kernel kills everything that it started.

    supervisor --(id of the child + exchange, wake, output)--> fork server --fork--> child: confined, waiting on `wake`
    supervisor <--(started: id, pid, pidfd)-- <--(ended: pid, status, CPU time, memory)--

`repr(object())` must not differ between two equal calls. Addresses are not randomised, and the loop talks to the kernel through
buffers that are built once, so that the heap is the same at each fork.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import linecache
import mmap
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from . import cells, confine, kernel, program, seccomp, verify, wire


def main() -> None:
    fix_addresses()
    settings = json.loads(sys.argv[2])
    control = settings["control"]
    os.set_inheritable(control, False)
    try:
        confinement, pid_namespace = start(settings)
    except (OSError, ImportError) as error:
        said = (isinstance(error, OSError) and error.strerror) or str(error)
        os.write(control, wire.REPORT.pack(wire.KIND_FAILED, 0, 0, 0, 0, 0) + said.encode())
        return
    os.write(control, wire.REPORT.pack(wire.KIND_HELLO, 0, 0, 0, 0, 0))
    serve(control, pid_namespace=pid_namespace, run_child=functools.partial(live, confinement))


def start(settings: dict[str, Any]) -> tuple[confine.Confinement, int]:
    """Isolate this process from the host and load the profile. Returns in the process that forks.

    Returns:
        what confines its children, and its pid namespace (-1 if children share it).

    Raises:
        OSError: this machine refuses a step; the message names it.
        ImportError: a module of `sandbox.modules` is missing.
    """
    level, libraries = settings["level"], settings["libraries"]
    if level != "process":
        seccomp.numbers()  # raises on another machine than an x86_64
    sys.argv = [""]
    # What `site` adds; it does not run here.
    builtins.exit, builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D"), _sitebuiltins.Quitter("quit", "Ctrl-D")
    is_namespaced, is_root, pid_namespace = level in ("strict", "namespaces"), os.geteuid() == 0, -1
    place = confine.place_inside if is_namespaced else str
    sys.path[:] = [place(path) for path in [*sys.path, *libraries]]
    for name in ("executable", "_base_executable", "prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        setattr(sys, name, place(getattr(sys, name)))
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _die_with(settings["supervisor"], os.getppid)
    kernel.write("self/oom_score_adj", "1000", directory=proc)
    if is_namespaced:
        is_root = _isolate(proc)
        outer = int(os.readlink("self", dir_fd=proc))
        if (pid := os.fork()) != 0:
            os.closerange(3, 4096)
            os.waitpid(pid, 0)
            os._exit(0)
        _die_with(outer, lambda: _parent_on_host(proc))
        os.setsid()
        confine.build_root(settings["shown"])
        pid_namespace = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    else:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # adopts what a program leaves, to kill and reap it
    load_profile(settings["profile"], settings["modules"])
    collapse(proc)
    if not is_namespaced:
        # From here on it notices the end of its supervisor, and kills what programs left.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, 0)
    return confine.Confinement(level, proc=proc, is_root=is_root, readable=settings["shown"]), pid_namespace


def live(confinement: confine.Confinement, exchange: int, wake: int, output: int, directory: str) -> NoReturn:
    """The life of one child, from the fork to its end."""
    if directory.startswith(wire.SESSION_MARK):
        cells.live(confinement, exchange, wake, output, directory.removeprefix(wire.SESSION_MARK), _seed)
    record: mmap.mmap | None = None
    try:
        record = mmap.mmap(exchange, wire.RECORD_BYTES)  # stays valid when its descriptor is closed
        confinement.apply(directory)
        confine.take_streams(exchange, wake, output)
        os.read(confine.WAKE, 8)
        os.close(confine.WAKE)
        header = os.pread(confine.EXCHANGE, wire.WORK.size, wire.RECORD_BYTES)
        job, seed, memory_bytes, cpu_s, max_processes, file_mib, code_length, stdin_length = wire.WORK.unpack(header)
        code = _read(code_length, wire.RECORD_BYTES + wire.WORK.size)
        stdin = _read(stdin_length, wire.RECORD_BYTES + wire.WORK.size + code_length)
        os.close(confine.EXCHANGE)
        confine.give_stdin(stdin)
        of_program = (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_NPROC, max_processes)
        confinement.limit(*of_program, memory_bytes=memory_bytes, file_bytes=file_mib << 20)
        _seed(seed)
        record[: wire.STAMP.size] = wire.STAMP.pack(time.monotonic())
        os.write(1, wire.READY)
    except BaseException as error:
        if record is not None:
            program.write_record(record, wire.RECORD_SETUP, f"{type(error).__name__}: {error}")
        os._exit(1)
    if job == wire.JOB_VERIFY:
        verify.judge(code, lambda line: os.write(1, line + b"\n"))
        os._exit(0)
    program.run_program(code.decode(), record)


def _read(length: int, offset: int) -> bytes:
    """A memory file returns all bytes at once."""
    return os.pread(confine.EXCHANGE, length, offset) if length else b""


def _seed(seed: int) -> None:
    """Make everything that draws its own seed from the system, such as numpy's generators, a function of `seed`."""
    random.seed(seed)
    entropy = random.Random(f"system entropy {seed}").randbytes
    random.__dict__["_urandom"] = entropy  # what `secrets` and `SystemRandom` draw from
    os.urandom = entropy
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(seed & 0xFFFF_FFFF)  # drawn when numpy was loaded: the same in every child


def _isolate(proc: int) -> bool:
    """Enter new namespaces, without a user namespace if root allows that. True if the caller is the root of the host."""
    own = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    is_root: bool = kernel.libc.unshare(own) == 0
    if not is_root:
        kernel.enter_user_namespace(proc, inside=0, other_namespaces=own)
    kernel.check(kernel.libc.sethostname(b"sandbox", 7), "set the host name")
    return is_root


def _die_with(parent: int, current_parent: Callable[[], int]) -> None:
    """Die with `parent`; at once if it is dead already, since an earlier death sends no signal."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if current_parent() != parent:
        os._exit(1)


def _parent_on_host(proc: int) -> int:
    """The parent on the host. In a new pid namespace `os.getppid()` is always 0."""
    return int(kernel.read("self/status", directory=proc).partition(b"\nPPid:")[2].split(maxsplit=1)[0])


def fix_addresses() -> None:
    """Execute this script again without address randomisation, unless that is refused; default reprs differ then."""
    current = kernel.libc.personality(0xFFFFFFFF)
    if current < 0 or current & kernel.ADDR_NO_RANDOMIZE:
        return
    if kernel.libc.personality(current | kernel.ADDR_NO_RANDOMIZE) >= 0:
        os.execv(sys.executable, sys.orig_argv)


# A fork of a process with much memory costs more than one of a bare interpreter, so there are several profiles, and a program
# runs in the smallest that has its imports. A wrong choice costs time, never correctness.
_STANDARD = """
math cmath itertools functools collections collections.abc fractions decimal random re string heapq bisect statistics datetime
operator copy typing json io time
"""
_NUMPY = _STANDARD + "numpy numpy.linalg numpy.random numpy.fft numpy.polynomial"
_FULL = f"""{_NUMPY}
mpmath sympy sympy.abc sympy.solvers sympy.ntheory sympy.combinatorics sympy.geometry sympy.stats
scipy.special scipy.optimize scipy.integrate scipy.linalg scipy.stats scipy.sparse
"""
MODULES = {"bare": _STANDARD, "numpy": _NUMPY, "full": _FULL, "verify": ""}

_PRIMING = {
    "bare": "print(sum(n * n for n in range(9)))",
    "numpy": "import numpy as np\nprint(np.linalg.det(np.arange(9.0).reshape(3, 3) + np.eye(3)), np.arange(5).sum())",
    "full": """
import numpy as np, sympy as sp
x, y = sp.symbols("x y")
str(sp.solve(x**2 - 5*x + 6, x)), str(sp.solve([x + y - 3, x - y - 1], [x, y]))
str(sp.simplify(sp.sin(x)**2 + sp.cos(x)**2)), str(sp.integrate(x**2 * sp.exp(x), x)), str(sp.factor(x**3 - 1))
sp.factorint(360), str(sp.expand((x + 1)**5)), sp.latex(x**2 / 3), str(sp.limit(sp.sin(x) / x, x, 0))
str(sp.diff(sp.log(x) * sp.sqrt(x), x)), str(sp.Rational(1, 3) + sp.sqrt(2)), sp.N(sp.pi, 30)
np.linalg.eigvals(np.eye(3) + 1)
""",
}


def load_profile(profile: str, extra: list[str]) -> None:
    """Import the installed modules of `profile`, and `extra`, and run some of their code.

    Raises:
        ImportError: a module of `extra` is missing.
    """
    if profile == "verify":
        verify.prime()
    for name in MODULES[profile].split():
        with contextlib.suppress(ImportError):  # scipy is optional
            importlib.import_module(name)
    for name in extra:
        importlib.import_module(name)
    if code := _PRIMING.get(profile):
        with contextlib.suppress(ImportError), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            exec(compile(code, "<code>", "exec"), {})
    try:
        exec(compile("1 / 0", "<code>", "exec"), {})
    except ZeroDivisionError as error:
        program.format_error(error)
    linecache.clearcache()


def collapse(proc: int) -> None:
    """Ask for huge pages under the heap: a fork then copies one entry instead of 512. Failure does not matter."""
    with open(os.open("self/maps", os.O_RDONLY, dir_fd=proc)) as maps:
        for line in maps.read().splitlines():
            place, rights, *rest = line.split(maxsplit=5)
            is_anonymous = len(rest) < 4 or rest[3] == "[heap]"
            start, end = (int(part, 16) for part in place.split("-"))
            if is_anonymous and rights.startswith("rw") and end - start >= 2 << 20:
                kernel.libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), kernel.MADV_COLLAPSE)


# The loop.

_P_ALL, _WNOHANG, _WEXITED, _WNOWAIT = 0, 1, 4, 0x01000000
_POLLIN = 1
_NUM_DESCRIPTORS = 3
_GROUP_POLL_US = 200  # between looks at killed processes that are not our children yet
_MAX_CHILDREN_BYTES = 65_536


_INT, _LONG, _SIZE, _POINTER = ctypes.c_int, ctypes.c_long, ctypes.c_size_t, ctypes.c_void_p
_U32, _I32, _U64, _I64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64


class _Iovec(ctypes.Structure):
    _fields_ = (("base", _POINTER), ("length", _SIZE))


class _Message(ctypes.Structure):
    """`struct msghdr` in the layout of 64-bit Linux."""

    _address = (("name", _POINTER), ("name_length", _U32))
    _content = (("iov", ctypes.POINTER(_Iovec)), ("num_iov", _SIZE))
    _fields_ = (*_address, *_content, ("control", _POINTER), ("control_length", _SIZE), ("flags", _INT))


class _Rights(ctypes.Structure):
    """One SCM_RIGHTS message with room for the descriptors of a child: three, and padding for the alignment of the kernel."""

    _fields_ = (("length", _SIZE), ("level", _INT), ("kind", _INT), ("descriptors", _INT * 4))


class _Spawn(ctypes.Structure):
    """`wire.SPAWN`, then the path."""

    _pack_ = 1
    _fields_ = (("child", _U64), ("directory", ctypes.c_char * wire.MAX_SPAWN_BYTES))


class _Report(ctypes.Structure):
    """`wire.REPORT`, filled in place."""

    _pack_ = 1
    _fields_ = (("kind", _U32), ("status", _I32), ("child", _U64), ("pid", _I64), ("cpu_us", _U64), ("peak_kib", _U64))


class _Poll(ctypes.Structure):
    _fields_ = (("descriptor", _INT), ("events", ctypes.c_short), ("returned", ctypes.c_short))


class _SignalInfo(ctypes.Structure):
    """The part of `siginfo_t` that waitid fills, in the layout of 64-bit Linux."""

    _fields_ = (("before", _INT * 4), ("pid", _INT), ("rest", ctypes.c_char * 108))


class _Usage(ctypes.Structure):
    """`struct rusage` in the layout of 64-bit Linux."""

    _times = (("user_s", _LONG), ("user_us", _LONG), ("system_s", _LONG), ("system_us", _LONG))
    _fields_ = (*_times, ("peak_kib", _LONG), ("rest", _LONG * 13))


def serve(control: int, *, pid_namespace: int, run_child: Callable[[int, int, int, str], NoReturn]) -> None:
    """Fork a child for each packet on `control`, and report its start and its end, until the supervisor closes its side.

    Args:
        control: a seqpacket socket.
        pid_namespace: the namespace of this process, so that each child can get a new one; -1 if children share it.
        run_child: runs a child, given exchange, wake, output and directory.
    """
    libc = kernel.libc
    spawn, report, usage, status, siginfo = _Spawn(), _Report(), _Usage(), ctypes.c_int(), _SignalInfo()
    taken, given = _Rights(), _Rights(length=20, level=1, kind=1)  # SOL_SOCKET, SCM_RIGHTS, one descriptor
    incoming, outgoing = _message(spawn, ctypes.sizeof(taken), taken), _message(report, ctypes.sizeof(given), given)
    outgoing.control_length = 24  # one descriptor, aligned
    deaths_fd = _death_descriptor()
    children_fd = -1  # opened here: later there may be no descriptor left
    if pid_namespace < 0:
        children_fd = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY | os.O_CLOEXEC)
    polled = (_Poll * 2)(_Poll(control, _POLLIN), _Poll(deaths_fd, _POLLIN))
    drained = ctypes.create_string_buffer(128)
    # Built once: the loop then allocates nothing that outlives an iteration.
    report_at, usage_at, status_at = ctypes.byref(report), ctypes.byref(usage), ctypes.byref(status)
    siginfo_at = ctypes.byref(siginfo)
    incoming_at, outgoing_at, polled_at = ctypes.byref(incoming), ctypes.byref(outgoing), ctypes.byref(polled)
    descriptors, passed = taken.descriptors, given.descriptors
    requests, deaths = polled[0], polled[1]
    report_size, control_size = ctypes.sizeof(report), ctypes.sizeof(taken)
    gc.collect()
    gc.freeze()
    while True:
        if libc.poll(polled_at, 2, -1) < 0:
            continue
        if deaths.returned:
            libc.read(deaths_fd, drained, 128)
            while True:
                if pid_namespace < 0:
                    # Kill what the program left, while the zombie of its leader keeps the number of its process group.
                    siginfo.pid = 0
                    libc.waitid(_P_ALL, 0, siginfo_at, _WEXITED | _WNOHANG | _WNOWAIT)
                    if siginfo.pid:
                        libc.kill(-siginfo.pid, signal.SIGKILL)
                report.pid = libc.wait4(siginfo.pid or -1, status_at, _WNOHANG, usage_at)
                if report.pid <= 0:
                    break
                # The report means that all are gone: a lock that one of them holds must not reach the next program.
                while siginfo.pid and libc.kill(-siginfo.pid, 0) == 0:
                    if libc.wait4(-siginfo.pid, None, 0, None) < 0:
                        libc.usleep(_GROUP_POLL_US)
                report.kind = wire.KIND_SIGNALED if status.value & 0x7F else wire.KIND_EXITED
                report.status = status.value & 0x7F or (status.value >> 8) & 0xFF
                report.cpu_us = (usage.user_s + usage.system_s) * 1_000_000 + usage.user_us + usage.system_us
                report.peak_kib = usage.peak_kib
                libc.send(control, report_at, report_size, 0)
        if requests.returned:
            incoming.control_length = control_size
            length = libc.recvmsg(control, incoming_at, 0)
            if length <= 0:
                if pid_namespace < 0:
                    _end_descendants(children_fd)
                return
            report.child, report.status = spawn.child, 0
            try:
                if pid_namespace >= 0:
                    # After the death of pid 1 of a namespace, fork fails with ENOMEM until a new namespace is requested.
                    kernel.check(libc.setns(pid_namespace, kernel.CLONE_NEWPID), "setns")
                    kernel.check(libc.unshare(kernel.CLONE_NEWPID), "unshare a pid namespace")
                report.pid = os.fork()
            except OSError as error:  # no room for another process; the others live on
                report.kind, report.status = wire.KIND_REFUSED, error.errno or 0
                libc.send(control, report_at, report_size, 0)
            else:
                if report.pid == 0:
                    run_child(descriptors[0], descriptors[1], descriptors[2], spawn.directory.decode())
                passed[0] = libc.syscall(kernel.SYS_PIDFD_OPEN, ctypes.c_long(report.pid), 0)
                report.kind = wire.KIND_STARTED
                if passed[0] < 0 or libc.sendmsg(control, outgoing_at, 0) < 0:
                    if pid_namespace < 0:
                        _end_descendants(children_fd)
                    return  # the supervisor could not kill this child, so the fork server ends with all of them
                libc.close(passed[0])
            for index in range(_NUM_DESCRIPTORS):
                libc.close(descriptors[index])


def _end_descendants(children_fd: int) -> None:
    """Without a pid namespace: kill everything below this process, which adopts the orphans, until nothing is left."""
    while children := [int(pid) for pid in os.pread(children_fd, _MAX_CHILDREN_BYTES, 0).split()]:
        for pid in children:
            kernel.libc.kill(-pid, signal.SIGKILL)  # the process group of a program, which it cannot leave at L1
            kernel.libc.kill(pid, signal.SIGKILL)
        for _ in children:
            os.wait()


def _death_descriptor() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    signals = ctypes.c_uint64(1 << (signal.SIGCHLD - 1))
    return kernel.check(kernel.libc.signalfd(-1, ctypes.byref(signals), 0o2000000 | 0o4000), "signalfd")  # CLOEXEC, NONBLOCK


def _message(content: ctypes.Structure, control_length: int, control: _Rights) -> _Message:
    iov = _Iovec(base=ctypes.addressof(content), length=ctypes.sizeof(content))
    message = _Message(num_iov=1, control=ctypes.addressof(control), control_length=control_length)
    message.iov = ctypes.pointer(iov)
    return message
