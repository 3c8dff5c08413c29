"""Forks a session: two copies, each pid 1 of its own namespaces, and an empty process that holds both.

    session ──fork──> midwife ──clone(new namespaces)──> continuation
       │                 └──────clone(new namespaces)──> branch
       └─ later: stem, `sleep` as pid 1 of the namespace that contains the namespaces of both copies

The supervisor forks only a session with one thread, no child process, no open file and no shared memory. A copy has the
variables and the files below /tmp of its origin, and the same state of random numbers.

Programs of the session can change this code, so the supervisor trusts nothing that it says. The supervisor answers the two
clones, gives each copy its uid and its /tmp from outside, and inspects each copy before it uses it.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import stat
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from . import kernel, wire

if TYPE_CHECKING:
    from .cells import Line


import socket

from . import confine

_CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x00200000, 0x01000000
_PR_GET_TID_ADDRESS = 40
_SLEEP = ("/bin/sleep", "sleep", "2147483647")
_PART_BYTES = 1 << 20

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock: no other code runs between a clone and its first line
_random_state: Callable[[], object] = random.getstate
_restore_random = random.setstate


def fork(line: Line, flags: int, ends: list[int], open_line: Callable[[int], Line]) -> Line:
    """Start two copies of this process. Returns in all three processes, in each with its own line.

    Args:
        line: the line of this process.
        flags: the namespaces of each copy, as flags of clone.
        ends: line and output of the first copy, then of the second.
        open_line: makes a line of a descriptor.
    """
    random_state = _random_state()  # `os.fork` seeds the child again
    try:
        midwife = os.fork()
    except OSError as error:
        line.send(wire.LINE_FAILED + f"fork: {error.strerror}".encode())
        midwife = -1
    if midwife:
        for end in ends:
            os.close(end)
        if midwife > 0:
            os.waitpid(midwife, 0)  # it exits after the clones; the supervisor kills it when the fork fails
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


def become_stem() -> NoReturn:
    """Remove the files below /tmp, and execute a program that sleeps."""
    _clear("/tmp")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if os.path.exists(_SLEEP[0]):
        os.execv(_SLEEP[0], _SLEEP[1:])
    os.execv(sys.executable, [sys.executable, "-ISc", "import signal; signal.pause()"])


def _clone(flags: int) -> int:
    """Fork into new namespaces. Only for a process with one thread: this skips what the interpreter and libc do for more."""
    thread_id_at = ctypes.c_void_p()
    if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(thread_id_at), 0, 0, 0) == 0 and thread_id_at.value:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID  # libc stores the thread id there
    result = _libc.syscall(kernel.SYS_CLONE, ctypes.c_ulong(flags | signal.SIGCHLD), None, None, thread_id_at, None)
    return kernel.check(result, "clone into new namespaces")


def _settle(line: Line, own_line: int, own_output: int, open_line: Callable[[int], Line]) -> Line:
    """In a copy: take its own line and output, wait for its /tmp, and copy the files of the origin into it."""
    origin_files = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    directory = _working_directory()
    nothing = os.open(os.devnull, os.O_RDONLY)
    line.close()
    for source, target in ((nothing, 0), (own_output, 1), (own_output, 2)):
        os.dup2(source, target)
    os.dup2(own_line, confine.WAKE, inheritable=False)
    for descriptor in (nothing, own_output, own_line):
        os.close(descriptor)
    line = open_line(confine.WAKE)
    line.send(wire.LINE_BORN)
    line.receive()  # the supervisor has mounted the new /tmp
    try:
        for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (hard, hard))
        os.fchdir(origin_files)
        os.close(origin_files)
        _copy_tree(".", "/tmp")
        os.chdir(directory if os.path.isdir(directory) else wire.WORK_DIRECTORY)
        kernel.drop_capabilities()
        line.send(wire.LINE_DRESSED)
    except OSError as error:
        line.send(wire.LINE_FAILED + f"copy its files: {error}".encode("utf-8", "backslashreplace"))
        os._exit(1)
    return line


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return wire.WORK_DIRECTORY


def _copy_tree(source: str, target: str) -> None:
    """Copy directories, files and symbolic links with their modes and times. Pipes and sockets are left out."""
    for name in reversed(os.listdir(source)):  # newest first: the copy lists its files in the same order
        old, new = f"{source}/{name}", f"{target}/{name}"
        status = os.lstat(old)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(old), new)
            continue
        if stat.S_ISDIR(status.st_mode):
            os.mkdir(new)
            _copy_tree(old, new)
        elif stat.S_ISREG(status.st_mode):
            with open(old, "rb") as reader, open(new, "xb") as writer:
                while part := reader.read(_PART_BYTES):
                    writer.write(part)
        else:
            continue
        os.chmod(new, stat.S_IMODE(status.st_mode))
        os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))


def _clear(path: str) -> None:
    """Remove the content of `path`, as far as this process may."""
    with os.scandir(path) as entries:
        for entry in list(entries):
            try:
                if entry.is_dir(follow_symlinks=False):
                    _clear(entry.path)
                    os.rmdir(entry.path)
                else:
                    os.unlink(entry.path)
            except OSError:
                continue


def main() -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[2]))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, wire.NAMESPACE_STEP.size, 2)
        if not message:
            return
        step, pid, owner, max_processes, inner_uid = wire.NAMESPACE_STEP.unpack(message)
        if (child := os.fork()) == 0:
            answer = b""
            try:
                if os.geteuid() != owner:  # the owner of a user namespace has every right in it
                    kernel.become(owner)
                kernel.check(kernel.libc.setns(descriptors[0], kernel.CLONE_NEWUSER), "join the user namespace of a session")
                if step == wire.STEP_PREPARE:
                    for file in ("uid_map", "gid_map"):
                        kernel.write(f"/proc/{pid}/{file}", f"{inner_uid} {inner_uid} 1")
                    of_copy = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS
                    kernel.check(kernel.libc.setns(descriptors[1], of_copy), "join the namespaces of a copy")
                    confine.mount_tmp()
                hard = resource.prlimit(pid, resource.RLIMIT_NPROC)[1]
                soft = max_processes if hard == resource.RLIM_INFINITY else min(max_processes, hard)
                resource.prlimit(pid, resource.RLIMIT_NPROC, (soft, hard))
            except OSError as error:
                answer = str(error).encode()
            finally:
                control.send(answer or wire.STEP_DONE)
                os._exit(0)
        os.waitpid(child, 0)
        for descriptor in descriptors:
            os.close(descriptor)
