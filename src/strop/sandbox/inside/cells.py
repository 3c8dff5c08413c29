"""The process of a session: an interpreter whose state lasts from one cell to the next, also after errors, and its forks.

    supervisor --(cell: its nonce, number and limits, its code and stdin as files)--> line
    line --(began: the nonce)(done: the nonce, exit code, echo or traceback)--> supervisor

Each cell has a new nonce, so that processes of earlier cells cannot report the end of a later one in advance. All cells print
to one pipe, so threads and processes that outlive a cell print into the output of the next one. SIGINT stops a cell; between
cells it is ignored.

A fork makes two copies, each pid 1 of its own namespaces, and an empty process that holds both:

    session ──fork──> midwife ──clone(new namespaces)──> continuation
       │                 └──────clone(new namespaces)──> branch
       └─ later: stem, `sleep` as pid 1 of the namespace that contains the namespaces of both copies

The supervisor forks only a session with one thread, no child process, no open file and no shared memory. A copy has the
variables and the files below /tmp of its origin, and the same state of random numbers.

Programs of the session can change this code, so the supervisor trusts nothing that it says. The supervisor answers the two
clones, gives each copy its uid and its /tmp from outside, and inspects each copy before it uses it.
"""

from __future__ import annotations

import _socket
import ctypes
import os
import random
import resource
import signal
import stat
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from . import confine, kernel, program, wire

LINE = confine.WAKE
_FAILED = 1
_CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x00200000, 0x01000000
_PR_GET_TID_ADDRESS = 40
_SLEEP = ("/bin/sleep", "sleep", "2147483647")
_PART_BYTES = 1 << 20

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock: no other code runs between a clone and its first line
_random_state: Callable[[], object] = random.getstate
_restore_random = random.setstate

program.OWN_FILES.add(__file__)


def _receive(line: _socket.socket) -> tuple[bytes, list[int]]:
    """Wait for the next packet, and return it with its descriptors. Empty when the supervisor has closed the line."""
    packet, control, _, _ = line.recvmsg(wire.LINE_BYTES, _socket.CMSG_SPACE(16), _socket.MSG_CMSG_CLOEXEC)
    given = b"".join(content for _, _, content in control)
    return packet, [int.from_bytes(given[at : at + 4], sys.byteorder) for at in range(0, len(given), 4)]


