"""The messages between an engine's client and its process, and the client's end of the link that carries them.

Messages are JSON in frames that begin with their length. They are read strictly, since the other side may be broken: whatever
is no message raises `Garbled`. Nothing is unpickled. The link matches answers to questions, and ends for one reason, the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from strop import errors
from strop.engine.protocol import CompletionRequest, Probe
from strop.errors import EngineLost, StropError
from strop.types import Completion

if TYPE_CHECKING:
    from strop.engine.processes.fork_server import ForkedProcess

_LENGTH = struct.Struct(">I")
_MAX_BYTES = 256 << 20  # of a frame: a conversation of ten million tokens
_SHOWN = 200  # characters of garbage


class Garbled(Exception):  # noqa: N818 - named for what happened
    """The other side sent what is no message; says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    number: int
    request: CompletionRequest
    probe_tokens: int = 0  # 0: no `Probed` is asked for
    kind: Literal["complete"] = "complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """The caller of the completion with this number was cancelled."""

    number: int
    kind: Literal["abandon"] = "abandon"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    request_id: str
    kind: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    request_id: str
    kind: Literal["release"] = "release"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Drop every KV cache and take the weights that lie in files of `directory`; answered by `Loaded`."""

    number: int
    directory: str
    version: int
    checksum: str
    kind: Literal["load"] = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    kind: Literal["ping"] = "ping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The engine is there. What it can do, and what its KV memory holds, as in `Capabilities` and `Capacity`."""

    dtype: Literal["float32", "bfloat16"]
    total_tokens: int
    max_request_tokens: int
    max_running: int
    vocab_size: int
    policy_version: int
    is_deterministic: bool
    can_fork: bool
    entropies: Literal["full", "estimated"]
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a completion that is being sampled begins with."""

    number: int
    entropies: tuple[float, ...]
    kind: Literal["probed"] = "probed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    number: int
    completion: Completion
    kind: Literal["completed"] = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    number: int
    kind: Literal["cancelled"] = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """`error` is the name of a class in `strop.errors`. Number 0: the engine could not be opened."""

    number: int
    error: str
    message: str
    kind: Literal["failed"] = "failed"

    def as_error(self) -> StropError:
        """Raises `Garbled` when there is no such class."""
        found = getattr(errors, self.error, None)
        if not (isinstance(found, type) and issubclass(found, StropError)):
            raise Garbled(f"an error of the unknown class {self.error!r}: {self.message}")
        return found(self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    number: int
    policy_version: int
    is_deterministic: bool  # measured when the first weights arrive
    kind: Literal["loaded"] = "loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    progress: int  # of its engine
    kind: Literal["pong"] = "pong"


ToChild: TypeAlias = Complete | Abandon | Abort | Release | Load | Ping
FromChild: TypeAlias = Hello | Probed | Completed | Cancelled | Failed | Loaded | Pong

_CONFIG = ConfigDict(ser_json_inf_nan="constants")
TO_CHILD: TypeAdapter[ToChild] = TypeAdapter(Annotated[ToChild, Field(discriminator="kind")], config=_CONFIG)
FROM_CHILD: TypeAdapter[FromChild] = TypeAdapter(Annotated[FromChild, Field(discriminator="kind")], config=_CONFIG)


MessageT = TypeVar("MessageT")


def to_frame(adapter: TypeAdapter[MessageT], message: MessageT) -> bytes:
    body = adapter.dump_json(message)
    return _LENGTH.pack(len(body)) + body


async def read_message(adapter: TypeAdapter[MessageT], reader: asyncio.StreamReader) -> MessageT:
    """The next message. Raises `Garbled`, or `EOFError` where the link ends between two."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > _MAX_BYTES:
            raise Garbled(f"a frame of {length} bytes; {_MAX_BYTES} are the most")
        body = await reader.readexactly(length)
    except ConnectionError as error:
        raise EOFError from error
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise EOFError from error
        raise Garbled(f"a frame that breaks off: {_shown(error.partial)}") from error
    try:
        return adapter.validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Garbled(f"no message: {first['msg']}{f' at {place}' if place else ''}, in {_shown(body)}") from error


def _shown(content: bytes) -> str:
    return repr(content[:_SHOWN].decode("utf-8", "replace")) + ("..." if len(content) > _SHOWN else "")


AnswerT = TypeVar("AnswerT", Hello, Completed, Loaded)
Order = Complete | Load

_PING_S = 1.0
_END_S = 2.0  # from the end of the link to the news of the process's end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One open question. It stays until its answer comes, also if its caller was cancelled."""

    kind: type[FromChild]  # of the answer
    order: Order | None  # None: how the engine could be opened
    answer: asyncio.Future[Any]
    probe: Probe | None = None


