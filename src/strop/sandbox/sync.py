"""The sandbox for programs that are not asynchronous: the same runner behind a plain call."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

from strop.sandbox.config import SandboxConfig
from strop.sandbox.local import LocalSandbox
from strop.sandbox.protocol import IsolationLevel, RunRequest, RunResult


class Sandbox:
    """Runs programs from plain code; many threads may call it at once.

        with Sandbox() as box:
            result = box.run("print(input())", stdin="hello")

    Args:
        min_level: how little isolation is still accepted.
        config: everything else; its own `min_level` is used when the first argument is left out.
    """

    def __init__(self, *, min_level: IsolationLevel | str | None = None, config: SandboxConfig | None = None) -> None:
        config = config or SandboxConfig()
        if min_level is not None:
            config = config.model_copy(update={"min_level": IsolationLevel(min_level)})
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="strop-sandbox", daemon=True)
        self._thread.start()
        self._box = LocalSandbox(config)
        try:
            asyncio.run_coroutine_threadsafe(self._box.start(), self._loop).result()
        except BaseException:
            self.close()
            raise

    @property
    def level(self) -> IsolationLevel:
        return self._box.level

    def run(
        self, code: str, *, stdin: str = "", wall_s: float | None = None, memory_mib: int | None = None, seed: int = 0
    ) -> RunResult:
        """Run `code` once; a limit that is left out is the configured one."""
        request = RunRequest(
            code=code,
            stdin=stdin,
            wall_s=self._config.wall_s if wall_s is None else wall_s,
            memory_mib=self._config.memory_mib if memory_mib is None else memory_mib,
            output_bytes=self._config.output_bytes,
            seed=seed,
        )
        return asyncio.run_coroutine_threadsafe(self._box.run(request), self._loop).result()

    def close(self) -> None:
        """End every program that still runs. Safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_calls(self) -> None:
        """Close, and let every call that was waiting tell its thread so."""
        await self._box.close()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
