"""How much work the service accepts, in all and from each client, and the answers that it keeps for clients that ask again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from dataclasses import dataclass

from strop.sandbox.protocol import RunRequest, RunResult
from strop.sandbox.server.config import DispatchConfig

_Key = tuple[str, str]  # client and id


@dataclass(slots=True)
class Held:
    """Work that is accepted and not answered yet."""

    num: int = 0
    num_bytes: int = 0

    def add(self, num: int, num_bytes: int) -> None:
        self.num += num
        self.num_bytes += num_bytes


class Admission:
    """Counts held work. Each successful `admit` needs one `release`."""

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

    def admit(self, client: str, num_bytes: int, *, num: int = 1) -> str:
        """Count the work and return "", or return why it is refused."""
        share = self._config.client_share
        own = self._by_client[client]
        refusal = (
            self._refusal
            or self._over(self.held, num, num_bytes, who="the service", share=1.0)
            or self._over(own, num, num_bytes, who="this client", share=share)
        )
        if refusal:
            if not own.num:
                del self._by_client[client]
            return refusal
        self.held.add(num, num_bytes)
        own.add(num, num_bytes)
        self._is_empty.clear()
        return ""

    def release(self, client: str, num_bytes: int, *, num: int = 1) -> None:
        own = self._by_client[client]
        self.held.add(-num, -num_bytes)
        own.add(-num, -num_bytes)
        if not own.num:
            del self._by_client[client]
            if not self.held.num:
                self._is_empty.set()

    async def wait_empty(self) -> None:
        """Return when nothing is held."""
        await self._is_empty.wait()

    def _over(self, held: Held, num: int, num_bytes: int, *, who: str, share: float) -> str:
        if held.num + num > (most := share * self._config.max_held):
            return f"{who} has {held.num} calls in the queue, the limit is {most:.0f}"
        if held.num_bytes + num_bytes > (most := share * self._config.max_held_bytes):
            return f"{who} has {held.num_bytes} bytes of calls in the queue, the limit is {most:.0f}"
        return ""


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """One answer with a digest of its request, which is not kept itself."""

    digest: int
    result: RunResult
    expires_at: float

    def is_answer_to(self, request: RunRequest) -> bool:
        return self.digest == hash(request)

    @property
    def num_bytes(self) -> int:
        return 512 + len(self.result.text) + len(self.result.reason)


class IdempotencyCache:
    """Answers by client and id. Limited in age and size; the oldest go first."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._answers: OrderedDict[_Key, CachedAnswer] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, key: _Key, request: RunRequest, result: RunResult, *, now: float) -> None:
        """Replace the answer of this key, and drop what is too old or too much."""
        if key in self._answers:
            self._drop(key)
        answer = self._answers[key] = CachedAnswer(hash(request), result, now + self._config.keep_s)
        self.num_bytes += answer.num_bytes
        while self._answers:
            oldest, first = next(iter(self._answers.items()))
            if first.expires_at >= now and self.num_bytes <= self._config.max_kept_bytes:
                break
            self._drop(oldest)

    def find(self, key: _Key, *, now: float) -> CachedAnswer | None:
        answer = self._answers.get(key)
        return answer if answer is not None and answer.expires_at >= now else None

    def _drop(self, key: _Key) -> None:
        self.num_bytes -= self._answers.pop(key).num_bytes
