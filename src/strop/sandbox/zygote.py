"""The fork server: a small trusted process that forks one fresh, confined child for each program.

Run as a script by `local.py`, which imports nothing of it but the wire format: exec'ed clean, standard library only.
A child inherits the zygote's memory, so the zygote never reads a program, its stdin or its output; it passes on file
descriptors. It is pid 1 of a pid namespace: when it dies the kernel kills every program with all its descendants.

    supervisor --(seqpacket: call id + payload, stdin, output, record)--> zygote --fork--> child, pid 1 of its own namespace
    supervisor <--(started: call id, pid, pidfd)-- <--(ended: pid, status)--

`repr(object())` must not differ between two equal calls. Addresses are not randomised, and the loop below talks to the kernel
through buffers made once, so that the heap at each fork is the same whatever ran before.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import ctypes
import errno
import gc
import linecache
import mmap
import os
import platform
import random
import resource
import signal
import struct
import sys
import traceback
from _ast import Expr, Expression, Module, PyCF_ONLY_AST
from collections.abc import Callable
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn, TextIO

PAYLOAD_HEADER = struct.Struct("<QQI")  # seed, memory in bytes, length of the working directory's path
RECORD_HEADER = struct.Struct("<cI")  # what it is, length of the text
RECORD_BYTES = 65_536
RECORD_ECHO, RECORD_ERROR, RECORD_SETUP = b"v", b"x", b"s"
READY = b"\x01"  # the first byte on the output pipe: everything after it is the program's own doing
REPORT = struct.Struct("<IiQq")  # kind, status, call id, pid
KIND_HELLO, KIND_FAILED, KIND_STARTED, KIND_EXITED, KIND_SIGNALED = range(5)
MAX_TRACEBACK_CHARS = 8_000
MAX_FRAMES = 2_000  # twice Python's recursion limit; formatting millions takes longer than a program may run
SPARE_BYTES = 32 << 20  # for the traceback of a program that has used all its memory
MAX_PROCESSES = 32  # threads count too
MAX_FILE_BYTES = 16 << 20
WORK_DIRECTORY = "/tmp/work"
WORK_OPTIONS = b"size=64m,nr_inodes=4096,mode=0777"
UNPRIVILEGED_UID = 1_000_000  # on the host, when started by root: RLIMIT_NPROC is not enforced for the kernel's uid 0
INNER_UID = 1_000  # what a program sees

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_ADDR_NO_RANDOMIZE = 0x0040000
_SYS_PIDFD_OPEN, _SYS_MOUNT_SETATTR = 434, 442  # the same on every architecture
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_P_ALL, _WNOHANG, _WEXITED, _CLD_EXITED = 0, 1, 4, 1
_POLLIN = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


# The loop: one process that only waits, forks and reaps.


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Message(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iov", ctypes.POINTER(_Iovec)),
        ("num_iov", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Control(ctypes.Structure):
    """One SCM_RIGHTS message with room for four descriptors."""

    _fields_ = (
        ("length", ctypes.c_size_t),
        ("level", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("descriptors", ctypes.c_int * 4),
    )


class _Report(ctypes.Structure):
    """`REPORT`, as the loop fills it in place."""

    _pack_ = 1
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("status", ctypes.c_int32),
        ("call", ctypes.c_uint64),
        ("pid", ctypes.c_int64),
    )


class _Poll(ctypes.Structure):
    _fields_ = (("descriptor", ctypes.c_int), ("events", ctypes.c_short), ("returned", ctypes.c_short))


class _Exit(ctypes.Structure):
    """The part of `siginfo_t` that waitid fills, as 64-bit Linux lays it out."""

    _fields_ = (
        ("signo", ctypes.c_int),
        ("error", ctypes.c_int),
        ("code", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("pid", ctypes.c_int),
        ("uid", ctypes.c_uint32),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 100),
    )


class Zygote:
    """Forks a child for each request on the control socket, and reports its start and its end."""

    def __init__(self, control: int, *, proc: int, is_isolated: bool, is_root: bool) -> None:
        self.control = control
        self.proc = proc  # the host's /proc, from before it went out of sight
        self.is_isolated = is_isolated
        self.is_root = is_root
        self.pid_namespace = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc) if is_isolated else -1
        self.base_memory = _address_space(proc)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        signals = ctypes.c_uint64(1 << (signal.SIGCHLD - 1))
        self.deaths = _check(_libc.signalfd(-1, ctypes.byref(signals), 0o2000000 | 0o4000), "signalfd")  # CLOEXEC, NONBLOCK

    def serve(self) -> None:
        """Until the supervisor closes its end."""
        call, report, ended = ctypes.c_uint64(), _Report(), _Exit()
        taken, given = _Control(), _Control(length=20, level=1, kind=1)  # SOL_SOCKET, SCM_RIGHTS, one descriptor
        incoming = _message(call, taken)
        outgoing = _message(report, given)
        polled = (_Poll * 2)(_Poll(self.control, _POLLIN), _Poll(self.deaths, _POLLIN))
        drained = ctypes.create_string_buffer(128)
        # References to foreign memory made once: the loop then allocates nothing that outlives an iteration.
        report_at, ended_at = ctypes.byref(report), ctypes.byref(ended)
        incoming_at, outgoing_at, polled_at = ctypes.byref(incoming), ctypes.byref(outgoing), ctypes.byref(polled)
        descriptors, passed = taken.descriptors, given.descriptors
        control, deaths = polled[0], polled[1]
        report_size, control_size = ctypes.sizeof(report), ctypes.sizeof(taken)
        gc.collect()
        gc.freeze()
        while True:
            if _libc.poll(polled_at, 2, -1) < 0:
                continue
            if deaths.returned:
                _libc.read(self.deaths, drained, 128)
                while True:
                    ended.pid = 0
                    _libc.waitid(_P_ALL, 0, ended_at, _WEXITED | _WNOHANG)
                    if ended.pid == 0:
                        break
                    report.kind = KIND_EXITED if ended.code == _CLD_EXITED else KIND_SIGNALED
                    report.status, report.pid = ended.status, ended.pid
                    _libc.send(self.control, report_at, report_size, 0)
            if control.returned:
                incoming.control_length = control_size
                if _libc.recvmsg(self.control, incoming_at, 0) <= 0:
                    return
                if self.is_isolated:
                    # After the init of a pid namespace has died, fork fails with ENOMEM until a new one is asked for.
                    _check(_libc.setns(self.pid_namespace, _CLONE_NEWPID), "setns")
                    _check(_libc.unshare(_CLONE_NEWPID), "unshare a pid namespace")
                report.pid = os.fork()
                if report.pid == 0:
                    self.run_child(*descriptors)
                passed[0] = _libc.syscall(_SYS_PIDFD_OPEN, ctypes.c_long(report.pid), 0)
                report.kind, report.call, report.status = KIND_STARTED, call.value, 0
                _libc.sendmsg(self.control, outgoing_at, 0)
                _libc.close(passed[0])
                for index in range(4):
                    _libc.close(descriptors[index])

    def run_child(self, payload: int, stdin: int, output: int, record: int) -> NoReturn:
        """The life of one program, from the fork to `_exit`."""
        shown = mmap.mmap(record, RECORD_BYTES)  # outlives every descriptor that the program may close
        try:
            content = _read_all(payload)
            seed, memory_bytes, path_length = PAYLOAD_HEADER.unpack_from(content)
            start = PAYLOAD_HEADER.size + path_length
            directory, code = content[PAYLOAD_HEADER.size : start].decode(), content[start:].decode()
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.setsid()
            if self.is_isolated:
                self._confine()
                directory = WORK_DIRECTORY
            os.chdir(directory)
            os.dup2(stdin, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.closerange(3, 4096)
            _limit(self.base_memory + memory_bytes)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - for life
            sys.stdout = _text_stream(1)
            sys.stderr = _text_stream(2)
            sys.__dict__.update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)  # read-only to type checkers
            _seed(seed)
            os.write(1, READY)
        except BaseException as error:
            _write_record(shown, RECORD_SETUP, f"{type(error).__name__}: {error}")
            os._exit(1)
        _run_program(code, shown)

    def _confine(self) -> None:
        """Into namespaces of its own, a fresh working directory, no capabilities and no way to get any."""
        _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWIPC), "unshare mount and ipc namespaces")
        flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
        _check(_libc.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, WORK_OPTIONS), "mount /tmp")
        os.umask(0)
        for path in (WORK_DIRECTORY, "/tmp/shm"):
            os.mkdir(path, 0o777)
        os.umask(0o022)
        if self.is_root:
            os.setgroups([])
            os.setresgid(UNPRIVILEGED_UID, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
            os.setresuid(UNPRIVILEGED_UID, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
            _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else the maps below belong to root
        # A user namespace for each call: RLIMIT_NPROC is counted in it, and the same uid is seen on every machine.
        _enter_user_namespace(self.proc, inside=INNER_UID)
        try:
            _write_at(self.proc, "sys/user/max_user_namespaces", "0")
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):  # containers mount it read-only
                raise
        header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # capability version 3
        _check(_libc.capset(header, nothing), "drop capabilities")
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")


def _message(content: ctypes.Structure | ctypes.c_uint64, control: _Control) -> _Message:
    iov = _Iovec(base=ctypes.addressof(content), length=ctypes.sizeof(content))
    length = control.length or ctypes.sizeof(control)
    message = _Message(num_iov=1, control=ctypes.addressof(control), control_length=length)
    message.iov = ctypes.pointer(iov)
    return message


def _read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _text_stream(descriptor: int) -> TextIO:
    """Line by line, so that what was printed before a kill is kept; surrogates are shown escaped."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _limit(memory_bytes: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, MAX_PROCESSES),
    ):
        hard = resource.getrlimit(kind)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes + SPARE_BYTES))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that grows too large is an OSError


