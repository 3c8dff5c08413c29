"""Confines a child, step by step at each level: the root that it sees, namespaces, streams, privileges, limits.

As a script, the helper of the supervisor that prepares copies of sessions: `main`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
from typing import TextIO

from . import kernel, landlock, program, seccomp, wire

UNPRIVILEGED_UID = 1_000_000  # on the host, if started by root: the kernel does not enforce RLIMIT_NPROC for uid 0
INNER_UID = 1_000  # what a program sees
NICENESS = 10  # the supervisor has priority
EXCHANGE, WAKE = 3, 4
_SCOPED_ABI = 6  # first version of Landlock that keeps signals inside
_TMP_OPTIONS = b"size=64m,nr_inodes=4096,mode=0777"


def build_root(paths: list[str]) -> None:
    """Replace the root of the host by one with `paths` and the devices. Needs a new mount namespace."""
    # Links point elsewhere after the root has moved.
    sources = {path: os.path.realpath(path) for path in (*paths, *landlock.DEVICES)}
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for name in ("/tmp/old", "/tmp/new"):
        os.mkdir(name)
    kernel.mount("/tmp/new", "/tmp/new", "", kernel.MS_BIND)
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for path, source in sources.items():
        _show(path, source)
    os.mkdir("/new/tmp")
    os.symlink("/tmp/shm", "/new/dev/shm")
    kernel.pivot_root("/new", "/new/tmp")
    os.chdir("/")
    kernel.check(kernel.libc.umount2(b"/tmp", kernel.MNT_DETACH), "umount the host's root")
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", "", flags)


def mount_tmp() -> None:
    """Mount an empty /tmp with limits of bytes and files. Needs a new mount namespace."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.check(kernel.libc.mount(b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(flags), _TMP_OPTIONS), "mount /tmp")


def make_work_directory() -> None:
    os.umask(0)
    for path in (wire.WORK_DIRECTORY, "/tmp/shm"):
        os.mkdir(path, 0o777)
    os.umask(0o022)


def place_inside(path: str) -> str:
    """Where a program finds the `path` of the host: /tmp is private, so what lies below it is shown elsewhere."""
    return f"/moved{path}" if path.startswith("/tmp/") else path


