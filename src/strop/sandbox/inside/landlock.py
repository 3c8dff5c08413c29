"""What a program may reach of files, network and other processes, decided by Landlock in the kernel.

What all programs of a fork server have in common is prepared once; a child adds its own directory and shuts the door.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from collections.abc import Sequence

from . import kernel

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# What each version of the kernel's interface added; it refuses rights that it does not know.
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x2000, 3: 0x4000, 5: 0x8000}  # thirteen at once; refer; truncate; device ioctl
_TCP_RIGHTS = {4: 0x3}  # bind, connect
_SCOPES = {6: 0x3}  # abstract unix sockets, signals
_SILENT = {7: 0x1}  # else every refusal is a line in the host's audit log, as fast as a program can ask

_EXECUTE, _WRITE, _READ, _READ_DIRECTORY, _TRUNCATE, _DEVICE_IOCTL = 0x1, 0x2, 0x4, 0x8, 0x4000, 0x8000
_MAKE_DEVICES = 0x40 | 0x800
_TO_READ = _EXECUTE | _READ | _READ_DIRECTORY
_OF_A_FILE = _EXECUTE | _WRITE | _READ | _TRUNCATE | _DEVICE_IOCTL  # the others are of directories, and refused for a file

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every architecture
_ASK_VERSION, _PATH_BENEATH = 1, 1


class _Handled(ctypes.Structure):
    """struct landlock_ruleset_attr: what is forbidden unless a rule allows it. Older kernels accept it if its end is zero."""

    _fields_ = (("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Rule(ctypes.Structure):
    """struct landlock_path_beneath_attr: what is allowed below an open directory."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


@functools.cache
def abi() -> int:
    """The version of Landlock here: 1 for Linux 5.13, 4 with TCP (6.7), 6 with scopes (6.12); 0 where it is off or denied."""
    version: int = kernel.libc.syscall(_CREATE, None, ctypes.c_size_t(0), _ASK_VERSION)
    return max(0, version)


class Rules:
    """What every program of a fork server may reach, in the kernel's own structures.

    Whatever `restrict` passes to the kernel is made here: a child pays for each page that it touches first.
    """

    def __init__(self, *, handled_files: int, version: int) -> None:
        self.handled_files = handled_files
        handled = _Handled(files=handled_files, tcp=_known(_TCP_RIGHTS, version), scopes=_known(_SCOPES, version))
        self.handled = ctypes.byref(handled), ctypes.c_size_t(ctypes.sizeof(handled)), 0
        self.flags = _known(_SILENT, version)
        self.own = _Rule(allowed=handled_files & ~_MAKE_DEVICES & ~_DEVICE_IOCTL)
        self.own_at = ctypes.byref(self.own)
        self.trees_at: list[object] = []
        self._trees: list[_Rule] = []

    def allow(self, path: str, rights: int) -> None:
        """Keeps a descriptor of `path` open, so that no child has to look it up."""
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = rights & self.handled_files
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            allowed &= _OF_A_FILE
        if not allowed:
            os.close(descriptor)
            return
        self._trees.append(_Rule(allowed=allowed, parent=descriptor))
        self.trees_at.append(ctypes.byref(self._trees[-1]))

    def close(self) -> None:
        """Give the descriptors back. Children that were forked before have their own."""
        self.trees_at.clear()
        while self._trees:
            os.close(self._trees.pop().parent)


def prepare(*, readable: Sequence[str] | None, writable: Sequence[str] = DEVICES, version: int | None = None) -> Rules:
    """Rules against TCP, abstract sockets and signals, as far as this kernel knows them, and for files as said here.

    Args:
        readable: trees to read and to execute; one that does not exist is left out. None where mounts already decide who reads
            what: then only changes are judged.
        writable: files and trees to read and to change, besides the directory of the call. Each costs a child 4 us.
        version: of the kernel's interface, if it should be an older one than it is.

    Raises:
        OSError: this kernel has no Landlock, or does not let us use it.
    """
    version = abi() if version is None else version
    if version == 0:
        raise OSError(errno.ENOSYS, "no Landlock here (it needs Linux 5.13, CONFIG_SECURITY_LANDLOCK and no filter against it)")
    handled = _known(_FILE_RIGHTS, version)
    rules = Rules(handled_files=handled & ~_TO_READ & ~_DEVICE_IOCTL if readable is None else handled, version=version)
    for path in readable or ():
        if os.path.exists(path):
            rules.allow(path, _TO_READ)
    for path in writable:
        rules.allow(path, rules.own.allowed)
    return rules


def restrict(rules: Rules, *, writable: str) -> None:
    """Hold the calling thread, and all it will start, to `rules` and the tree `writable`. For good; no mount is possible after.

    Raises:
        OSError: a step was refused. Nothing holds then, so nothing may run.
    """
    check, syscall = kernel.check, kernel.libc.syscall
    ruleset = check(syscall(_CREATE, *rules.handled), "create a Landlock ruleset")
    for tree in rules.trees_at:
        check(syscall(_ADD, ruleset, _PATH_BENEATH, tree, 0), "add a Landlock rule")
    rules.own.parent = os.open(writable, os.O_PATH | os.O_CLOEXEC)
    check(syscall(_ADD, ruleset, _PATH_BENEATH, rules.own_at, 0), "add the Landlock rule of a call")
    check(kernel.libc.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
    check(syscall(_RESTRICT, ruleset, rules.flags), "enforce a Landlock ruleset")
    os.close(rules.own.parent)
    os.close(ruleset)


def _known(added: dict[int, int], version: int) -> int:
    """All of `added` that an interface of this version has."""
    return sum(bits for since, bits in added.items() if since <= version)
