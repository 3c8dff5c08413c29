"""Processes that Ray starts, as their caller sees them: an `Actor`, whose calls overlap, and an `ActorGroup`, called as one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from strop.cluster.actor_process import THREADS, AsyncHost, Fault, Host, end_processes, not_running, state_of
from strop.cluster.connection import Connection, enter, leave
from strop.cluster.placement import Node
from strop.cluster.ray_setup import LOGS, first_line
from strop.errors import ActorsFailed, ActorsLost, StropError, UserError

_PING_S = 0.8
_SILENT_PINGS = 4  # in a row: then a process is lost
_CLOSE_S = 15.0  # for an object, such as an engine with its server, to close
_OPEN_S = 600.0  # to start a process and make its object
_MAX_MESSAGES = 1_000  # to an actor at the same time; pings are among them
_STATES = {
    "T": " (it was stopped by a signal)",
    "t": " (a debugger holds it)",
    "D": " (it waits for a disk or a device)",
    "cut": " (its node is silent as well)",
}
_GRACE_S = 10.0  # for the other processes, when one has reported a fault or shall end
_LOOK_S = 1.0  # between two looks whether all are running
_TAIL_CHARS = 2_000  # of a log, in a message


class _Process:
    """A process on a node, with one object in it, and how messages name it."""

    def __init__(self, connection: Connection, node: Node, what: str, log: Path, gpus: float) -> None:
        self.pid = 0
        self.connection, self.node, self.what, self.log, self.gpus = connection, node, what, log, gpus
        self.host: Any = None

    def launch(self, kind: type[Host], *arguments: Any, **options: Any) -> None:
        actor = self.connection.ray.remote(kind).options(**self.connection.options(self.node, self.gpus), **options)
        path = [entry or os.getcwd() for entry in sys.path]  # what is called may be of any module
        self.host = actor.remote(path, self.log, *arguments)

    @property
    def title(self) -> str:
        place = "" if self.elsewhere is None else f" on {self.node}"
        return f"{self.what} (process {self.pid}{place})"

    @property
    def elsewhere(self) -> Node | None:
        """The node; None is this machine."""
        return None if self.connection.is_here(self.node) else self.node

    @property
    def end_of_log(self) -> str:
        end = self.log.read_text(errors="replace")[-_TAIL_CHARS:].strip()
        return f"Its log ends:\n{end or '(it is empty)'}"


def _end(processes: Sequence[_Process]) -> None:
    """Kill processes, wait for those whose nodes answer, and let their GPUs and Ray go."""
    for each in processes:
        with contextlib.suppress(Exception):  # Ray may have ended
            each.connection.ray.kill(each.host)
    for node, here in _started(processes).items():
        with contextlib.suppress(ActorsLost):  # the node is gone
            here[0].connection.run(node, end_processes, [each.pid for each in here])
    for each in processes:
        each.connection.give_back(each.node, each.gpus)
    leave()


def _started(processes: Sequence[_Process]) -> dict[Node, list[_Process]]:
    """Return the processes that have started, by node."""
    found: dict[Node, list[_Process]] = {}
    for each in processes:
        if each.pid:
            found.setdefault(each.node, []).append(each)
    return found


class Actor(_Process):
    """One object in a process of its own, whose methods are coroutines. Many calls run at the same time.

    Ray starts the process and ends it with this one, however it ends. When it dies or is silent, it is ended, and every call
    raises `ActorsLost`, which names it.
    """

    def __init__(self, connection: Connection, node: Node, what: str, log: Path, gpus: float) -> None:
        """Of a process that is not there yet; `start` is what others call."""
        super().__init__(connection, node, what, log, gpus)
        self._has_answered = True  # since the last ping
        self._numbers, self._turns = itertools.count(), itertools.count()
        self._outbox: list[tuple[int, bytes | None]] = []
        self._answers: dict[int, asyncio.Future[bytes | None]] = {}
        self._is_open = False  # whether it has made its object
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why
        self._tasks: list[asyncio.Task[None]] = []  # the pings, the results, and the end

    @classmethod
    async def start(
        cls,
        kind: Callable[..., Awaitable[Any]],
        *arguments: Any,
        what: str,
        key: str,
        log: Path,
        environment: Mapping[str, str],
        node: Node | None = None,
        gpus: float = 0.0,
    ) -> Self:
        """The object that `await kind(*arguments)` returns, in a process of its own.

        Args:
            what: the process in words, for messages.
            key: of the recipe, that asks for it.
            log: what the process prints is appended here.
            environment: variables that are added to the process's environment.
            node: None is this machine.
            gpus: that Ray gives the process, which sees no others. 0: it sees those of the machine.

        Raises what `kind` raises, and:
            UserError: Ray is not installed.
            ActorsLost: the process did not start.
        """
        connection = await asyncio.to_thread(enter, key)
        node = node or connection.here()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        threads = {name: os.environ[name] for name in (THREADS,) if name in os.environ}
        actor = cls(connection, node, what, log, gpus)
        try:
            async with asyncio.timeout(_OPEN_S):
                await asyncio.to_thread(connection.reach, node)
                actor.launch(AsyncHost, {**threads, **environment}, max_concurrency=_MAX_MESSAGES)
                actor._tasks.append(asyncio.create_task(actor._watch()))
                actor.pid = await actor._answer("start", actor.host.pid.remote())
                actor._result("start", await actor._answer("start", actor.host.open.remote(pickle.dumps((kind, arguments)))))
                actor._is_open = True
                actor._tasks.append(asyncio.create_task(actor._fetch()))
        except TimeoutError as error:
            raise actor.lose(f"did not start within {_OPEN_S:g} s") from error
        except BaseException:
            await actor.close()
            raise
        return actor

    @property
    def is_alive(self) -> bool:
        """Whether it was neither lost nor closed."""
        return not self._lost.done()

    async def call(self, name: str, *arguments: Any) -> Any:
        """Return the result of the object's method. It is cancelled with this call.

        Raises what the method raises, and:
            ActorsLost: the process is gone, or failed in another way than by an error of strop.
        """
        number = self._begin(name, arguments)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({answer, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._send(number, None)
            raise
        finally:
            del self._answers[number]
        if not answer.done():
            raise ActorsLost(self._lost.result())
        return self._result(name, answer.result())

    def tell(self, name: str, *arguments: Any) -> None:
        """Begin a call whose result does not matter, unless the process is lost."""
        self._begin(name, arguments)

    async def wait_lost(self) -> None:
        """Return when it is lost or closed."""
        await asyncio.wait({self._lost})

    def lose(self, why: str, *, is_closed: bool = False) -> ActorsLost:
        """End the process and every call. Return the error for the caller."""
        if not self._lost.done():
            self._lost.set_result(f"{self.title} {why}. {self.end_of_log}")
            for task in self._tasks:
                task.cancel()
            self._tasks.append(asyncio.create_task(asyncio.to_thread(_end, [self])))
            if not is_closed:
                self.connection.note("process_lost", process=self.what, node=str(self.node), reason=why)
        return ActorsLost(self._lost.result())

    async def close(self) -> None:
        """Return when the process has ended. May be called twice."""
        self.lose("was closed", is_closed=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def shut_down(self) -> None:
        """Let the object `close`, for a short time, and end the process. May be called twice."""
        with contextlib.suppress(StropError, TimeoutError):  # what does not close is ended
            async with asyncio.timeout(_CLOSE_S):
                await self.call("close")
        await self.close()

    def _begin(self, name: str, arguments: tuple[Any, ...]) -> int:
        message, number = pickle.dumps((name, arguments)), next(self._numbers)
        self._send(number, message)
        return number

    def _send(self, number: int, message: bytes | None) -> None:
        """Send a call with all others of this turn of the event loop."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((number, message))

    def _flush(self) -> None:
        calls, self._outbox = self._outbox, []
        if not self._lost.done():
            self.host.begin.remote(next(self._turns), calls)

    async def _fetch(self) -> None:
        with contextlib.suppress(ActorsLost):
            while True:
                for number, result in await self._answer("its calls", self.host.results.remote()):
                    if (answer := self._answers.get(number)) is not None and not answer.done():
                        answer.set_result(result)

    def _result(self, call: str, answer: bytes | None) -> Any:
        if answer is None:
            raise asyncio.CancelledError  # by another call
        if isinstance(result := pickle.loads(answer), Fault):
            raise result.error or self.lose(f"broke during {call}: {result.text}")
        return result

    async def _answer(self, call: str, ref: Any) -> Any:
        answer = asyncio.wrap_future(ref.future())
        try:
            await asyncio.wait({answer, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                raise ActorsLost(self._lost.result())
            result = answer.result()
        except self.connection.ray.exceptions.RayError as error:
            raise self.lose(f"ended during {call}: {first_line(error)}") from error
        finally:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # read, so that asyncio does not log it
        self._has_answered = True
        return result

    async def _watch(self) -> None:
        """Pings are counted, not timed: when this process itself was held up, the other is not to blame."""
        num_silent, of_node = 0, None
        while True:
            self._has_answered = False
            ping = asyncio.ensure_future(self._answer("a ping", self.host.pid.remote()))
            ping.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.sleep(_PING_S)
            num_silent = 0 if self._has_answered else num_silent + 1
            if num_silent == 1 and self.elsewhere is not None:
                of_node = self.connection.start(self.node, state_of, self.pid)
            if num_silent < _SILENT_PINGS:
                continue
            try:
                state = state_of(self.pid) if of_node is None else self.connection.wait(self.node, of_node, 0.0)
            except ActorsLost as error:  # its node had the time of the other pings
                self.connection.set_aside(self.node, str(error))
                state = "cut"
            if self._is_open or state in ("T", "t", "cut"):
                break
            num_silent = 0  # it makes its object, and may answer nothing meanwhile
        why = _STATES.get(state, "")
        self.lose(f"hangs: it answered none of {num_silent} pings, one every {_PING_S:g} s{why}")


class ActorGroup:
    """`num` processes that hold an object each. A call is made on all of them; its result is that of the first.

    Ray starts the processes and ends them with this one, however it ends. When one of them dies, hangs or breaks, all are
    ended and every call raises `ActorsLost`, which names it.

    Args:
        what, key, gpus: as of `Actor.start`.
        timeout_s: of one call.
        nodes: of each process; this machine when not given.

    Raises:
        UserError: Ray is not installed.
        ActorsLost: Ray could not start the processes.
    """

    def __init__(
        self, num: int, *, what: str, key: str, timeout_s: float, nodes: Sequence[Node] = (), gpus: float = 0.0
    ) -> None:
        self._connection = connection = enter(key)
        self._ray = connection.ray
        self._what, self._timeout_s = what, timeout_s
        self._is_open, self._lost = True, ""
        self._lock, self._ended = threading.RLock(), threading.Event()  # `close` is also called within a call
        self._logs = Path(tempfile.mkdtemp(prefix="strop-actors-", dir=connection.directory))
        self.processes = [
            _Process(connection, node, f"rank {rank} of {num} of {what}", self._logs / f"rank-{rank}.log", gpus)
            for rank, node in enumerate(nodes or [connection.here()] * num)
        ]
        try:
            for node in {each.node for each in self.processes}:
                connection.reach(node)
            for each in self.processes:
                each.launch(Host)
            pids = self._ray.get([each.host.pid.remote() for each in self.processes], timeout=timeout_s)
            for each, pid in zip(self.processes, pids, strict=True):
                each.pid = pid
            threading.Thread(target=self._watch, daemon=True).start()
        except self._ray.exceptions.RayError as error:
            self.close()
            raise ActorsLost(f"{key}: Ray did not start {num} processes: {first_line(error)}. {LOGS}") from error
        except BaseException:
            self.close()
            raise

    def make(self, kind: Callable[..., Any], arguments_of: Sequence[tuple[Any, ...]]) -> None:
        """Make the object of each process: `kind(*arguments)`, which is called as (name, *arguments).

        Raises what all of them raise, and `ActorsLost`.
        """
        self._on_all("start", [pickle.dumps((kind, arguments)) for arguments in arguments_of], method="make")

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the first process's result when all have answered.

        Raises:
            ValueError: the arguments cannot be sent.
            ActorsLost: a process is gone, or had not answered in time.
        """
        try:
            message = pickle.dumps((name, arguments))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{name}: {error}: this cannot be sent to {self._what}'s processes. Pass functions of a module, or methods of a"
                " value that can be pickled; no lambda and no local function."
            ) from error
        return self._on_all(name, [message] * len(self.processes))

    def close(self) -> None:
        """End all processes, after the running call or a short time, and Ray with the last of them. Safe to call twice."""
        self._ended.set()
        is_idle = self._lock.acquire(timeout=_GRACE_S)
        try:
            if self._is_open:
                self._is_open, self._lost = False, self._lost or f"{self._what} is closed"
                _end(self.processes)
                shutil.rmtree(self._logs, ignore_errors=True)
        finally:
            if is_idle:
                self._lock.release()

    def _on_all(self, call: str, messages: Sequence[bytes], *, method: str = "call") -> Any:
        with self._lock:
            if self._lost:
                raise ActorsLost(self._lost)
            copies = {message: self._ray.put(message) for message in messages}  # one for all processes of a machine
            processes = zip(self.processes, messages, strict=True)
            return self._collect(call, [getattr(each.host, method).remote(copies[message]) for each, message in processes])

    def _collect(self, call: str, refs: list[Any]) -> Any:
        answers: dict[int, Any] = {}
        # Processes that wait for another one say so after the timeout; the grace is for what they say.
        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        while missing := [ref for number, ref in enumerate(refs) if number not in answers]:
            left_s = deadline - time.monotonic()
            ready, _ = self._ray.wait(missing, num_returns=1, timeout=max(0.0, min(_LOOK_S, left_s)))
            if not ready:
                if left_s <= 0:
                    break
                self._check_running(call)
                continue
            number = refs.index(ready[0])
            try:
                answers[number] = pickle.loads(self._ray.get(ready[0]))
            except self._ray.exceptions.RayError as error:
                lost = self.processes[number]
                raise self._lose(f"{lost.title} ended during {call}: {first_line(error)}", lost) from error
            if isinstance(answers[number], Fault):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        faults = {self.processes[number]: answer for number, answer in sorted(answers.items()) if isinstance(answer, Fault)}
        silent = [process for number, process in enumerate(self.processes) if number not in answers]
        if len(faults) == len(refs) and (mistake := next(iter(faults.values())).error) is not None:
            raise mistake  # what all report is the caller's
        if faults:  # the others wait for these
            what = [f"{each.title} broke during {call}: {fault.text}" for each, fault in faults.items()]
            failure = ActorsFailed(str(self._lose("; ".join(what), next(iter(faults)))))
            mistakes = [fault.error for fault in faults.values() if isinstance(fault.error, UserError)]
            raise mistakes[0] if mistakes else failure
        if silent:
            what = [f"{each.title} gave no answer to {call}" for each in silent]
            raise self._lose("; ".join(what), silent[0])
        return answers[0]

    def _watch(self) -> None:
        """Notice a loss between calls; the next call raises it."""
        while not self._ended.wait(_LOOK_S):
            if self._lock.acquire(blocking=False):
                try:
                    if not self._ended.is_set():
                        self._check_running("a wait")
                except ActorsLost:
                    pass
                finally:
                    self._lock.release()

    def _check_running(self, call: str) -> None:
        """Raises `ActorsLost` for a stopped process or a silent node, which Ray does not report, or late."""
        by_node = _started(self.processes)
        if (silent := self._connection.find_silent(list(by_node))) is not None:
            lost = by_node[silent][0]
            raise self._lose(f"{lost.title}: its node was silent during {call}", lost)
        for node, here in by_node.items():
            states = self._connection.run(node, not_running, [each.pid for each in here])
            for each in here:
                if each.pid in states:
                    raise self._lose(f"{each.title} {states[each.pid]} during {call}", each)

    def _lose(self, reason: str, process: _Process) -> ActorsLost:
        self._lost = f"{reason}. {process.end_of_log}"
        self.close()
        self._connection.note("process_lost", process=self._what, node=str(process.node), reason=reason)
        return ActorsLost(self._lost)