def _seed(seed: int) -> None:
    """Make everything that draws its own seed from the system, such as numpy's generators, a function of `seed`."""
    random.seed(seed)
    entropy = random.Random(f"system entropy {seed}").randbytes
    random.__dict__["_urandom"] = entropy  # what `secrets` and `SystemRandom` draw from
    os.urandom = entropy


def _address_space(proc: int) -> int:
    descriptor = os.open("self/statm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return int(os.read(descriptor, 64).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)


# The program.


def _run_program(
    code: str,
    shown: mmap.mmap,
    # Bound now: the program may replace any of them.
    exit_now: Callable[[int], NoReturn] = os._exit,
    getpid: Callable[[], int] = os.getpid,
    run_exit_hooks: Callable[[], None] = atexit._run_exitfuncs,
    modules: dict[str, ModuleType] = sys.modules,
    make_text: Callable[[object], str] = repr,
) -> NoReturn:
    own_pid, streams = getpid(), (sys.stdout, sys.stderr)
    exit_code, kind, text = 0, b"", ""
    try:
        value = _execute(code)
        if value is not None:
            kind, text = RECORD_ECHO, make_text(value)
    except SystemExit as error:
        exit_code = _exit_code(error, streams[1])
    except BaseException as error:
        exit_code, kind, text = 1, RECORD_ERROR, _format(error)
    try:
        if (threading := modules.get("threading")) is not None:
            threading._shutdown()  # waits for threads that are no daemons, as the interpreter does
        run_exit_hooks()
    except BaseException as error:
        if not exit_code:
            exit_code, kind, text = 1, RECORD_ERROR, _format(error)
    if getpid() != own_pid:  # a fork of the program that came back here; it has no record of its own
        if kind == RECORD_ERROR:
            _try(streams[1].write, text)
    elif kind:
        _write_record(shown, kind, text)
    for stream in streams:
        _try(stream.flush)
    exit_now(exit_code)


def _execute(code: str) -> object:
    """Run the program; the value of its last statement if that is an expression without a semicolon after it, else None."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    code = code.removeprefix("\ufeff")
    # Lines as the compiler counts them; a last one without its end would shift the carets of a traceback.
    lines = [f"{line}\n" for line in code.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    linecache.cache["<code>"] = (len(code), None, lines, "<code>")
    tree = compile(code, "<code>", "exec", PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, Module)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, Expr):
        tree.body.pop()
    else:
        last = None
    body: CodeType = compile(tree, "<code>", "exec", dont_inherit=True)
    flags = body.co_flags & 0x1FF0000  # what `from __future__` asked for
    tail = None if last is None else compile(Expression(last.value), "<code>", "eval", flags, dont_inherit=True)
    exec(body, main.__dict__)
    if last is None or tail is None:
        return None
    value: object = eval(tail, main.__dict__)
    return None if _is_silenced(code, last) else value


def _is_silenced(code: str, last: Expr) -> bool:
    """Whether a semicolon follows the last statement, which hides its value as in IPython."""
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    lines = code.encode().splitlines(keepends=True)  # columns count bytes
    after = lines[last.end_lineno - 1][last.end_col_offset :]
    return after.lstrip().startswith(b";")


def _exit_code(error: SystemExit, stderr: TextIO) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    _try(lambda: stderr.write(f"{error.code}\n"))
    return 1


def _format(error: BaseException, format_exception: Callable[[BaseException], list[str]] = traceback.format_exception) -> str:
    """The traceback without the runner's frames and without the places where this machine keeps its libraries."""
    try:
        memory_bytes = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        error.__traceback__ = _fold(frames)
        if isinstance(error, SyntaxError) and error.text is None and error.filename == "<code>" and error.lineno:
            error.text = linecache.getline("<code>", error.lineno)
        text = "".join(format_exception(error))
        for prefix, name in _LIBRARIES:
            text = text.replace(prefix, name)
    except BaseException as broken:  # an exception whose own text raises, or a program that broke the formatter
        text = f"{type(error).__name__} (its traceback cannot be shown: {type(broken).__name__})\n"
    return _cut(text, MAX_TRACEBACK_CHARS)


def _fold(frames: TracebackType | None) -> TracebackType | None:
    """The same frames; of more than `MAX_FRAMES`, the first half and the last half of so many."""
    count, frame = 0, frames
    while frame is not None:
        count, frame = count + 1, frame.tb_next
    if count <= MAX_FRAMES or frames is None:
        return frames
    last_of_head, first_of_tail = frames, frames
    for index in range(count - MAX_FRAMES // 2):
        assert first_of_tail.tb_next is not None
        first_of_tail = first_of_tail.tb_next
        if index == MAX_FRAMES // 2 - 2:
            last_of_head = first_of_tail
    last_of_head.tb_next = first_of_tail
    return frames


_LIBRARIES: list[tuple[str, str]] = []  # (where it lies, what is shown), longest first; filled at start


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _write_record(shown: mmap.mmap, kind: bytes, text: str) -> None:
    room = RECORD_BYTES - RECORD_HEADER.size
    # Eight bytes a character is more than any encoding of one, so that no cut falls into the middle of it.
    encoded = _cut(text, room // 8).encode("utf-8", "backslashreplace")[:room]
    shown[RECORD_HEADER.size : RECORD_HEADER.size + len(encoded)] = encoded
    shown[: RECORD_HEADER.size] = RECORD_HEADER.pack(kind, len(encoded))


def _try(action: Callable[..., object], *arguments: str) -> None:
    """For the last words of a program that may have closed or replaced its own streams."""
    try:
        action(*arguments)
    except BaseException:
        return


# The start: namespaces and a file system of its own, once.


def _write_at(directory: int, path: str, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, f"write {text!r} to /proc/{path}: {error.strerror}") from error


def _enter_user_namespace(proc: int, *, inside: int, other_namespaces: int = 0) -> None:
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWUSER | other_namespaces), "unshare a user namespace")
    _write_at(proc, "self/setgroups", "deny")
    _write_at(proc, "self/uid_map", f"{inside} {uid} 1")
    _write_at(proc, "self/gid_map", f"{inside} {gid} 1")


def _isolate(proc: int) -> bool:
    """Into fresh namespaces, without a user namespace where root allows it. True if the caller is the host's root."""
    namespaces = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    if _libc.unshare(namespaces) == 0:
        return True
    _enter_user_namespace(proc, inside=0, other_namespaces=namespaces)
    return False


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    _check(result, f"mount {target}")


def _build_root(paths: list[str]) -> None:
    """A root of its own that shows `paths` read-only, five devices, and nothing else of the host."""
    pivot_root = _SYS_PIVOT_ROOT.get(platform.machine())
    if pivot_root is None:
        raise OSError(errno.ENOSYS, f"pivot_root has no known number on {platform.machine()}")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=1m")
    for name in ("/tmp/old", "/tmp/new"):
        os.mkdir(name)
    _mount("/tmp/new", "/tmp/new", "", _MS_BIND)
    _check(_libc.syscall(pivot_root, b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    for path in [*paths, "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]:
        _show(path)
    os.mkdir("/new/tmp")
    os.symlink("/tmp/shm", "/new/dev/shm")
    _check(_libc.syscall(pivot_root, b"/new", b"/new/tmp"), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/tmp", _MNT_DETACH), "umount the host's root")
    _mount("none", "/", "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _place_inside(path: str) -> str:
    """Where a program finds what the host has at `path`: /tmp is each call's own, so what lies there is shown elsewhere."""
    return f"/moved{path}" if path.startswith("/tmp/") else path


def _show(path: str) -> None:
    source, target = f"/old{path}", f"/new{_place_inside(path)}"
    if os.path.islink(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif os.path.exists(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    else:
        return
    _mount(source, target, "", _MS_BIND | _MS_REC)
    no_device = 0 if path.startswith("/dev/") else _MOUNT_ATTR_NODEV
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | no_device, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(attributes), ctypes.c_size_t(32)
    )
    _check(result, f"mount_setattr {target} (needs Linux 5.12)")


def _fix_addresses() -> None:
    """Execute this script again without address randomisation; where that is refused, default reprs will differ."""
    current = _libc.personality(0xFFFFFFFF)
    if current < 0 or current & _ADDR_NO_RANDOMIZE:
        return
    if _libc.personality(current | _ADDR_NO_RANDOMIZE) >= 0:
        os.execv(sys.executable, sys.orig_argv)


def _send(control: int, kind: int, text: str = "") -> None:
    os.write(control, REPORT.pack(kind, 0, 0, 0) + text.encode())


def _warm() -> None:
    """Touch what every program needs, so that its pages and caches are shared instead of made again in each child."""
    try:
        exec(compile("1 / 0", "<code>", "exec"), {})
    except ZeroDivisionError as error:
        _format(error)
    linecache.clearcache()


def main() -> None:
    control, level, shown_paths, libraries = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(":"), sys.argv[4].split(":")
    _fix_addresses()
    sys.argv = [""]
    # What `site` would have added; it does not run here.
    builtins.exit, builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D"), _sitebuiltins.Quitter("quit", "Ctrl-D")
    is_isolated, is_root = level == "namespaces", False
    place = _place_inside if is_isolated else str
    sys.path[:] = [place(path) for path in [*sys.path, *libraries]]
    _LIBRARIES.extend((place(path), "site-packages") for path in libraries)
    _LIBRARIES.append((place(os.path.dirname(os.__file__)), "python"))
    _LIBRARIES.sort(key=lambda pair: -len(pair[0]))
    os.set_inheritable(control, False)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _write_at(proc, "self/oom_score_adj", "1000")
        if is_isolated:
            is_root = _isolate(proc)
            if (pid := os.fork()) != 0:
                os.close(control)
                os.waitpid(pid, 0)
                return
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.setsid()
            _build_root(shown_paths)
        _warm()
        zygote = Zygote(control, proc=proc, is_isolated=is_isolated, is_root=is_root)
    except OSError as error:
        _send(control, KIND_FAILED, str(error.strerror))
        return
    _send(control, KIND_HELLO)
    zygote.serve()


if __name__ == "__main__":
    main()
