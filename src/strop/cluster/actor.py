"""One process that Ray starts, whose calls run at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from strop.cluster.actors import Fault, Host, attempt, end_of_log, end_processes, fault_of, import_path, state_of
from strop.cluster.connection import Connection, enter, first_line, leave
from strop.cluster.placement import Node
from strop.errors import ActorsLost

_PING_S = 0.8
_SILENT_PINGS = 4  # in a row: then a process is lost
_OPEN_S = 600.0  # to start a process and make its object
_MAX_MESSAGES = 1_000  # to an actor at the same time; pings are among them
_THREADS = "OMP_NUM_THREADS"
_STATES = {
    "T": " (it was stopped by a signal)",
    "t": " (a debugger holds it)",
    "D": " (it waits for a disk or a device)",
    "cut": " (its node is silent as well)",
}


class _AsyncHost(Host):
    """One object in a process of its own, whose methods are coroutines.

    What Ray costs grows with the number of its calls, so that one message begins many calls, in the order in which they were
    made, and results are fetched together.
    """

    def __init__(self, path: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        super().__init__(path, log)
        os.environ.pop(_THREADS, None)  # Ray sets it to 1
        os.environ.update(environment)
        self._turn = 0
        self._early: dict[int, asyncio.Event] = {}  # messages that arrived before an earlier one
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._ended: list[tuple[int, bytes | None]] = []
        self._has_ended = asyncio.Event()

    async def open(self, message: bytes) -> bytes:
        """Make the object: `message` is the coroutine function that makes it, and its arguments."""
        try:
            kind, arguments = pickle.loads(message)
            self._held = await kind(*arguments)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            return fault_of(error)
        return pickle.dumps(None)

    async def begin(self, turn: int, calls: Sequence[tuple[int, bytes | None]]) -> None:
        """Begin calls: the number and message of each; those without a message are cancelled."""
        if turn != self._turn:  # Ray keeps no order
            early = self._early[turn] = asyncio.Event()
            await early.wait()
        for number, message in calls:
            if message is not None:
                running = self._running[number] = asyncio.ensure_future(self._call(message))
                running.add_done_callback(functools.partial(self._end_call, number))
            elif number in self._running:
                self._running[number].cancel()
        self._turn += 1
        if (later := self._early.pop(self._turn, None)) is not None:
            later.set()

    async def _call(self, message: bytes) -> Any:
        name, arguments = pickle.loads(message)
        return await getattr(self._held, name)(*arguments)

    def _end_call(self, number: int, done: asyncio.Future[Any]) -> None:
        del self._running[number]
        if done.cancelled():
            answer = None
        elif isinstance(error := done.exception(), Exception):
            answer = fault_of(error)
        else:
            answer = attempt(done.result)
        self._ended.append((number, answer))
        self._has_ended.set()

    async def results(self) -> list[tuple[int, bytes | None]]:
        """Return the results of the calls that have ended since the last time, when there are any; None: cancelled."""
        await self._has_ended.wait()
        self._has_ended.clear()
        ended, self._ended = self._ended, []
        return ended


class Actor:
    """One object in a process of its own, whose methods are coroutines. Many calls run at the same time.

    Ray starts the process and ends it with this one, however it ends. When it dies or is silent, it is ended, and every call
    raises `ActorsLost`, which names it.
    """

    def __init__(self, connection: Connection, node: Node, what: str, log: Path) -> None:
        """Of a process that is not there yet; `start` is what others call."""
        self.pid = 0
        self._connection, self._node, self._what, self._log = connection, node, what, log
        self._host: Any = None
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
        threads = {name: os.environ[name] for name in (_THREADS,) if name in os.environ}
        options = {**connection.options(node, gpus), "max_concurrency": _MAX_MESSAGES}
        host = connection.ray.remote(_AsyncHost).options(**options)
        actor = cls(connection, node, what, log)
        try:
            async with asyncio.timeout(_OPEN_S):
                await asyncio.to_thread(connection.reach, node)
                actor._host = host.remote(import_path(), log, {**threads, **environment})
                actor._tasks.append(asyncio.create_task(actor._watch()))
                actor.pid = await actor._answer("start", actor._host.pid.remote())
                actor._result("start", await actor._answer("start", actor._host.open.remote(pickle.dumps((kind, arguments)))))
                actor._is_open = True
                actor._tasks.append(asyncio.create_task(actor._fetch()))
        except TimeoutError as error:
            raise actor.lose(f"did not start within {_OPEN_S:g} s") from error
        except BaseException:
            await actor.close()
            raise
        return actor

    @property
    def title(self) -> str:
        place = "" if self._connection.is_here(self._node) else f" on {self._node}"
        return f"{self._what} (process {self.pid}{place})"

    @property
    def elsewhere(self) -> Node | None:
        """The node; None is this machine."""
        return None if self._connection.is_here(self._node) else self._node

    @property
    def is_alive(self) -> bool:
        """Whether it was neither lost nor closed."""
        return not self._lost.done()

    async def call(self, name: str, *arguments: Any) -> Any:
        """Return the result of the object's method. It is cancelled with this call.

        Raises what the method raises, and:
            ActorsLost: the process is gone, or failed in another way than by an error of strop.
        """
        if self._lost.done():
            raise ActorsLost(self._lost.result())
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
        if not self._lost.done():
            self._begin(name, arguments)

    async def wait_lost(self) -> None:
        """Return when it is lost or closed."""
        await asyncio.wait({self._lost})

    def lose(self, why: str, *, is_closed: bool = False) -> ActorsLost:
        """End the process and every call. Return the error for the caller."""
        if not self._lost.done():
            self._lost.set_result(f"{self.title} {why}. {end_of_log(self._log)}")
            for task in self._tasks:
                task.cancel()
            self._tasks.append(asyncio.create_task(asyncio.to_thread(self._end)))
            if not is_closed:
                self._connection.note("process_lost", process=self._what, node=str(self._node), reason=why)
        return ActorsLost(self._lost.result())

    async def close(self) -> None:
        """Return when the process has ended. May be called twice."""
        self.lose("was closed", is_closed=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
            self._host.begin.remote(next(self._turns), calls)

    async def _fetch(self) -> None:
        with contextlib.suppress(ActorsLost):
            while True:
                for number, result in await self._answer("its calls", self._host.results.remote()):
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
        except self._connection.ray.exceptions.RayError as error:
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
            ping = asyncio.ensure_future(self._answer("a ping", self._host.pid.remote()))
            ping.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.sleep(_PING_S)
            num_silent = 0 if self._has_answered else num_silent + 1
            if num_silent == 1 and self.elsewhere is not None:
                of_node = self._connection.start(self._node, state_of, self.pid)
            if num_silent < _SILENT_PINGS:
                continue
            try:
                state = state_of(self.pid) if of_node is None else self._connection.wait(self._node, of_node, 0.0)
            except ActorsLost as error:  # its node had the time of the other pings
                self._connection.set_aside(self._node, str(error))
                state = "cut"
            if self._is_open or state in ("T", "t", "cut"):
                break
            num_silent = 0  # it makes its object, and may answer nothing meanwhile
        why = _STATES.get(state, "")
        self.lose(f"hangs: it answered none of {num_silent} pings, one every {_PING_S:g} s{why}")

    def _end(self) -> None:
        with contextlib.suppress(Exception):  # Ray may have ended
            self._connection.ray.kill(self._host)
        with contextlib.suppress(ActorsLost):  # its node is gone
            self._connection.run(self._node, end_processes, [self.pid] if self.pid else [])
        leave()
