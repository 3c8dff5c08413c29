"""The sandbox for programs that are not asynchronous: the same service behind plain calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from strop.errors import MachineError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.local import LocalSandbox
from strop.sandbox.opening import open_service
from strop.sandbox.protocol import (
    AnswerPair,
    CodeService,
    IsolationLevel,
    PairVerdict,
    RunRequest,
    RunResult,
    SessionLimits,
    VerifyRequest,
)
from strop.sandbox.session import Session

_ResultT = TypeVar("_ResultT")


class Sandbox:
    """Runs programs from plain code; many threads may call it at once.

        with Sandbox() as box:
            result = box.run("print(input())", stdin="hello")

        with Sandbox(url="http://sandbox.example:8517", token=token) as box: ...

    Args:
        min_level: how little isolation is still accepted, as in "namespaces" or "L2".
        config: everything else of it; its own `min_level` is used when the first argument is left out.
        url: of a running service (`strop sandbox serve`), which is used instead of this machine.
        token: what that service asks for.
    """

    def __init__(
        self,
        *,
        min_level: IsolationLevel | str | None = None,
        config: SandboxConfig | None = None,
        url: str | None = None,
        token: str | None = None,
    ) -> None:
        config = config or SandboxConfig()
        if min_level is not None:
            config = config.model_copy(update={"min_level": IsolationLevel(min_level)})
        if url is not None:
            config = config.model_copy(update={"url": url})
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="strop-sandbox", daemon=True)
        self._thread.start()
        self._opened = AsyncExitStack()
        self._box: CodeService | None = None
        try:
            self._box = self._wait(self._opened.enter_async_context(open_service(config, token=token)))
        except BaseException:
            self.close()
            raise

    @property
    def level(self) -> IsolationLevel | None:
        """Of the sandbox on this machine; None where a service decides."""
        return self._box.level if isinstance(self._box, LocalSandbox) else None

    def run(
        self, code: str, *, stdin: str = "", wall_s: float | None = None, memory_mib: int | None = None, seed: int = 0
    ) -> RunResult:
        """Run `code` once; a limit that is left out is the configured one."""
        return self._wait(self._service.run(self._request(code, stdin, wall_s, memory_mib, seed)))

    def verify(self, pairs: Iterable[tuple[str, str]], *, pair_wall_s: float = 2.0) -> list[PairVerdict]:
        """A verdict on each (gold, answer), in the same order."""
        named = tuple(AnswerPair(gold=gold, answer=answer) for gold, answer in pairs)
        return self._wait(_collect(self._service, VerifyRequest(pairs=named, pair_wall_s=pair_wall_s)))

    def session(self, limits: SessionLimits | None = None) -> SandboxSession:
        """A new notebook; use as `with`, or close it."""
        return SandboxSession(self, self._wait(Session.open(self._service, limits)))

    def close(self) -> None:
        """End every program that still runs. Safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def _service(self) -> CodeService:
        assert self._box is not None
        return self._box

    def _request(self, code: str, stdin: str, wall_s: float | None, memory_mib: int | None, seed: int) -> RunRequest:
        return RunRequest(
            code=code,
            stdin=stdin,
            wall_s=self._config.wall_s if wall_s is None else wall_s,
            memory_mib=self._config.memory_mib if memory_mib is None else memory_mib,
            output_bytes=self._config.output_bytes,
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
            call.cancel()  # Ctrl-C: nobody waits for it any more. No effect on one that has ended
            raise

    async def _end_calls(self) -> None:
        """Close, and let every call that was waiting tell its thread so."""
        await self._opened.aclose()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SandboxSession:
    """A `Session` behind plain calls; made by `Sandbox.session`."""

    def __init__(self, box: Sandbox, session: Session) -> None:
        self._box = box
        self._session = session

    def run(self, code: str, *, stdin: str = "", wall_s: float | None = None) -> RunResult:
        """Run one more cell. Raises `SessionLost` when the session ended before it."""
        return self._box._wait(self._session.run(self._box._request(code, stdin, wall_s, None, 0)))

    def fork(self) -> SandboxSession:
        """A copy of its state as it is now. Raises `SessionLost`."""
        return SandboxSession(self._box, self._box._wait(self._session.fork()))

    def close(self) -> None:
        """Safe to call twice."""
        self._box._wait(self._session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


async def _collect(service: CodeService, request: VerifyRequest) -> list[PairVerdict]:
    verdicts = {index: verdict async for index, verdict in service.verify(request)}
    return [verdicts[index] for index in range(len(request.pairs))]
