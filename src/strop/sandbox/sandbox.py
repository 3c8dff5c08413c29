"""The classes for users: a sandbox behind plain calls, and sessions for plain and for asynchronous programs."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self, TypeVar

from strop.errors import MachineError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.local import LocalSandbox, open_service
from strop.sandbox.protocol import (
    AnswerPair,
    AsyncContext,
    CodeService,
    IsolationLevel,
    PairVerdict,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
)

_ResultT = TypeVar("_ResultT")


class Session(AsyncContext):
    """A notebook: its state lasts from cell to cell, also after errors. Use as `async with`, or call `close`.

    async with await Session.open(service) as session:
        await session.run(RunRequest(code="x = 1"))
        branch = await session.fork()  # x is 1 in both, and from here on each has its own
    """

    def __init__(self, service: CodeService, name: str) -> None:
        self._service = service
        self.name = name

    @classmethod
    async def open(cls, service: CodeService, limits: SessionLimits | None = None) -> Self:
        return cls(service, await service.open_session(limits or SessionLimits()))

    async def run(self, cell: RunRequest) -> RunResult:
        """Run one more cell. Raises `SessionLost` when the session has ended: no cell ever runs twice."""
        return await self._service.run(dataclasses.replace(cell, session=self.name))

    async def fork(self) -> Self:
        """Return a copy of its state as it is now.

        Raises:
            MachineError: it cannot be forked, since it has open files, threads, child processes or shared memory.
            SessionLost: it has ended.
        """
        return type(self)(self._service, await self._service.fork_session(self.name))

    async def close(self) -> None:
        """Safe to call twice."""
        await self._service.close_session(self.name)


class Sandbox:
    """Runs programs from plain code; many threads may call it at once.

        with Sandbox() as box:
            result = box.run("print(input())", stdin="hello")

        with Sandbox(url="http://sandbox.example:8517", token=token) as box: ...

    Args:
        min_level: the lowest accepted level of isolation, such as "namespaces" or "L2".
        config: all other settings, and `min_level` when that argument is left out.
        url: of a running service (`strop sandbox serve`), or of several, used instead of this machine.
        token: the token of these services.
    """

    def __init__(
        self,
        *,
        min_level: IsolationLevel | str | None = None,
        config: SandboxConfig | None = None,
        url: str | Sequence[str] | None = None,
        token: str | None = None,
    ) -> None:
        config = config or SandboxConfig()
        if min_level is not None:
            config = config.model_copy(update={"min_level": IsolationLevel(min_level)})
        if url is not None:
            config = config.model_copy(update={"url": url if isinstance(url, str) else tuple(url)})
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="strop-sandbox", daemon=True)
        self._thread.start()
        self._opened = AsyncExitStack()
        try:
            self._box: CodeService = self._wait(self._opened.enter_async_context(open_service(config, token=token)))
        except BaseException:
            self.close()
            raise

    @property
    def level(self) -> IsolationLevel | None:
        """The level of the sandbox on this machine; None for a service."""
        return self._box.level if isinstance(self._box, LocalSandbox) else None

    def run(
        self, code: str, *, stdin: str = "", wall_s: float | None = None, memory_mib: int | None = None, seed: int = 0
    ) -> RunResult:
        """Run `code` once; a limit that is left out comes from the config."""
        return self._wait(self._box.run(self._request(code, stdin, wall_s, memory_mib, seed)))

    def verify(self, pairs: Iterable[tuple[str, str]], *, pair_wall_s: float = 2.0) -> list[PairVerdict]:
        """Return a verdict on each (gold, answer), in the same order."""
        named = tuple(AnswerPair(gold=gold, answer=answer) for gold, answer in pairs)
        return self._wait(_collect(self._box, VerifyRequest(pairs=named, pair_wall_s=pair_wall_s)))

    def session(self, limits: SessionLimits | None = None) -> SandboxSession:
        """Open a notebook; use as `with`, or close it."""
        return SandboxSession(self, self._wait(Session.open(self._box, limits)))

    def close(self) -> None:
        """End every program that still runs. Safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _request(self, code: str, stdin: str, wall_s: float | None, memory_mib: int | None, seed: int) -> RunRequest:
        return RunRequest(
            code=code,
            stdin=stdin,
            wall_s=self._config.wall_s if wall_s is None else wall_s,
            memory_mib=self._config.memory_mib if memory_mib is None else memory_mib,
            seed=seed,
        )

    def _wait(self, work: Coroutine[Any, Any, _ResultT]) -> _ResultT:
        if self._loop.is_closed():
            work.close()
            raise MachineError("this sandbox is closed")
        call = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return call.result()
        except BaseException:
            call.cancel()  # Ctrl-C: the caller no longer waits. No effect on a call that has ended
            raise

    async def _end_calls(self) -> None:
        """Close the service, so that every waiting call fails in its thread."""
        await self._opened.aclose()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SandboxSession:
    """A `Session` behind plain calls; made by `Sandbox.session`."""

    def __init__(self, box: Sandbox, session: Session) -> None:
        self._box = box
        self._session = session

    def run(self, code: str, *, stdin: str = "", wall_s: float | None = None) -> RunResult:
        """Run one more cell. Raises `SessionLost` when the session has ended."""
        return self._box._wait(self._session.run(self._box._request(code, stdin, wall_s, None, 0)))

    def fork(self) -> SandboxSession:
        """Return a copy of its state; raises as `Session.fork`."""
        return SandboxSession(self._box, self._box._wait(self._session.fork()))

    def close(self) -> None:
        """Safe to call twice."""
        self._box._wait(self._session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _collect(service: CodeService, request: VerifyRequest) -> list[PairVerdict]:
    verdicts = {index: verdict async for index, verdict in service.verify(request)}
    return [verdicts[index] for index in range(len(request.pairs))]
