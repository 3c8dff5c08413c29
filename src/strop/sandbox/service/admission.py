"""How much work the service holds, in all and for each client, and whether it takes more."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from strop.sandbox.service.config import DispatchConfig


@dataclass(slots=True)
class Held:
    """Work that was accepted and is not answered yet."""

    num: int = 0
    num_bytes: int = 0


class Admission:
    """Counts what is held; `admit` and `release` come in pairs."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self.held = Held()
        self._refusal = ""
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._by_client: defaultdict[str, Held] = defaultdict(Held)

    @property
    def num_clients(self) -> int:
        return len(self._by_client)

    def stop(self, reason: str) -> None:
        """Admit nothing from now on."""
        self._refusal = reason

    def admit(self, client: str, num_bytes: int) -> str:
        """Count it in and return ""; or return why it is refused, with nothing counted."""
        config, held, own = self._config, self.held, self._by_client[client]
        share = config.client_share
        if self._refusal:
            refusal = self._refusal
        elif held.num >= config.max_held:
            refusal = f"the service holds {held.num} calls, which is all it may"
        elif held.num_bytes + num_bytes > config.max_held_bytes:
            refusal = f"the service holds {held.num_bytes} bytes of calls, of {config.max_held_bytes}"
        elif own.num >= config.max_held * share:
            refusal = f"this client has {own.num} calls in the service, which is all it may"
        elif own.num_bytes + num_bytes > config.max_held_bytes * share:
            refusal = f"this client has {own.num_bytes} bytes of calls in the service, of {config.max_held_bytes * share:.0f}"
        else:
            for one in (held, own):
                one.num += 1
                one.num_bytes += num_bytes
            self._is_empty.clear()
            return ""
        if not own.num:
            del self._by_client[client]
        return refusal

    def release(self, client: str, num_bytes: int) -> None:
        own = self._by_client[client]
        for one in (self.held, own):
            one.num -= 1
            one.num_bytes -= num_bytes
        if not own.num:
            del self._by_client[client]
            if not self.held.num:
                self._is_empty.set()

    async def wait_empty(self) -> None:
        """Returns when nothing is held."""
        await self._is_empty.wait()