def _show(path: str, source: str) -> None:
    """Mount `source` of the host at `path`. Links to system directories stay links."""
    link, source, target = f"/old{path}", f"/old{source}", f"/new{place_inside(path)}"
    if source.startswith("/old/usr/") and os.path.islink(link):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(source.removeprefix("/old"), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif os.path.exists(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    else:
        return
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
    kernel.show_read_only(target, allows_devices=path.startswith("/dev/"))


class Confinement:
    """Confines the children of one fork server. Built before the first of them.

    Args:
        level: the value of an `IsolationLevel`.
        proc: the /proc of the host, opened before it was unmounted.
        is_root: whether the fork server is the host's root.
        readable: the trees that a program may read, where no mount namespace hides the others.
    """

    def __init__(self, level: str, *, proc: int, is_root: bool, readable: list[str]) -> None:
        self.level = level
        self.proc = proc
        self.is_root = is_root
        self.is_namespaced = level in ("strict", "namespaces")
        self._server = os.getpid()
        self._filter: seccomp.Filter | None = None
        self._session_filter: seccomp.Filter | None = None
        self._rules: landlock.Rules | None = None
        if level != "process":
            self._rules = landlock.prepare(readable=None if self.is_namespaced else readable)
            self._filter = seccomp.build(
                is_namespaced=self.is_namespaced, has_own_uid=is_root, are_signals_scoped=landlock.abi() >= _SCOPED_ABI
            )
            self._session_filter = seccomp.build(is_namespaced=True, in_session=True) if self.is_namespaced else self._filter
        # The interpreter may lie where only root can read. Landlock restricts this capability to the readable trees.
        is_hidden = level == "confined" and is_root and not all(_is_public(path) for path in readable)
        self._needed_capability = kernel.CAP_DAC_READ_SEARCH if is_hidden else None
        self._base_memory = int(kernel.read("self/statm", directory=proc).split()[0]) * resource.getpagesize()

    def apply(self, directory: str, *, max_processes: int = 0) -> int:
        """Confine this process for good. Returns the listener of the filter of a session, or -1.

        Args:
            directory: its directory on disk, where it has no private /tmp.
            max_processes: of a session, which can be forked into new namespaces; 0 for a program. It is set here, since the
                filter forbids that later: the soft limit is that of this session, the hard limit that of all its copies.
        """
        os.setsid()
        os.nice(NICENESS)
        if self.is_namespaced:
            self._enter_namespaces(allows_more=max_processes > 0)
            directory = wire.WORK_DIRECTORY
        elif self.is_root and self.level == "confined":
            uid = UNPRIVILEGED_UID + os.getpid()  # RLIMIT_NPROC counts per uid
            os.chown(directory, uid, uid)
            kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
            kernel.become(uid)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of uid, which clears it
        if not self.is_namespaced:
            # A fork server that died before that call sent no signal. At L2 its pid namespace dies with it.
            if os.getppid() != self._server:
                os._exit(1)
            os.environ["HOME"] = "."  # the path of its directory differs from call to call
        os.chdir(directory)
        if max_processes:
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            most = wire.MAX_FAMILY_PROCESSES if self.is_namespaced else max_processes
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_NPROC, (min(max_processes, most), most))
        program_filter = self._session_filter if max_processes else self._filter
        if self._rules is None or program_filter is None:
            return -1
        kernel.drop_capabilities(all_but=self._needed_capability)
        # A copy of a session gets another /tmp, which no rule can name in advance; everything else is mounted read-only.
        writable = "/" if max_processes and self.is_namespaced else "/tmp" if self.is_namespaced else directory
        landlock.restrict(self._rules, writable=writable)
        return seccomp.install(program_filter)

    def limit(self, *more: tuple[int, int], memory_bytes: int, file_bytes: int) -> None:
        """Set the limits of a program, including `more`, or the highest ones of a session. Those of the machine still hold."""
        for kind, limit in ((resource.RLIMIT_FSIZE, file_bytes), *more, *_FIXED_LIMITS):
            hard = resource.getrlimit(kind)[1]
            value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (value, value))
        total = self._base_memory + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (total, total + program.SPARE_BYTES))

    def limit_cell(self, *, memory_bytes: int, file_bytes: int) -> None:
        for kind, limit in ((resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_AS, self._base_memory + memory_bytes)):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (min(limit, hard), hard))

    def _enter_namespaces(self, *, allows_more: bool) -> None:
        more = kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS if self.level == "strict" else 0
        kernel.check(kernel.libc.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | more), "unshare mount and ipc namespaces")
        mount_tmp()
        make_work_directory()
        if self.is_root:
            # One uid for each call: the kernel counts some resources per user, such as pages in pipes.
            uid = UNPRIVILEGED_UID + int(os.readlink("self", dir_fd=self.proc))
            kernel.become(uid)
            kernel.libc.prctl(kernel.PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise the maps below belong to root
        # A user namespace for each call: RLIMIT_NPROC counts in it, and programs see the same uid on every machine.
        kernel.enter_user_namespace(self.proc, inside=INNER_UID)
        if allows_more:
            return
        try:
            kernel.write("sys/user/max_user_namespaces", "0", directory=self.proc)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):  # containers mount /proc/sys read-only
                raise


_FIXED_LIMITS = (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NOFILE, 128),
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_MSGQUEUE, 0),
    (resource.RLIMIT_STACK, 64 << 20),
)


def take_streams(exchange: int, wake: int, output: int) -> None:
    """Move the descriptors to their numbers, close all others, and open the text streams."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    moved = [os.dup(exchange), os.dup(wake)]  # away from the numbers below
    for source, target in ((nothing, 0), (output, 1), (output, 2), (moved[0], EXCHANGE), (moved[1], WAKE)):
        os.dup2(source, target, inheritable=target < EXCHANGE)
    os.closerange(WAKE + 1, 4096)
    sys.stdout = _text_stream(1)
    sys.stderr = _text_stream(2)
    sys.__dict__.update(__stdout__=sys.stdout, __stderr__=sys.stderr)  # read-only to type checkers
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that grows too large is an OSError


def give_stdin(content: bytes) -> None:
    """Make `content` the standard input of the program; as a file, so that no process waits for a reader."""
    descriptor = 0
    if content:
        descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
    take_stdin(descriptor)


def take_stdin(descriptor: int) -> None:
    """Make `descriptor` the standard input, and open its text stream."""
    if descriptor:
        os.dup2(descriptor, 0)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - until the next cell
    sys.__dict__.update(__stdin__=sys.stdin)


def _text_stream(descriptor: int) -> TextIO:
    """Buffered by lines, so lines of threads and forks stay whole; surrogates are shown escaped."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _is_public(path: str) -> bool:
    """Whether all users can enter it."""
    parents = [path]
    while parents[-1] != "/":
        parents.append(os.path.dirname(parents[-1]))
    return all(os.stat(parent).st_mode & 0o001 for parent in parents if os.path.isdir(parent))


def main() -> None:
    """Give a copy of a session what it must not take itself: a map of its uid, its own /tmp, its limit of processes.

    The process of this helper has the privileges of the supervisor, outside every sandbox. Each step runs in a fork that joins
    the namespaces of the copy as their owner, so it has no other rights. It reads nothing that a program wrote.
    """
    import socket  # which no fork server needs

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
                    mount_tmp()
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
