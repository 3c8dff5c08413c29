"""Gives a copy of a session what it must not take itself: a map of its uid, its own /tmp, its limit of processes.

Its process has the privileges of the supervisor, outside every sandbox. Each step runs in a fork that joins the namespaces of
the copy as their owner, so it has no other rights. It reads nothing that a program wrote.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys

from . import filesystem, kernel, wire


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
                    filesystem.mount_tmp()
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