class Session:
    """Handles the packets on the line of a session, a seqpacket socket, which never splits them, until its end."""

    def __init__(self, confinement: confine.Confinement, line: _socket.socket) -> None:
        self._confinement = confinement
        self._line = line
        self._names = program.fresh_main()
        self._streams = sys.stdout, sys.stderr
        self._is_interruptible = False
        signal.signal(signal.SIGINT, self._interrupt)

    def live(
        self,
        # Bound here: a cell may replace any of them.
        exit_now: Callable[[int], NoReturn] = os._exit,
        getpid: Callable[[], int] = os.getpid,
    ) -> NoReturn:
        own_pid = getpid()
        try:
            while True:
                packet, descriptors = _receive(self._line)
                if not packet:
                    exit_now(0)
                if packet[:1] == wire.LINE_CELL:
                    nonce, exit_code, kind, text = self._cell(packet, descriptors)
                    if getpid() != own_pid:  # a fork of the cell that returned here; it has no next cell
                        if kind == wire.RECORD_ERROR:
                            program.attempt(self._streams[1].write, text)
                        exit_now(exit_code)
                    self._line.send(wire.DONE.pack(wire.LINE_DONE, nonce, exit_code, kind) + program.encode_record(text))
                elif packet[:1] == wire.LINE_FORK:
                    self._line = _fork(self._line, wire.FORK.unpack(packet)[1], descriptors)
                    own_pid = getpid()
                elif packet[:1] == wire.LINE_STEM:
                    _become_stem()
        except BaseException as error:  # a cell closed the line, or replaced a function that is needed here
            os.write(2, f"The session ends here: {type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
            exit_now(_FAILED)

    def _cell(self, packet: bytes, descriptors: list[int]) -> tuple[bytes, int, bytes, str]:
        """Run a cell. Returns its nonce, its exit code, and the kind and text of what it shows."""
        _, nonce, number, code_length, memory_bytes, file_mib = wire.CELL.unpack(packet)
        began = wire.BEGAN.pack(wire.LINE_BEGAN, nonce)
        if len(descriptors) < 2:
            self._line.send(began)
            for descriptor in descriptors:
                os.close(descriptor)
            return (nonce, _FAILED, wire.RECORD_ERROR, "OSError: earlier cells left no free file descriptor for this one\n")
        code = os.pread(descriptors[0], code_length, 0).decode()
        os.close(descriptors[0])
        self._confinement.limit_cell(memory_bytes=memory_bytes, file_bytes=file_mib << 20)
        confine.take_stdin(descriptors[1])
        self._line.send(began)
        try:
            try:
                self._is_interruptible = True
                exit_code, kind, text = program.run(code, self._names, f"<cell {number}>", stderr=self._streams[1])
                program.flush((sys.stdout, *self._streams))
            finally:
                self._is_interruptible = False
        except KeyboardInterrupt:  # after the code of the cell
            exit_code, kind, text = _FAILED, wire.RECORD_ERROR, "KeyboardInterrupt\n"
        return nonce, exit_code, kind, text

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_interruptible:
            raise KeyboardInterrupt


def live(
    confinement: confine.Confinement, exchange: int, line: int, output: int, directory: str, seed_all: Callable[[int], None]
) -> NoReturn:
    """Confine this process, and handle the packets of its line until the end of the session."""
    own_line = _socket.socket(fileno=line)
    try:
        header = os.pread(exchange, wire.WORK.size, wire.RECORD_BYTES)
        _, seed, memory_bytes, _, max_processes, file_mib, _, _ = wire.WORK.unpack(header)
        listener = confinement.apply(directory, max_processes=max_processes)
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, listener.to_bytes(4, sys.byteorder))] if listener >= 0 else []
        own_line.sendmsg([wire.LINE_HELLO], rights)
        confine.take_streams(exchange, line, output)
        own_line.detach()
        own_line = _socket.socket(fileno=LINE)
        os.close(confine.EXCHANGE)
        confinement.limit(memory_bytes=memory_bytes, file_bytes=file_mib << 20)
        seed_all(seed)
        session = Session(confinement, own_line)
        own_line.send(wire.LINE_BORN)
    except BaseException as error:
        own_line.send(wire.LINE_FAILED + f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace"))
        os._exit(_FAILED)
    session.live()


def _fork(line: _socket.socket, flags: int, ends: list[int]) -> _socket.socket:
    """Start two copies of this process. Returns in all three processes, in each with its own line.

    Args:
        line: the line of this process.
        flags: the namespaces of each copy, as flags of clone.
        ends: line and output of the first copy, then of the second.
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
                return _settle(line, own[0], own[1])
    except OSError as error:
        line.send(wire.LINE_FAILED + str(error).encode("utf-8", "backslashreplace"))
    os._exit(0)


def _become_stem() -> NoReturn:
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


def _settle(line: _socket.socket, own_line: int, own_output: int) -> _socket.socket:
    """In a copy: take its own line and output, wait for its /tmp, and copy the files of the origin into it."""
    origin_files = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    directory = _working_directory()
    nothing = os.open(os.devnull, os.O_RDONLY)
    line.close()
    for source, target in ((nothing, 0), (own_output, 1), (own_output, 2)):
        os.dup2(source, target)
    os.dup2(own_line, LINE, inheritable=False)
    for descriptor in (nothing, own_output, own_line):
        os.close(descriptor)
    line = _socket.socket(fileno=LINE)
    line.send(wire.LINE_BORN)
    _receive(line)  # the supervisor has mounted the new /tmp
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
