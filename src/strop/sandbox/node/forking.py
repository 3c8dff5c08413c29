"""Forks the interpreter of a session: the supervisor's half of `inside.branching`.

    1. the session is told to fork; its midwife asks the kernel for new namespaces, twice, and is answered here
    2. at the first question the session is stopped, and whatever else runs in it is killed
    3. each copy gets its uid, its /tmp and its limits from outside, and is told what it must give up
    4. each copy is looked at: no capability, no other process, nothing left that it shares with anybody
    5. the session becomes the stem of its two copies

Whatever a program does here of its own, the worst is that the fork fails: a process that obtained namespaces has no way to use
them (Landlock forbids mounts, the filter everything else), and is believed to be a copy only after step 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import stat
import struct
from dataclasses import dataclass
from typing import Self

from strop.errors import MachineError
from strop.sandbox.inside import kernel, seccomp, wire
from strop.sandbox.node.groundwork import Groundwork
from strop.sandbox.node.interpreters import Family, Interpreter, Stem, readable
from strop.sandbox.node.processes import children_of, pid_of, stat_of, status_of
from strop.sandbox.node.sights import Sight
from strop.sandbox.protocol import IsolationLevel

MAX_DEPTH = 24  # pid and user namespaces nest 32 deep in all
_LIMIT_S = 5.0  # of a fork; 10 ms when the machine is idle
_STEM_LIMIT_S = 5.0  # from the word to the end of what the stem was
_NUM_QUIET_ROUNDS = 3  # until all that a session started is known to be dead
_MAX_ROUNDS = 100  # of kills, until what starts processes has lost
_MAX_MAPPINGS = 64
_FLAGS = kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
_STRICT_FLAGS = kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS
_CREDENTIALS = struct.Struct("=iII")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (...)s ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)")
_NO_CAPABILITY = {"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Of one copy that is to be: our ends of its line and its output, and theirs."""

    line: socket.socket
    output: int
    their_line: int
    their_output: int
    theirs: set[tuple[int, int]]  # device and inode of both

    @classmethod
    def open(cls) -> Self:
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            output, their_output = os.pipe2(os.O_CLOEXEC)
        except OSError:
            line.close()
            theirs.close()
            raise
        line.setblocking(False)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        os.set_blocking(output, False)
        identities = {(held.st_dev, held.st_ino) for held in (os.fstat(theirs.fileno()), os.fstat(their_output))}
        return cls(line=line, output=output, their_line=theirs.detach(), their_output=their_output, theirs=identities)

    def close_theirs(self) -> None:
        os.close(self.their_line)
        os.close(self.their_output)

    def close_ours(self) -> None:
        self.line.close()
        os.close(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """One copy that was found to be alone."""

    ends: _Ends
    pidfd: int
    sight: Sight


async def fork(
    origin: Interpreter, *, level: IsolationLevel, groundwork: Groundwork
) -> tuple[Interpreter, Interpreter, asyncio.Task[bool]]:
    """Two copies of `origin`, which becomes their stem; and the task that waits for that, and says whether it did.

    Raises:
        MachineError: it could not be forked; `origin` goes on as it was, without the processes that it had started.
    """
    flags = _FLAGS | (_STRICT_FLAGS if level is IsolationLevel.STRICT else 0)
    try:
        async with asyncio.timeout(_LIMIT_S), origin.family.forking:
            branches = await _Fork(origin, flags, groundwork).run()
    except TimeoutError as error:
        raise MachineError(f"the session could not be forked: it took more than {_LIMIT_S:.0f} s") from error
    except (OSError, MachineError) as error:
        raise MachineError(f"the session could not be forked: {error}") from error
    stem = Stem(origin, num_users=3)  # the copies, and the burial
    first, second = (
        Interpreter(one.ends.line, one.ends.output, one.pidfd, sight=one.sight, family=origin.family, stem=stem)
        for one in branches
    )
    return first, second, asyncio.create_task(_bury(origin, stem))


class _Fork:
    """One order and its course."""

    def __init__(self, origin: Interpreter, flags: int, groundwork: Groundwork) -> None:
        self._loop = asyncio.get_running_loop()
        self._origin = origin
        self._family: Family = origin.family
        self._flags = flags
        self._groundwork = groundwork
        self._midwife = 0
        self._older = set(children_of(origin.pid))  # none of these was born for this
        self._held: list[int] = []  # questions
        self._pidfds: list[int] = []
        self._shared: set[tuple[int, int]] = set()  # device and inode of the memory that the copies shared with the session
        self._sights: list[Sight] = []
        self.ends = _open_ends()

    async def run(self) -> list[_Branch]:
        """The two copies."""
        theirs = [end for ends in self.ends for end in (ends.their_line, ends.their_output)]
        try:
            _drain(self._origin.line)
            try:
                self._origin.send(wire.FORK.pack(wire.LINE_FORK, self._flags), theirs)
            finally:
                for ends in self.ends:
                    ends.close_theirs()
            async with asyncio.TaskGroup() as tasks:
                failure = tasks.create_task(self._wait_for_failure())
                answers = tasks.create_task(self._answer())
                births = [tasks.create_task(self._raise_copy(ends)) for ends in self.ends]
                await asyncio.wait([answers, *births])
                failure.cancel()
            first, second = pidfds = [birth.result() for birth in births]
            self._look(first, second)
            for pidfd in pidfds:
                self._sights.append(Sight.of(pidfd, has_own_tmp=True))
        except BaseException as error:
            self._undo()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        finally:
            for question in self._held:
                seccomp.refuse(self._family.listener, question)
        return [
            _Branch(ends=ends, pidfd=pidfd, sight=sight)
            for ends, pidfd, sight in zip(self.ends, pidfds, self._sights, strict=True)
        ]

    async def _wait_for_failure(self) -> None:
        """The session and its midwife say what fails before there are copies."""
        packet, _ = await self._packet(self._origin.line)
        if packet[:1] == wire.LINE_FAILED:
            raise MachineError(f"{packet[1:].decode('utf-8', 'replace')}")
        raise MachineError("it ended, or does not keep to what was agreed")

    async def _answer(self) -> None:
        """Let the midwife have its two clones. Who else asks waits for its refusal, so that nobody can ask all the time."""
        num_allowed = 0
        while num_allowed < 2:
            await readable(self._family.listener)
            if (question := self._family.next_question()) is None:
                continue
            if not self._is_ordered(question):
                self._held.append(question.id)
                continue
            if num_allowed == 0:
                self._midwife = question.pid
                await self._prepare()
            num_allowed += seccomp.allow(self._family.listener, question.id)

    def _is_ordered(self, question: seccomp.Notification) -> bool:
        known = _FLAGS | _STRICT_FLAGS | kernel.CLONE_NEWUTS | 0x02000000  # the last is CLONE_NEWCGROUP
        if question.name != "clone" or question.arguments[0] & known != self._flags:
            return False
        if self._midwife:
            return question.pid == self._midwife
        status = status_of(question.pid)
        if question.pid in self._older:
            return False
        return status.get("PPid") == str(self._origin.pid) and status.get("Threads") == "1"

    async def _prepare(self) -> None:
        self._origin.signal(signal.SIGSTOP)
        self._kill_others({self._midwife})
        pidfd = os.pidfd_open(self._midwife)
        try:
            await self._groundwork.raise_limit(self._midwife, pidfd, owner=self._family.owner)
        finally:
            os.close(pidfd)

    async def _raise_copy(self, ends: _Ends) -> int:
        """From its first word to its last one before it is looked at. Returns its pidfd."""
        packet, pid = await self._packet(ends.line)
        if packet[:1] != wire.LINE_BORN:
            raise MachineError("a copy does not keep to what was agreed")
        pidfd = os.pidfd_open(pid)
        self._pidfds.append(pidfd)
        self._check_kinship(pid)
        await self._groundwork.dress(
            pid,
            stem=self._origin.pidfd,
            branch=pidfd,
            owner=self._family.owner,
            max_processes=self._family.max_processes,
        )
        mappings = _shared_mappings(pid, self._family.devices)
        self._shared.update((one["device"], one["inode"]) for one in mappings)
        ends.line.send(wire.LINE_DRESS + json.dumps(mappings).encode())
        packet, _ = await self._packet(ends.line)
        if packet[:1] != wire.LINE_DRESSED:
            raise MachineError(f"{packet[1:].decode('utf-8', 'replace') or 'a copy ended'}")
        return pidfd

    def _check_kinship(self, pid: int) -> None:
        """A copy is pid 1 of a namespace in the session's own, and the midwife's child."""
        status = status_of(pid)
        depth = len(status_of(self._origin.pid).get("NSpid", "").split())
        pids = status.get("NSpid", "").split()
        if status.get("PPid") not in (str(self._midwife), str(self._origin.pid)) or len(pids) != depth + 1 or pids[-1] != "1":
            raise MachineError("what was born is no copy")

    def _look(self, first: int, second: int) -> None:
        """Step 4, without the help of those that are looked at."""
        pids, devices = [pid_of(first), pid_of(second)], self._family.devices
        own_devices = [os.stat(f"/proc/{pid}/root/tmp").st_dev for pid in pids]
        if len({*own_devices, *devices}) != len(devices) + 2:
            raise MachineError("a copy has no /tmp of its own")
        memory = set[tuple[int, int]]()
        for pid, ends, device in zip(pids, self.ends, own_devices, strict=True):
            if fault := _fault(pid, ends, own_device=device):
                raise MachineError(fault)
            shared = {(one["device"], one["inode"]) for one in _shared_mappings(pid, {*devices, *own_devices})}
            if shared & (memory | self._shared) or any(one in devices for one, _ in shared):
                raise MachineError("a copy kept memory of its origin")
            memory |= shared
        self._kill_others(set(pids))

    def _kill_others(self, spared: set[int]) -> None:
        """All processes in the session but its own, the spared and those below them."""
        killed = set[int]()
        num_quiet = 0
        for _ in range(_MAX_ROUNDS):
            # One look may miss a process whose parent dies meanwhile; who is killed starts none any more.
            others = _alive_below(self._origin.pid, spared) - killed
            num_quiet = 0 if others else num_quiet + 1
            if num_quiet == _NUM_QUIET_ROUNDS:
                return
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= others
        raise MachineError("it starts processes faster than they can be ended")

    def _undo(self) -> None:
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        for ends in self.ends:
            ends.close_ours()
        for sight in self._sights:
            sight.close()
        try:
            self._kill_others(set())
        except (OSError, MachineError):  # nobody knows what else is left in it
            self._origin.kill()
        self._origin.signal(signal.SIGCONT)

    async def _packet(self, line: socket.socket) -> tuple[bytes, int]:
        """The next one, and the process that sent it by the kernel's word (0 where that was not asked for)."""
        await readable(line.fileno())
        packet, control, _, _ = line.recvmsg(wire.LINE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        pids = [_CREDENTIALS.unpack(content)[0] for _, kind, content in control if kind == socket.SCM_CREDENTIALS]
        return packet, pids[0] if pids else 0


def _open_ends() -> tuple[_Ends, _Ends]:
    first = _Ends.open()
    try:
        return first, _Ends.open()
    except OSError:
        first.close_theirs()
        first.close_ours()
        raise


async def _bury(origin: Interpreter, stem: Stem) -> bool:
    """Let the session give up its memory, and stop it for good. False when it does not become another program."""
    try:
        origin.send(wire.LINE_STEM)
        origin.signal(signal.SIGCONT)
        async with asyncio.timeout(_STEM_LIMIT_S):
            await readable(origin.line.fileno())  # its line is closed when it has become another program
        return not origin.line.recv(1)
    except (OSError, TimeoutError):
        return False
    finally:
        origin.signal(signal.SIGSTOP)
        stem.release()


def _drain(line: socket.socket) -> None:
    """Of what was said late, when an earlier fork had failed already."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(_MAX_ROUNDS):
            line.recv(1)


def _alive_below(pid: int, spared: set[int]) -> set[int]:
    """Every process below `pid`, those excepted that are spared or below one that is."""
    found = set[int]()
    new = [pid]
    for one in new:
        children = [child for child in children_of(one) if child not in spared]
        new += children
        found |= {child for child in children if (fields := stat_of(child)) and fields[0] not in "ZX"}
    return found


def _shared_mappings(pid: int, devices: set[int]) -> list[dict[str, int]]:
    """What it shares with whoever else has it mapped; files of the system, which nobody can write, left out."""
    found = []
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            if (match := _MAPPING.match(line)) is None:
                continue
            start, end, offset, major, minor = (int(match[index], 16) for index in (1, 2, 4, 5, 6))
            device = os.makedev(major, minor)
            if device not in devices and not match[8].endswith(" (deleted)"):
                continue
            found.append(
                {
                    "start": start,
                    "length": end - start,
                    "offset": offset,
                    "protection": sum(bit for bit, letter in ((1, "r"), (2, "w"), (4, "x")) if letter in match[3]),
                    "device": device,
                    "inode": int(match[7]),
                }
            )
    if len(found) > _MAX_MAPPINGS:
        raise MachineError(f"it shares memory in {len(found)} places, and at most {_MAX_MAPPINGS} are copied")
    return found


def _fault(pid: int, ends: _Ends, *, own_device: int) -> str:
    """What keeps the process from being alone; empty when nothing does.

    Without capabilities it can gain none, so the second look, at its threads and children, finds everything that still has any.
    """
    if not _NO_CAPABILITY.items() <= status_of(pid).items():
        return "a copy kept capabilities"
    if status_of(pid).get("Threads") != "1" or children_of(pid):
        return "a copy is more than one process"
    for name in os.listdir(f"/proc/{pid}/fd"):
        held = os.stat(f"/proc/{pid}/fd/{name}")
        is_own = held.st_dev == own_device or (held.st_dev, held.st_ino) in ends.theirs
        if not is_own and not stat.S_ISCHR(held.st_mode):
            return f"a copy kept {os.readlink(f'/proc/{pid}/fd/{name}')!r} open"
    if os.stat(f"/proc/{pid}/cwd").st_dev != own_device and os.readlink(f"/proc/{pid}/cwd").startswith("/tmp"):
        return "a copy stayed in a directory of its origin"
    return ""
