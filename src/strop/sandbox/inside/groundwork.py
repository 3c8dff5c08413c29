"""Gives a branch of a session what it may not take itself: a map of its uid, a /tmp of its own, room for its processes.

A script with the supervisor's privileges, outside every sandbox. Each step runs in a fork that joins the namespaces of the
branch, where it can do no more than their owner could; it reads nothing that a program wrote.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import types


def main() -> None:
    package = types.ModuleType("strop_inside")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["strop_inside"] = package
    from strop_inside import filesystem, kernel, wire  # type: ignore[import-not-found]

    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork: it answers for itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, wire.GROUNDWORK.size, 2)
        if not message:
            return
        step, number, pid, owner, max_processes, inner_uid = wire.GROUNDWORK.unpack(message)
        if os.fork() == 0:
            code, text = 0, ""
            try:
                _become(owner)
                if step == wire.GROUND_RAISE:
                    kernel.check(kernel.libc.setns(descriptors[0], kernel.CLONE_NEWUSER), "join a user namespace")
                    _limit_processes(pid, max_processes)
                else:
                    kernel.check(kernel.libc.setns(descriptors[0], kernel.CLONE_NEWUSER), "join the user namespace of a stem")
                    for file in ("uid_map", "gid_map"):
                        _write(f"/proc/{pid}/{file}", f"{inner_uid} {inner_uid} 1")
                    theirs = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS
                    kernel.check(kernel.libc.setns(descriptors[1], theirs), "join the namespaces of a branch")
                    filesystem.mount_tmp()
                    _limit_processes(pid, max_processes)
            except OSError as error:
                code, text = error.errno or 1, str(error)
            finally:
                control.send(wire.GROUND_ANSWER.pack(number, code) + text.encode())
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(owner: int) -> None:
    """The owner of a user namespace has every right in it, and the fewest elsewhere."""
    if os.geteuid() != owner:
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)


def _limit_processes(pid: int, soft: int) -> None:
    hard = resource.prlimit(pid, resource.RLIMIT_NPROC)[1]
    resource.prlimit(pid, resource.RLIMIT_NPROC, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


main()
