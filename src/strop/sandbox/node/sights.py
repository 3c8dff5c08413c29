"""What the kernel says of one process for as long as it is kept, without asking it."""

from __future__ import annotations

import contextlib
import os
import platform
from typing import Self

from strop.errors import MachineError
from strop.sandbox.inside.confine import WAKE
from strop.sandbox.node.processes import cpu_s_in, pid_of

_SYS_RECVMSG = {"x86_64": 47, "aarch64": 212}
_STAT_BYTES = 1_024


class Sight:
    """Of one process, through files that are opened once.

    So a look costs no descriptor, when there may be none left, and never falls on another process with the same number.
    """

    def __init__(self, pid: int, stat: int, status: int, call: int, *, owner: int, tmp_device: int) -> None:
        self._stat = stat
        self._status = status
        self._call = call  # which call of the kernel its first thread waits in; -1 where that is not shown
        self.pid = pid
        self.owner = owner  # its uid on this machine
        self.tmp_device = tmp_device

    @classmethod
    def of(cls, pidfd: int, *, has_own_tmp: bool) -> Self:
        """Raises `MachineError` when it is dead, or cannot be looked at."""
        with contextlib.ExitStack() as opened:
            try:
                pid = pid_of(pidfd)
                stat = _open(f"/proc/{pid}/stat", opened)
                status = _open(f"/proc/{pid}/status", opened)
                owner = os.stat(f"/proc/{pid}").st_uid
                tmp_device = os.stat(f"/proc/{pid}/root/tmp").st_dev if has_own_tmp else 0
                try:
                    call = _open(f"/proc/{pid}/syscall", opened)
                except (FileNotFoundError, PermissionError):  # a kernel without it; a process that hides its memory
                    call = -1
                if pid_of(pidfd) != pid:
                    raise ProcessLookupError
            except (FileNotFoundError, ProcessLookupError) as error:
                raise MachineError("its process ended") from error
            except OSError as error:
                raise MachineError(f"its process cannot be looked at ({error})") from error
            opened.pop_all()
        return cls(pid, stat, status, call, owner=owner, tmp_device=tmp_device)

    def close(self) -> None:
        for file in (self._stat, self._status, self._call):
            if file >= 0:
                os.close(file)
        self._stat = self._status = self._call = -1

    @property
    def stat(self) -> list[str]:
        """As `stat_of`, also when it is dead and nobody has waited for it."""
        try:
            return os.pread(self._stat, _STAT_BYTES, 0).decode("utf-8", "replace").rpartition(")")[2].split()
        except ProcessLookupError:
            return []

    @property
    def cpu_s(self) -> float:
        """Of all its threads, and of what it started and waited for."""
        return cpu_s_in(self.stat)

    @property
    def peak_bytes(self) -> int:
        try:
            lines = os.pread(self._status, 16_384, 0).decode("utf-8", "replace").splitlines()
        except ProcessLookupError:
            return 0
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

    @property
    def is_runnable(self) -> bool:
        """Whether its first thread is on a processor, or would be if one were free."""
        return self.stat[:1] in (["R"], ["D"])

    @property
    def is_listening(self) -> bool:
        """Whether its first thread waits for the next packet on its line. Where that is not shown: whether it waits at all."""
        try:
            words = os.pread(self._call, 256, 0).split() if self._call >= 0 else []
        except PermissionError:  # it hides its memory since
            words = []
        except ProcessLookupError:
            return False
        if not words:
            return self.stat[:1] == ["S"]
        return words[0] == str(_SYS_RECVMSG[platform.machine()]).encode() and int(words[1], 16) == WAKE


def _open(path: str, opened: contextlib.ExitStack) -> int:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, file)
    return file
