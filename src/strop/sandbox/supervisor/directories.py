"""Directories on disk that are removed with their process, or when the next node starts on this machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from strop.errors import MachineError
from strop.sandbox.inside.confine import UNPRIVILEGED_UID
from strop.sandbox.protocol import IsolationLevel

_log = logging.getLogger(__name__)

_CALL, _CANARY = "call", "canary"
_NAME = re.compile(rf"strop-(?:{_CALL}|{_CANARY})-[a-z0-9_]{{8}}")


class Directory:
    """A new, empty directory, locked while this process lives and has not removed it."""

    __slots__ = ("_lock", "path")

    def __init__(self, path: str, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, *, is_for_canaries: bool = False) -> Self:
        """Make one for a call, among the temporary files, or for canaries. Raises `OSError` when there is no room."""
        kind, place = (_CANARY, _canary_place()) if is_for_canaries else (_CALL, tempfile.gettempdir())
        while True:
            path = tempfile.mkdtemp(prefix=f"strop-{kind}-", dir=place)
            if (lock := _lock(path)) >= 0:
                return cls(path, lock)

    def remove(self) -> None:
        """Remove it with its content. Safe to call twice."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def remove_leftovers() -> None:
    """Remove the directories of killed processes. The directory of a living process is locked, and stays."""
    for place in {tempfile.gettempdir(), _canary_place()}:
        for entry in os.scandir(place):
            if _NAME.fullmatch(entry.name) and _is_ours(entry) and (lock := _lock(entry.path)) >= 0:
                _log.info("%s was left by a killed process; removing it", entry.path)
                _remove(entry.path)
                os.close(lock)


def check_temporary_directory(level: IsolationLevel) -> None:
    """Raises `MachineError` when programs with their own uid could not enter their directories."""
    if level is not IsolationLevel.CONFINED or os.geteuid() != 0:
        return
    place = Path(tempfile.gettempdir())
    if not all(parent.stat().st_mode & 0o001 for parent in (place, *place.parents)):
        raise MachineError(f"TMPDIR is {place}, which other users cannot enter; set TMPDIR to a directory that they can")


def _canary_place() -> str:
    """Outside of /tmp if possible: every program has its own /tmp, which would hide the canary for the wrong reason."""
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()


def _is_ours(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        owner = entry.stat(follow_symlinks=False).st_uid
        # Started by root, a directory belongs to the uid of its program.
        return owner == os.geteuid() or (os.geteuid() == 0 and owner >= UNPRIVILEGED_UID)
    return False


def _lock(path: str) -> int:
    """A descriptor that holds the lock of this directory; -1 when another process has it, or has just removed it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return -1
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    os.close(descriptor)
    return -1


def _remove(directory: str) -> None:
    """Remove an empty directory now, and others by a separate process: a program may leave many files, at any depth."""
    try:
        os.rmdir(directory)
        return
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    script = '(chmod -R u+rwX -- "$0"; exec rm -rf -- "$0") &'
    try:
        quiet, path = subprocess.DEVNULL, {"PATH": os.defpath}
        subprocess.run(["sh", "-c", script, directory], stdin=quiet, stdout=quiet, stderr=quiet, env=path, check=False)
    except OSError as error:
        _log.warning("the directory %s of a program cannot be removed: %s", directory, error)
