"""The loop of a fork server, which waits, forks and reaps. A child gets its work directly from the supervisor.

A child inherits the memory of this process, so no program, input or output passes through it, only descriptors. Each child is
pid 1 of a pid namespace: when it dies, the kernel kills everything that it started.

    supervisor --(id of the child + exchange, wake, output)--> fork server --fork--> child: confined, waiting on `wake`
    supervisor <--(started: id, pid, pidfd)-- <--(ended: pid, status, CPU time, memory)--

`repr(object())` must not differ between two equal calls. Addresses are not randomised, and the loop talks to the kernel through
buffers that are built once, so that the heap is the same at each fork.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Callable
from typing import NoReturn

from . import kernel
from .wire import KIND_EXITED, KIND_REFUSED, KIND_SIGNALED, KIND_STARTED, MAX_SPAWN_BYTES

_P_ALL, _WNOHANG, _WEXITED, _WNOWAIT = 0, 1, 4, 0x01000000
_POLLIN = 1
_NUM_DESCRIPTORS = 3
_GROUP_POLL_US = 200  # between looks at killed processes that are not our children yet
_MAX_CHILDREN_BYTES = 65_536


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


class _Rights(ctypes.Structure):
    """One SCM_RIGHTS message with room for the descriptors of a child."""

    _fields_ = (
        ("length", ctypes.c_size_t),
        ("level", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("descriptors", ctypes.c_int * 4),  # three, and padding for the alignment of the kernel
    )


class _Spawn(ctypes.Structure):
    """`wire.SPAWN`, then the path."""

    _pack_ = 1
    _fields_ = (("child", ctypes.c_uint64), ("directory", ctypes.c_char * MAX_SPAWN_BYTES))


class _Report(ctypes.Structure):
    """`wire.REPORT`, filled in place."""

    _pack_ = 1
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("status", ctypes.c_int32),
        ("child", ctypes.c_uint64),
        ("pid", ctypes.c_int64),
        ("cpu_us", ctypes.c_uint64),
        ("peak_kib", ctypes.c_uint64),
    )


class _Poll(ctypes.Structure):
    _fields_ = (("descriptor", ctypes.c_int), ("events", ctypes.c_short), ("returned", ctypes.c_short))


class _SignalInfo(ctypes.Structure):
    """The part of `siginfo_t` that waitid fills, in the layout of 64-bit Linux."""

    _fields_ = (("before", ctypes.c_int * 4), ("pid", ctypes.c_int), ("rest", ctypes.c_char * 108))


class _Usage(ctypes.Structure):
    """`struct rusage` in the layout of 64-bit Linux."""

    _fields_ = (
        ("user_s", ctypes.c_long),
        ("user_us", ctypes.c_long),
        ("system_s", ctypes.c_long),
        ("system_us", ctypes.c_long),
        ("peak_kib", ctypes.c_long),
        ("rest", ctypes.c_long * 13),
    )


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
                report.kind = KIND_SIGNALED if status.value & 0x7F else KIND_EXITED
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
                report.kind, report.status = KIND_REFUSED, error.errno or 0
                libc.send(control, report_at, report_size, 0)
            else:
                if report.pid == 0:
                    run_child(descriptors[0], descriptors[1], descriptors[2], spawn.directory.decode())
                passed[0] = libc.syscall(kernel.SYS_PIDFD_OPEN, ctypes.c_long(report.pid), 0)
                report.kind = KIND_STARTED
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
