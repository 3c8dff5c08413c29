"""Verdicts as parts of an HTTP reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from pydantic import TypeAdapter

from strop.errors import StropError
from strop.sandbox.protocol import PairVerdict
from strop.sandbox.service.lines import VerdictLine, kind_of, write_error_line
from strop.sandbox.service.run_stream import HEARTBEAT_S

_VERDICT_LINE: TypeAdapter[VerdictLine] = TypeAdapter(VerdictLine)


class VerdictLines:
    """In one part what came since the last; an empty line when nothing did for a while."""

    def __init__(self, verdicts: AsyncIterator[tuple[int, PairVerdict]]) -> None:
        self.error: StropError | None = None  # what ended it too early
        self._lines: list[bytes] = []
        self._wake = asyncio.Event()
        self._is_collected = False
        self._collecting = asyncio.create_task(self._collect(verdicts))

    @property
    def is_over(self) -> bool:
        """Everything was taken."""
        return self._is_collected and not self._lines

    async def wait(self) -> None:
        """For the next part, or the time to show a sign of life."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self._wake.wait()
        self._wake.clear()

    def take(self) -> bytes:
        part = b"".join(self._lines)
        self._lines.clear()
        return part or b"\n"

    async def close(self) -> None:
        """Stop collecting. Raises what it should not have met."""
        self._collecting.cancel()
        await asyncio.wait({self._collecting})
        if not self._collecting.cancelled():
            self._collecting.result()

    async def _collect(self, verdicts: AsyncIterator[tuple[int, PairVerdict]]) -> None:
        try:
            async for index, verdict in verdicts:
                self._lines.append(_VERDICT_LINE.dump_json(VerdictLine(index=index, verdict=verdict)) + b"\n")
                self._wake.set()
        except StropError as error:
            self.error = error
            self._lines.append(write_error_line(None, kind_of(error), str(error)))
        finally:
            self._is_collected = True
            self._wake.set()
