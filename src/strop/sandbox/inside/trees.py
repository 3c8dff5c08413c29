"""Copies a directory with everything in it, as exactly as the copy of a session needs it."""

from __future__ import annotations

import os
import stat

_PART_BYTES = 1 << 18
_IDENTITY = tuple[int, int]  # device and inode


def copy(source: int, target: str) -> dict[_IDENTITY, str]:
    """Copy what lies in the open directory `source` into the directory `target`.

    Files with several names, holes, links, pipes, modes and times are kept; sockets are left out.

    Returns:
        (device, inode) of `source`, and of every file and directory in it -> the path of the copy.
    """
    copied: dict[_IDENTITY, str] = {}
    _copy_directory(os.dup(source), target, copied)
    return copied


def clear(path: str) -> None:
    """Remove what lies in `path`, as far as that is allowed."""
    with os.scandir(path) as entries:
        for entry in list(entries):
            try:
                if entry.is_dir(follow_symlinks=False):
                    clear(entry.path)
                    os.rmdir(entry.path)
                else:
                    os.unlink(entry.path)
            except PermissionError:
                continue


def copy_content(source: int, target: int, length: int) -> None:
    """The first `length` bytes, its holes left out. Leaves the position of `source` alone: others may share it."""
    os.ftruncate(target, length)
    for at in range(0, length, _PART_BYTES):
        part = os.pread(source, _PART_BYTES, at)
        if part.count(0) != len(part):
            os.pwrite(target, part, at)


def _copy_directory(source: int, target: str, copied: dict[_IDENTITY, str]) -> None:
    """Closes `source`."""
    held = os.fstat(source)
    with os.scandir(source) as entries:
        for entry in reversed(list(entries)):  # newest first, so the copy is listed in the order of its origin
            _copy_one(source, entry.name, f"{target}/{entry.name}", entry.stat(follow_symlinks=False), copied)
    os.close(source)
    copied[held.st_dev, held.st_ino] = target
    _dress(target, held)


def _copy_one(directory: int, name: str, target: str, held: os.stat_result, copied: dict[_IDENTITY, str]) -> None:
    identity, kind = (held.st_dev, held.st_ino), stat.S_IFMT(held.st_mode)
    if identity in copied:
        os.link(copied[identity], target, follow_symlinks=False)
    elif kind == stat.S_IFDIR:
        os.mkdir(target)
        _copy_directory(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory), target, copied)
    elif kind == stat.S_IFLNK:
        os.symlink(os.readlink(name, dir_fd=directory), target)
        copied[identity] = target
    elif kind == stat.S_IFREG:
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
        new = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        copy_content(source, new, held.st_size)
        os.close(source)
        os.close(new)
        copied[identity] = target
        _dress(target, held)
    elif kind == stat.S_IFIFO:
        os.mkfifo(target)
        copied[identity] = target
        _dress(target, held)


def _dress(target: str, held: os.stat_result) -> None:
    os.chmod(target, stat.S_IMODE(held.st_mode))
    os.utime(target, ns=(held.st_atime_ns, held.st_mtime_ns))