class Link:
    """Whatever shows that the process cannot be trusted any more ends it, and with it every question, by `EngineLost`."""

    def __init__(
        self,
        name: str,
        process: ForkedProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        check: Callable[[Order, FromChild], None],
        silent_pings: int,
    ) -> None:
        """
        Args:
            check: looks at each answer to an order when it arrives; raises `EngineLost` for one that cannot be true.
            silent_pings: how many pings, one a second, may stay without an answer.
        """
        self.title = f"engine {name} (pid {process.pid})"
        self._process, self._reader, self._writer = process, reader, writer
        self._check, self._silent_pings = check, silent_pings
        self._num_asked = 0
        self._questions: dict[int, _Question] = {}  # by number
        self._has_spoken = True  # since the last ping
        self.progress = 0  # of the engine, when it last answered a ping
        self._end = ""  # why it is lost
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_alive(self) -> bool:
        return not self._end

    async def open(self) -> Hello:
        """Wait for the engine. Raises what kept it from being opened."""
        hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._questions[0] = _Question(kind=Hello, order=None, answer=hello)
        self.start_task(self._listen())
        said = await hello
        self._watching = self.start_task(self._watch())
        return said

    def next_number(self) -> int:
        self._num_asked += 1
        return self._num_asked

    async def ask(self, order: Order, kind: type[AnswerT], probe: Probe | None = None) -> AnswerT:
        """Send what has an answer, and wait for that. Raises what the process raised, or `EngineLost`."""
        if self._end:
            raise EngineLost(self._end)
        answer: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._questions[order.number] = _Question(kind=kind, order=order, answer=answer, probe=probe)
        self.tell(order)
        return await answer

    def is_open_question(self, number: int) -> bool:
        return number in self._questions

    def tell(self, message: ToChild) -> None:
        """Send it, unless the process has ended."""
        if not self._end:
            self._writer.write(to_frame(TO_CHILD, message))

    def lose(self, why: str) -> EngineLost:
        """End the process and every question. Returns the error for the caller."""
        if not self._end:
            self._end = why.strip()
            if self._watching is not None:
                self._watching.cancel()
            for question in self._questions.values():
                _end_with(question.answer, EngineLost(self._end))
            self._questions.clear()
            self.start_task(self._process.kill())
        return EngineLost(self._end)

    async def close(self, why: str) -> None:
        """Returns when the process has ended. Safe to call twice."""
        self.lose(why)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()

    def start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that `close` waits for."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # of a load whose caller was cancelled; else asyncio logs it

    async def _listen(self) -> None:
        try:
            while True:
                message = await read_message(FROM_CHILD, self._reader)
                self._has_spoken = True
                self._hear(message)
        except Garbled as error:
            self.lose(f"{self.title} answered garbage: {error}. {self._process.last_words}")
        except EngineLost as error:
            self.lose(f"{self.title} is lost: {error}")
        except EOFError:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.ended.wait(), _END_S)
            self.lose(f"{self.title} {self._process.end or 'hung up'}. {self._process.last_words}")

    def _hear(self, message: FromChild) -> None:
        """Raises `Garbled` or `EngineLost` when the process cannot be trusted any more."""
        if isinstance(message, Pong):
            self.progress = message.progress
            return
        number = 0 if isinstance(message, Hello) else message.number
        question = self._questions.get(number)
        if question is None:
            raise Garbled(f"an answer ({message.kind}) to number {number}, which was not asked")
        if isinstance(message, Probed):
            self._tell_probe(question, message)
            return
        try:
            self._settle(question, message)
        except StropError as error:
            if type(error) is EngineLost:  # `WeightsNotProven` is one that the engine survives
                raise
            _end_with(question.answer, error)
        del self._questions[number]

    def _settle(self, question: _Question, message: FromChild) -> None:
        """Raises what the answer says, or what is wrong with it."""
        if isinstance(message, Failed):
            raise message.as_error()
        if isinstance(message, Cancelled) and question.kind is Completed:
            question.answer.cancel()
            return
        if not isinstance(message, question.kind):
            raise Garbled(f"{message.kind} where it was asked for {question.kind.__name__}")
        if question.order is not None:
            self._check(question.order, message)
        if not question.answer.done():
            question.answer.set_result(message)

    def _tell_probe(self, question: _Question, message: Probed) -> None:
        entropies = message.entropies
        if question.probe is None or len(entropies) != question.probe.num_tokens or not all(map(math.isfinite, entropies)):
            raise Garbled(f"the entropies {entropies} of a completion that it was not asked for")
        if not question.answer.done():
            question.probe.tell(entropies)

    async def _watch(self) -> None:
        """Pings are counted, not timed: when this process itself was held up, its engines are not to blame."""
        num_silent = 0
        while num_silent < self._silent_pings:
            self._has_spoken = False
            self.tell(Ping())
            await asyncio.sleep(_PING_S)
            num_silent = 0 if self._has_spoken else num_silent + 1
        state = f" ({state})" if (state := self._process.state) else ""
        self.lose(f"{self.title} hangs: it answered none of {num_silent} pings, one every {_PING_S:g} s{state}.")


def _end_with(answer: asyncio.Future[Any], error: StropError) -> None:
    if not answer.done():
        answer.set_exception(error)
