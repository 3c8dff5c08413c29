"""A session forks itself: two copies that share nothing, each pid 1 of its own namespaces, and an empty stem that holds them.

    session ──fork──> midwife ──clone(new namespaces)──> continuation
       │                 └──────clone(new namespaces)──> branch
       └─ later: stem, `sleep` as pid 1 of the namespace that the copies' namespaces lie in

Only the thread that runs cells is copied, as with any fork. A copy has the variables, the files below /tmp and the open files
of its origin, and shared memory as it was; pipes, sockets and event loops are closed in it, and processes that cells started
are not copied. Random numbers go on from the same state in both.

This code runs among the program's own, so it is trusted with nothing. The supervisor answers the two clones one by one, gives
each copy its uid and its /tmp from outside, and looks at what the copy still holds before it believes that it is alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import platform
import random
import resource
import signal
import stat
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from . import kernel, trees, wire
from .confine import WAKE

if TYPE_CHECKING:
    from .cells import Line

_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x00200000, 0x01000000
_PR_GET_TID_ADDRESS = 40
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MAP_FIXED = 1, 2, 0x10
_SLEEP = ("/bin/sleep", "sleep", "2147483647")
_FILE_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_PATH

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter locked: nothing may run between a clone and its first line
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_random_state: Callable[[], object] = random.getstate
_restore_random = random.setstate
_midwives: list[int] = []


def fork(line: Line, flags: int, ends: list[int], open_line: Callable[[int], Line]) -> Line:
    """Start two copies of this process; returns in all three, in each with its own line.

    Args:
        line: this process's own.
        flags: the namespaces that each copy is in.
        ends: line and output of the first copy, then of the second.
        open_line: from a descriptor.
    """
    random_state = _random_state()  # a fork draws a new one
    try:
        midwife = os.fork()
    except OSError as error:
        line.send(wire.LINE_FAILED + f"fork: {error.strerror}".encode())
        midwife = -1
    if midwife:
        if midwife > 0:
            _midwives.append(midwife)
        for end in ends:
            os.close(end)
        return line
    try:
        _restore_random(random_state)  # type: ignore[arg-type]
        for own, other in ((ends[:2], ends[2:]), (ends[2:], ends[:2])):
            if _clone(flags) == 0:
                for end in other:
                    os.close(end)
                return _settle(line, own[0], own[1], open_line)
    except OSError as error:
        line.send(wire.LINE_FAILED + str(error).encode("utf-8", "backslashreplace"))
    os._exit(0)


def reap() -> None:
    """Of a fork that failed: the session goes on, and its midwife is dead."""
    for midwife in _midwives[:]:
        try:
            ended, _ = os.waitpid(midwife, os.WNOHANG)
        except ChildProcessError:  # a cell waits for all its children
            ended = midwife
        if ended:
            _midwives.remove(midwife)


def become_stem() -> NoReturn:
    """Give up everything, and sleep."""
    trees.clear("/tmp")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if os.path.exists(_SLEEP[0]):
        os.execv(_SLEEP[0], _SLEEP[1:])
    os.execv(sys.executable, [sys.executable, "-ISc", "import signal; signal.pause()"])


def _clone(flags: int) -> int:
    """`fork` into new namespaces. For a process with one thread: it skips what the interpreter and libc prepare for more."""
    number = _SYS_CLONE[platform.machine()]
    thread_id_at = ctypes.c_void_p()
    if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(thread_id_at), 0, 0, 0) == 0 and thread_id_at.value:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID  # where libc remembers it
    tid_arguments = (thread_id_at, None) if platform.machine() == "x86_64" else (None, thread_id_at)
    return kernel.check(
        _libc.syscall(number, ctypes.c_ulong(flags | signal.SIGCHLD), None, None, *tid_arguments), "clone into new namespaces"
    )


def _settle(line: Line, own_line: int, own_output: int, open_line: Callable[[int], Line]) -> Line:
    """In a copy: everything of its own, while the supervisor gives it what it cannot take."""
    old_files = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    place = os.getcwd() if _has_place() else wire.WORK_DIRECTORY
    line.close()
    for target in (1, 2):
        os.dup2(own_output, target)
    os.close(own_output)
    os.dup2(own_line, WAKE, inheritable=False)
    os.close(own_line)
    line = open_line(WAKE)
    line.send(wire.LINE_BORN)
    packet, _ = line.receive()
    try:
        mappings = json.loads(packet[1:])
        for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (hard, hard))
        copied = trees.copy(old_files, "/tmp")
        for mapping in mappings:
            _unshare_memory(copied, **mapping)
        _replace_descriptors(copied, keep=(WAKE, old_files))
        os.close(old_files)
        os.chdir(place if os.path.isdir(place) else "/tmp")
        kernel.drop_capabilities()
        line.send(wire.LINE_DRESSED)
    except (OSError, ValueError) as error:
        line.send(wire.LINE_FAILED + str(error).encode("utf-8", "backslashreplace"))
        os._exit(1)
    return line


def _has_place() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _replace_descriptors(copied: dict[tuple[int, int], str], *, keep: tuple[int, ...]) -> None:
    """Open again what is a file, at the same place in it; put something that only fails in the place of everything else."""
    closed = os.open(os.devnull, os.O_PATH)
    for number in (0, *range(3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])):
        if number in keep or number == closed:
            continue
        try:
            held, flags = os.fstat(number), fcntl.fcntl(number, fcntl.F_GETFL)
        except OSError:
            continue
        inherits = os.get_inheritable(number)
        if stat.S_ISCHR(held.st_mode):
            continue  # the devices of the sandbox: none of them remembers anything
        new = closed
        if path := copied.get((held.st_dev, held.st_ino)):
            new = _open_again(number, flags, path)
        elif stat.S_ISREG(held.st_mode) and not flags & os.O_PATH:
            new = _copy_of(number, held.st_size)
        os.dup2(new, number, inheritable=inherits)
        if new != closed:
            os.close(new)
    os.close(closed)


def _open_again(number: int, flags: int, path: str) -> int:
    new = os.open(path, flags & _FILE_FLAGS)
    if not flags & os.O_PATH:
        os.lseek(new, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    return new


def _copy_of(number: int, length: int) -> int:
    """A file of its own without a name, for one that has lost it, or that lies where the copy can only read."""
    new = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    trees.copy_content(number, new, length)
    os.lseek(new, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    return new


def _unshare_memory(
    copied: dict[tuple[int, int], str], *, start: int, length: int, offset: int, protection: int, device: int, inode: int
) -> None:
    """Put memory of its own, with the same content, where this process shares some with its origin."""
    if path := copied.get((device, inode)):
        writable = protection & mmap.PROT_WRITE
        file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        address = _libc.mmap(
            ctypes.c_void_p(start),
            ctypes.c_size_t(length),
            protection,
            mmap.MAP_SHARED | _MAP_FIXED,
            file,
            ctypes.c_long(offset),
        )
        os.close(file)
    else:
        readable = mmap.PROT_READ | mmap.PROT_WRITE
        kinds = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        new = _libc.mmap(None, ctypes.c_size_t(length), readable, kinds, -1, ctypes.c_long(0))
        _check_address(new)
        if protection & mmap.PROT_READ:
            ctypes.memmove(new, start, length)
        _libc.mprotect(ctypes.c_void_p(new), ctypes.c_size_t(length), protection)
        address = _libc.mremap(
            ctypes.c_void_p(new),
            ctypes.c_size_t(length),
            ctypes.c_size_t(length),
            _MREMAP_MAYMOVE | _MREMAP_FIXED,
            ctypes.c_void_p(start),
        )
    _check_address(address)


def _check_address(address: int) -> None:
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"copy shared memory: {os.strerror(ctypes.get_errno())}")
