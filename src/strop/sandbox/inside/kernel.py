"""System calls without a function in Python 3.11, with errors that name what failed."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 36, 38
ADDR_NO_RANDOMIZE = 0x0040000
MADV_COLLAPSE = 25
SYS_CLONE, SYS_PIVOT_ROOT, SYS_PIDFD_OPEN, SYS_MOUNT_SETATTR = 56, 155, 434, 442  # on x86_64
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

libc = ctypes.CDLL(None, use_errno=True)
CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION = (ctypes.c_uint32 * 2)(0x20080522, 0)
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2


def check(result: int, what: str) -> int:
    """Return `result`. Raises `OSError`, which names `what`, when it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int) -> None:
    check(libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    check(result, f"mount {target}")


def show_read_only(target: str, *, allows_devices: bool) -> None:
    """Make the mount at `target`, and every mount below it, read-only."""
    no_device = 0 if allows_devices else MOUNT_ATTR_NODEV
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | no_device, 0, 0, 0)
    result = libc.syscall(
        SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(attributes), ctypes.c_size_t(32)
    )
    check(result, f"mount_setattr {target} (needs Linux 5.12)")


def pivot_root(new: str, old: str) -> None:
    check(libc.syscall(SYS_PIVOT_ROOT, new.encode(), old.encode()), "pivot_root")


def drop_capabilities(*, all_but: int | None = None) -> None:
    """Drop every capability, except `all_but`, which executed programs keep too."""
    kept = 0 if all_but is None else 1 << all_but
    check(libc.capset(_CAPABILITY_VERSION, (ctypes.c_uint32 * 6)(kept, kept, kept)), "drop capabilities")
    if all_but is not None:
        check(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, all_but, 0, 0), "keep a capability")


def become(uid: int) -> None:
    """Change to another user and its group, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def read(path: str, *, directory: int) -> bytes:
    """The first 4 KiB of the file `path` below the open `directory`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def write(path: str, text: str, *, directory: int | None = None) -> None:
    """Write `text` to the file `path`, below the open `directory` if there is one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, f"write {text!r} to {path}: {error.strerror}") from error


def enter_user_namespace(proc: int, *, inside: int, other_namespaces: int = 0) -> None:
    """Enter a new user namespace in which the uid and gid of the caller are `inside`. It owns the other new namespaces."""
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(CLONE_NEWUSER | other_namespaces), "unshare a user namespace")
    write("self/setgroups", "deny", directory=proc)
    write("self/uid_map", f"{inside} {uid} 1", directory=proc)
    write("self/gid_map", f"{inside} {gid} 1", directory=proc)
