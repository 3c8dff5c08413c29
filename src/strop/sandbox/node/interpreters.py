"""The process that holds a session's state, as the supervisor has it: its line, its output, its death, and what it lies in.

The first one of a session is a child of a fork server. When it is forked it becomes the stem of two others, which die with it;
so it lives as long as one of them does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from strop.sandbox.inside import seccomp
from strop.sandbox.node.processes import is_readable
from strop.sandbox.node.sights import Sight
from strop.sandbox.node.zygotes import LOST, Child, Ended

_MAX_REFUSED_AT_ONCE = 8


@dataclass(slots=True, kw_only=True)
class Family:
    """What a session and all its copies have in common. Closed with the last of them."""

    listener: int  # answers those that ask for namespaces; -1 where there are none
    owner: int  # uid on this machine of whoever owns their namespaces
    max_processes: int  # that each may start
    forking: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time: the questions of all come in at one place
    members: set[Interpreter] = field(default_factory=set)  # stems too

    @property
    def devices(self) -> set[int]:
        """Of every /tmp that one of them has."""
        return {member.tmp_device for member in self.members}

    def refuse_questions(self) -> None:
        """Of programs that ask for namespaces or mounts unordered. A few at a time, so that asking costs them more than us."""
        if self.listener < 0 or self.forking.locked():
            return
        for _ in range(_MAX_REFUSED_AT_ONCE):
            if (question := self.next_question()) is None:
                return
            seccomp.refuse(self.listener, question.id)

    def next_question(self) -> seccomp.Notification | None:
        """What a program waits for, without waiting for one that does."""
        if not is_readable(self.listener):  # to ask the kernel for a question that is not there takes until there is one
            return None
        try:
            return seccomp.receive(self.listener)
        except OSError:  # all who could ask have died since
            return None

    def leave(self, member: Interpreter) -> None:
        self.members.remove(member)
        if not self.members and self.listener >= 0:
            os.close(self.listener)
            self.listener = -1


class Interpreter:
    """One living process. `on_end` is called once, when it and everything that it started are dead.

    Args:
        line: a seqpacket socket, its other end in the process.
        output: what it prints, all cells of it.
        pidfd: of the process.
        sight: of the process. This one closes it with the rest.
        family: of its session and the copies of it.
        stem: the process in whose namespaces its own lie; None for a child of a fork server.
        child: that child; None for a copy.
    """

    def __init__(
        self,
        line: socket.socket,
        output: int,
        pidfd: int,
        *,
        sight: Sight,
        family: Family,
        stem: Stem | None = None,
        child: Child | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._child = child
        self._is_closed = False
        self.line = line
        self.output = output
        self.pidfd = pidfd
        self.sight = sight
        self.pid = sight.pid
        self.tmp_device = sight.tmp_device
        self.family = family
        self.stem = stem
        self.depth: int = 0 if stem is None else stem.interpreter.depth + 1
        self.ended: Ended | None = None
        self.on_end: Callable[[], None] | None = None
        family.members.add(self)
        if child is None:
            self._loop.add_reader(pidfd, self._take_end)
        else:
            child.watch(self._take_end)

    @property
    def adopter(self) -> int:
        return 0 if self._child is None else self._child.adopter

    def host_pid(self) -> int | None:
        return self.pid if self.ended is None else None

    @property
    def root(self) -> Interpreter:
        """The first of its family, in whose namespaces all others lie."""
        return self if self.stem is None else self.stem.interpreter.root

    def send(self, packet: bytes, descriptors: Sequence[int] = ()) -> None:
        """Raises `OSError` when it closed its end, or reads nothing any more."""
        socket.send_fds(self.line, [packet], list(descriptors))

    def signal(self, number: signal.Signals) -> None:
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """With pid 1 of a namespace dies everything in it."""
        if self._child is not None:
            self._child.kill()
        else:
            self.signal(signal.SIGKILL)

    def abandon(self) -> None:
        """It was killed and nobody says that it is dead."""
        if self._child is not None:
            self._child.abandon()

    @property
    def is_dead(self) -> bool:
        """Whether it is over, even if nobody has said so yet."""
        return self.ended is not None or is_readable(self.pidfd)

    def close(self) -> None:
        """Kill it, and give everything back as soon as it is dead. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.ended is None:
            self.kill()
        else:
            self._release()

    def _take_end(self) -> None:
        is_unwanted = self._is_closed
        if self._child is not None:
            self.ended = self._child.ended
        else:
            self._loop.remove_reader(self.pidfd)
            self.ended = _end_of(self.sight)
        if self.on_end is not None:
            self.on_end()
        if is_unwanted:
            self._release()

    def _release(self) -> None:
        self.line.close()
        self.sight.close()
        if self._child is not None:
            self._child.close()  # with its descriptors
        else:
            os.close(self.pidfd)
            os.close(self.output)
        if self.stem is not None:
            self.stem.release()
        self.family.leave(self)


class Stem:
    """An interpreter that was forked: it runs nothing any more, and ends with the last of those that need it."""

    def __init__(self, interpreter: Interpreter, *, num_users: int) -> None:
        self._num_users = num_users
        self.interpreter = interpreter

    def release(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self.interpreter.close()


async def readable(descriptor: int) -> None:
    """Returns when there is something to read."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _end_of(sight: Sight) -> Ended:
    """Of a copy, from what is left of it: nobody waits for it, so its entry stays until its stem is killed."""
    fields = sight.stat
    if not fields or fields[0] not in "ZX":
        return LOST
    status = int(fields[49])
    return Ended(
        exit_code=None if status & 0x7F else (status >> 8) & 0xFF,
        signal=status & 0x7F or None,
        cpu_s=sight.cpu_s,
        peak_bytes=0,
    )
