"""A fork server and the start of its children: isolates itself, loads modules, gives each child its work.

Its argument is one JSON object.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import contextlib
import ctypes
import functools
import importlib
import json
import linecache
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from . import cells, confine, forkserver, kernel, program, seccomp, verify
from .wire import JOB_VERIFY, KIND_FAILED, KIND_HELLO, READY, RECORD_BYTES, RECORD_SETUP, REPORT, SESSION_MARK, STAMP, WORK


def main() -> None:
    fix_addresses()
    settings = json.loads(sys.argv[2])
    control = settings["control"]
    os.set_inheritable(control, False)
    try:
        confinement, pid_namespace = start(settings)
    except (OSError, ImportError) as error:
        said = (isinstance(error, OSError) and error.strerror) or str(error)
        os.write(control, REPORT.pack(KIND_FAILED, 0, 0, 0, 0, 0) + said.encode())
        return
    os.write(control, REPORT.pack(KIND_HELLO, 0, 0, 0, 0, 0))
    forkserver.serve(control, pid_namespace=pid_namespace, run_child=functools.partial(live, confinement))


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
    if directory.startswith(SESSION_MARK):
        cells.live(confinement, exchange, wake, output, directory.removeprefix(SESSION_MARK), _seed)
    record: mmap.mmap | None = None
    try:
        record = mmap.mmap(exchange, RECORD_BYTES)  # stays valid when its descriptor is closed
        confinement.apply(directory)
        confine.take_streams(exchange, wake, output)
        os.read(confine.WAKE, 8)
        os.close(confine.WAKE)
        header = os.pread(confine.EXCHANGE, WORK.size, RECORD_BYTES)
        job, seed, memory_bytes, cpu_s, max_processes, file_mib, code_length, stdin_length = WORK.unpack(header)
        code = _read(code_length, RECORD_BYTES + WORK.size)
        stdin = _read(stdin_length, RECORD_BYTES + WORK.size + code_length)
        os.close(confine.EXCHANGE)
        confine.give_stdin(stdin)
        confinement.limit(memory_bytes=memory_bytes, cpu_s=cpu_s, max_processes=max_processes, file_bytes=file_mib << 20)
        _seed(seed)
        record[: STAMP.size] = STAMP.pack(time.monotonic())
        os.write(1, READY)
    except BaseException as error:
        if record is not None:
            program.write_record(record, RECORD_SETUP, f"{type(error).__name__}: {error}")
        os._exit(1)
    if job == JOB_VERIFY:
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
_FULL = (
    _NUMPY
    + """
mpmath sympy sympy.abc sympy.solvers sympy.ntheory sympy.combinatorics sympy.geometry sympy.stats
scipy.special scipy.optimize scipy.integrate scipy.linalg scipy.stats scipy.sparse
"""
)
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
