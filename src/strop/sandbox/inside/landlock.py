"""Restricts by Landlock which files, sockets and processes a program can reach.

The common rules of a fork server are prepared once; a child adds its directory and enforces them.
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
_SILENT = {7: 0x1}  # otherwise every refusal is a line in the audit log of the host

_EXECUTE, _WRITE, _READ, _READ_DIRECTORY, _TRUNCATE, _DEVICE_IOCTL = 0x1, 0x2, 0x4, 0x8, 0x4000, 0x8000
_MAKE_DEVICES = 0x40 | 0x800
_TO_READ = _EXECUTE | _READ | _READ_DIRECTORY
_OF_A_FILE = _EXECUTE | _WRITE | _READ | _TRUNCATE | _DEVICE_IOCTL  # the kernel refuses the other rights for a file

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every architecture
_ASK_VERSION, _PATH_BENEATH = 1, 1


class _Handled(ctypes.Structure):
    """struct landlock_ruleset_attr: what is forbidden unless a rule allows it. Old kernels accept it if its end is zero."""

    _fields_ = (("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Rule(ctypes.Structure):
    """struct landlock_path_beneath_attr: what is allowed below an open directory."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


@functools.cache
def abi() -> int:
    """The version of Landlock: 1 for Linux 5.13, 4 with TCP (6.7), 6 with scopes (6.12); 0 if it is off or denied."""
    version: int = kernel.libc.syscall(_CREATE, None, ctypes.c_size_t(0), _ASK_VERSION)
    return max(0, version)


class Rules:
    """What every program of a fork server may reach, in the structures of the kernel.

    They are built here, before the fork: a child pays for each page that it touches first.
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
        """Allow `rights` for `path`. Keeps a descriptor open, so that no child looks up the path."""
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = rights & self.handled_files
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            allowed &= _OF_A_FILE
        if not allowed:
            os.close(descriptor)
            return
        self._trees.append(_Rule(allowed=allowed, parent=descriptor))
        self.trees_at.append(ctypes.byref(self._trees[-1]))


def prepare(*, readable: Sequence[str] | None, version: int | None = None) -> Rules:
    """Build rules for files, and against TCP, abstract sockets and signals as far as this kernel supports that.

    Args:
        readable: trees to read and to execute; missing ones are left out. None where mounts decide what is readable: then the
            rules only restrict changes.
        version: the version of Landlock to use, if not the newest.

    Raises:
        OSError: this kernel has no Landlock, or denies it.
    """
    version = abi() if version is None else version
    if version == 0:
        raise OSError(errno.ENOSYS, "no Landlock here (it needs Linux 5.13, CONFIG_SECURITY_LANDLOCK and no filter against it)")
    handled = _known(_FILE_RIGHTS, version)
    rules = Rules(handled_files=handled & ~_TO_READ & ~_DEVICE_IOCTL if readable is None else handled, version=version)
    for path in readable or ():
        if os.path.exists(path):
            rules.allow(path, _TO_READ)
    for path in DEVICES:  # to read and to change, in addition to the directory of the call. Each costs a child 4 us
        rules.allow(path, rules.own.allowed)
    return rules


def restrict(rules: Rules, *, writable: str) -> None:
    """Enforce `rules` and the tree `writable` on this thread and its children, for good. No mount is possible after that.

    Raises:
        OSError: a step was refused. No rule holds then, so no program may run.
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
    """All rights in `added` that this version has."""
    return sum(bits for since, bits in added.items() if since <= version)
