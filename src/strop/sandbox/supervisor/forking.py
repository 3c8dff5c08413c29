"""Forks the interpreter of a session: the supervisor's half of `inside.cells`.

    1. a session with threads, child processes, open files or shared memory is refused
    2. the session forks a midwife, which asks the kernel for new namespaces, twice; the supervisor answers
    3. each copy gets its uid, its /tmp and its limits from outside, and copies the files of its origin
    4. the supervisor inspects each copy: no capability, and nothing that it shares with another process
    5. the session becomes the stem of its two copies

A program can make a fork fail, and nothing worse: Landlock forbids it every mount and the filter everything else that
namespaces are good for, and a process counts as a copy only after step 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
from dataclasses import dataclass
from typing import Self

from strop.errors import MachineError, SessionLost
from strop.sandbox.inside import confine, kernel, seccomp, wire
from strop.sandbox.protocol import IsolationLevel
from strop.sandbox.supervisor.fork_servers import BOOT, start_inside
from strop.sandbox.supervisor.process_status import ProcessStatus, children_of, pid_of, stat_of, status_of
from strop.sandbox.supervisor.processes import Interpreter, drain, readable

MAX_DEPTH = 24  # pid and user namespaces nest 32 deep
_LIMIT_S = 5.0  # of a fork; 10 ms on an idle machine
_STEP_LIMIT_S = 5.0  # of one step of the helper; 1 ms on an idle machine
_NUM_QUIET_ROUNDS = 3  # rounds without a living process until all are known to be dead
_MAX_ROUNDS = 100
_FLAGS = kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
_STRICT_FLAGS = kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS
_ALL_FLAGS = _FLAGS | _STRICT_FLAGS | 0x02000000  # the last is CLONE_NEWCGROUP
_CREDENTIALS = struct.Struct("=iII")
_SHARED_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (..)[x-]s [0-9a-f]+ \S+ \d+ *(.*)")
_OWN_NUMBERS = {0, 1, 2, confine.WAKE}  # descriptors of every session
_NO_CAPABILITY = {"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000"}


@dataclass(frozen=True, slots=True)
class _Ends:
    """Line and output of a future copy: our ends and its ends."""

    line: socket.socket
    output: int
    theirs: tuple[int, int]
    identities: set[tuple[int, int]]  # device and inode of its ends

    @classmethod
    def open(cls, ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> Self:
        line, their_line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.callback(line.close)
        theirs.callback(their_line.close)
        output, their_output = os.pipe2(os.O_CLOEXEC)
        ours.callback(os.close, output)
        theirs.callback(os.close, their_output)
        line.setblocking(False)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        os.set_blocking(output, False)
        ends = their_line.fileno(), their_output
        return cls(line, output, ends, {(held.st_dev, held.st_ino) for held in map(os.fstat, ends)})


async def fork(origin: Interpreter, *, level: IsolationLevel, helper: NamespaceHelper) -> tuple[Interpreter, Interpreter]:
    """Return two copies of `origin`, which becomes their stem.

    Raises:
        MachineError: the session cannot be forked, and goes on as it was.
        SessionLost: the session did not become a stem, and is killed with its copies.
    """
    flags = _FLAGS | (_STRICT_FLAGS if level is IsolationLevel.STRICT else 0)
    try:
        async with asyncio.timeout(_LIMIT_S), origin.family.forking:
            if obstacle := _obstacle(origin.pid, own=None):
                raise MachineError(f"it {obstacle}. Close what it holds in a cell, then fork again")
            copies = await _Fork(origin, flags, helper).run()
    except TimeoutError as error:
        raise MachineError(f"the session could not be forked: it took more than {_LIMIT_S:.0f} s") from error
    except (OSError, MachineError) as error:
        raise MachineError(f"the session could not be forked: {error}") from error
    await _retire(origin, copies)
    return copies


class _Fork:
    """One fork, from the order to two inspected copies."""

    def __init__(self, origin: Interpreter, flags: int, helper: NamespaceHelper) -> None:
        self._origin = origin
        self._listener = origin.family.listener
        self._flags = flags
        self._helper = helper
        self._midwife = 0
        self._held: list[int] = []  # questions of other processes
        self._ours = contextlib.ExitStack()  # what belongs to the copies, if there will be any

    async def run(self) -> tuple[Interpreter, Interpreter]:
        try:
            with contextlib.ExitStack() as theirs:
                pair = [_Ends.open(self._ours, theirs) for _ in range(2)]
                drain(self._origin.line)  # late packets of an earlier fork that failed
                self._origin.send(wire.FORK.pack(wire.LINE_FORK, self._flags), [end for ends in pair for end in ends.theirs])
            async with asyncio.TaskGroup() as tasks:
                failure = tasks.create_task(self._wait_for_failure())
                answers = tasks.create_task(self._answer())
                copies = [tasks.create_task(self._prepare_copy(ends)) for ends in pair]
                await asyncio.wait([answers, *copies])
                failure.cancel()
            pidfds = [copy.result() for copy in copies]
            statuses = self._inspect(pidfds, pair)
        except BaseException as error:
            self._undo()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        finally:
            for question in self._held:
                seccomp.refuse(self._listener, question)
        self._ours.pop_all()
        first, second = (
            Interpreter(ends.line, ends.output, pidfd, status=status, family=self._origin.family, stem=self._origin)
            for ends, pidfd, status in zip(pair, pidfds, statuses, strict=True)
        )
        return first, second

    async def _wait_for_failure(self) -> None:
        """The session and its midwife report what fails before there are copies."""
        packet, _ = await _receive(self._origin.line)
        if packet[:1] == wire.LINE_FAILED:
            raise MachineError(packet[1:].decode("utf-8", "replace"))
        raise MachineError("it ended, or broke the protocol of a fork")

    async def _answer(self) -> None:
        """Allow the two clones of the midwife. Other questions wait until the fork is over, so that no program can flood us."""
        num_allowed = 0
        while num_allowed < 2:
            await readable(self._listener)
            if (question := self._origin.family.next_question()) is None:
                continue
            if not self._is_ordered(question):
                self._held.append(question.id)
                continue
            if num_allowed == 0:
                self._midwife = question.pid
                self._origin.signal(signal.SIGSTOP)
                pidfd = os.pidfd_open(self._midwife)
                try:
                    # The limit of a midwife is the limit of all copies together.
                    await self._helper.ask(
                        wire.STEP_LIMIT,
                        self._midwife,
                        owner=self._origin.family.owner,
                        max_processes=wire.MAX_FAMILY_PROCESSES,
                        descriptors=[pidfd],
                    )
                finally:
                    os.close(pidfd)
            num_allowed += seccomp.allow(self._listener, question.id)

    def _is_ordered(self, question: seccomp.Notification) -> bool:
        """The first clone with the right flags, by a child of the session with one thread, makes that child the midwife."""
        if question.name != "clone" or question.arguments[0] & _ALL_FLAGS != self._flags:
            return False
        if self._midwife:
            return question.pid == self._midwife
        status = status_of(question.pid)
        return status.get("PPid") == str(self._origin.pid) and status.get("Threads") == "1"

    async def _prepare_copy(self, ends: _Ends) -> int:
        """From the first packet of a copy to its last one before the inspection. Returns its pidfd."""
        packet, pid = await _receive(ends.line)
        if packet[:1] != wire.LINE_BORN:
            raise MachineError("a copy broke the protocol of a fork")
        pidfd = os.pidfd_open(pid)
        self._ours.callback(os.close, pidfd)
        self._check_parent(pid)
        family = self._origin.family
        await self._helper.ask(
            wire.STEP_PREPARE,
            pid,
            owner=family.owner,
            max_processes=family.max_processes,
            descriptors=[self._origin.pidfd, pidfd],
        )
        ends.line.send(wire.LINE_DRESS)
        packet, _ = await _receive(ends.line)
        if packet[:1] != wire.LINE_DRESSED:
            raise MachineError(packet[1:].decode("utf-8", "replace") or "a copy ended")
        return pidfd

    def _check_parent(self, pid: int) -> None:
        """A copy is pid 1 of a namespace in the namespace of the session, and a child of the midwife."""
        status = status_of(pid)
        depth = len(status_of(self._origin.pid).get("NSpid", "").split())
        pids = status.get("NSpid", "").split()
        if status.get("PPid") not in (str(self._midwife), str(self._origin.pid)) or len(pids) != depth + 1 or pids[-1] != "1":
            raise MachineError("the new process is not a copy")

    def _inspect(self, pidfds: list[int], pair: list[_Ends]) -> list[ProcessStatus]:
        """Step 4. A process without capabilities can gain none, so what this finds stays true."""
        pids = [pid_of(pidfd) for pidfd in pidfds]
        for pid, ends in zip(pids, pair, strict=True):
            if not _NO_CAPABILITY.items() <= status_of(pid).items():
                raise MachineError("a copy kept capabilities")
            if obstacle := _obstacle(pid, own=ends.identities):
                raise MachineError(f"a copy {obstacle}")
            directory, tmp = f"/proc/{pid}/cwd", f"/proc/{pid}/root/tmp"
            if os.readlink(directory).startswith("/tmp") and os.stat(directory).st_dev != os.stat(tmp).st_dev:
                raise MachineError("a copy stayed in a directory of its origin")
        self._kill_others(set(pids))
        statuses = []
        for pidfd in pidfds:
            statuses.append(ProcessStatus.of(pidfd))
            self._ours.callback(statuses[-1].close)
        return statuses

    def _kill_others(self, spared: set[int]) -> None:
        """Kill every process below the session, except `spared` and the processes below those."""
        killed = set[int]()
        num_quiet = 0
        for _ in range(_MAX_ROUNDS):
            # One round may miss a process whose parent dies meanwhile; a killed process starts no other.
            others = _alive_below(self._origin.pid, spared) - killed
            num_quiet = 0 if others else num_quiet + 1
            if num_quiet == _NUM_QUIET_ROUNDS:
                return
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= others
        raise MachineError("it starts processes faster than they can be killed")

    def _undo(self) -> None:
        """Kill the midwife and the copies, and let the session go on."""
        self._ours.close()
        try:
            self._kill_others(set())
        except (OSError, MachineError):  # unknown processes may be left in it
            self._origin.kill()
        self._origin.signal(signal.SIGCONT)


async def _retire(origin: Interpreter, copies: tuple[Interpreter, Interpreter]) -> None:
    """Make the session execute another program, which frees its memory, and stop that for good."""
    origin.num_copies = 2
    with contextlib.suppress(OSError, TimeoutError):
        origin.send(wire.LINE_STEM)
        origin.signal(signal.SIGCONT)
        async with asyncio.timeout(_LIMIT_S):
            await readable(origin.line.fileno())  # its line closes when it executes the other program
        if not origin.line.recv(1):
            origin.signal(signal.SIGSTOP)
            return
    origin.kill()
    for copy in copies:
        copy.close()
    raise SessionLost("the session did not free its memory after a fork; it is killed with its copies")


async def _receive(line: socket.socket) -> tuple[bytes, int]:
    """The next packet, and the pid of its sender according to the kernel (0 where that was not asked for)."""
    await readable(line.fileno())
    packet, control, _, _ = line.recvmsg(wire.LINE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
    pids = [_CREDENTIALS.unpack(content)[0] for _, kind, content in control if kind == socket.SCM_CREDENTIALS]
    return packet, pids[0] if pids else 0


def _alive_below(pid: int, spared: set[int]) -> set[int]:
    """Every living process below `pid`, except `spared` and the processes below those."""
    found = set[int]()
    new = [pid]
    for one in new:
        children = [child for child in children_of(one) if child not in spared]
        new += children
        found |= {child for child in children if (fields := stat_of(child)) and fields[0] not in "ZX"}
    return found


def _obstacle(pid: int, *, own: set[tuple[int, int]] | None) -> str:
    """What the process shares with other processes, as the end of a sentence; empty if nothing.

    Args:
        own: device and inode of the files that a copy may have open, other than devices. None for a session before its fork.
    """
    if status_of(pid).get("Threads") != "1":
        return "runs threads"
    if _alive_below(pid, set()):
        return "runs child processes"
    for name in os.listdir(f"/proc/{pid}/fd"):
        held = os.stat(f"/proc/{pid}/fd/{name}")
        is_own = int(name) in _OWN_NUMBERS if own is None else (held.st_dev, held.st_ino) in own
        if not is_own and not stat.S_ISCHR(held.st_mode):
            return f"holds {os.readlink(f'/proc/{pid}/fd/{name}')!r} open"
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            match = _SHARED_MAPPING.match(line)
            if match and ("w" in match[1] or match[2].startswith("/tmp/") or match[2].endswith(" (deleted)")):
                return f"holds shared memory ({match[2]})"
    return ""


class NamespaceHelper:
    """The process of `inside.confine.main`, started when first needed and after its death. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Start the process unless it runs."""
        if self._socket is None:
            script = [sys.executable, "-s", "-P", "-S", "-B", str(BOOT), "confine"]
            environment = {"PATH": os.defpath, "LANG": "C.UTF-8"}
            self._socket, self._process = start_inside(lambda control: [*script, str(control)], environment)

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def ask(self, step: bytes, pid: int, *, owner: int, max_processes: int, descriptors: list[int]) -> None:
        """Have it do a step of `inside.confine.main` on a process. Raises `MachineError`.

        Args:
            step: `wire.STEP_LIMIT` or `wire.STEP_PREPARE`.
            owner: uid of the owner of the namespaces of that process.
            max_processes: how many processes may be started in them.
            descriptors: pidfds, as described at the step.
        """
        async with self._turn:
            try:
                self.start()
                assert self._socket is not None
                message = wire.NAMESPACE_STEP.pack(step, pid, owner, max_processes, confine.INNER_UID)
                socket.send_fds(self._socket, [message], descriptors)
                async with asyncio.timeout(_STEP_LIMIT_S):
                    answer = await asyncio.get_running_loop().sock_recv(self._socket, 4_096)
            except (OSError, TimeoutError, asyncio.CancelledError) as error:
                self.close()  # a later answer would be taken for the answer to another step
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise MachineError(f"the helper that prepares copies of sessions does not answer ({error})") from error
            if not answer:
                self.close()
                raise MachineError("the helper that prepares copies of sessions died")
            if answer != wire.STEP_DONE:
                raise MachineError(answer.decode("utf-8", "replace"))
