"""Asks a language model behind an OpenAI-compatible address; what it said is kept on disk and never asked for twice.

An answer is kept under a digest of what was asked: the model, the messages, how they were sampled and the number of the draw.
The address and the key are not in it, so a server may move. A program that was killed asks again for nothing that it had.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from strop.errors import RunError
from strop.rewards.scorers.web import JsonService, WebServiceConfig
from strop.runs import read_json, write_json
from strop.web import ServiceRefused


class ChatServiceConfig(WebServiceConfig):
    """A language model behind an OpenAI-compatible address, such as http://127.0.0.1:8000/v1."""

    model: str  # as the service calls it
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=1024, ge=1)  # of a reply
    seeded: bool = True  # send the number of the draw as `seed`; some services refuse that key
    cache: str | None = None  # a directory that keeps every reply; unset: nothing is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said."""

    text: str
    finish_reason: str  # "length": it was cut off
    num_prompt_tokens: int  # 0 where the service does not tell
    num_completion_tokens: int


class ChatClient:
    """Many callers of one event loop may ask at once; the same question in flight twice is sent once.

    Args:
        is_kept: whether what the model said is worth a place in the cache; otherwise it is asked for again in another run.

    Raises:
        UserError: the environment variable of the key is not set.
    """

    def __init__(self, config: ChatServiceConfig, *, is_kept: Callable[[str], bool] = lambda text: True) -> None:
        self.config = config
        self._is_kept = is_kept
        self.num_asked = 0
        """Replies that came from the service, not from disk."""
        self._service = JsonService(config, cache=config.cache)
        self._in_flight: dict[str, asyncio.Task[Reply]] = {}

    async def reply(self, messages: Sequence[Mapping[str, str]], *, draw: int = 0) -> Reply:
        """What the model answers to `messages` (each a role and a content).

        Args:
            draw: tells several answers to the same messages apart.

        Raises:
            ServiceRefused: the service gave no reply in any try.
            RunError: the cache cannot be written.
        """
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [dict(message) for message in messages],
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
        }
        if self.config.seeded:
            body["seed"] = draw
        digest = hashlib.blake2b(json.dumps([body, draw], sort_keys=True).encode(), digest_size=16).hexdigest()
        asking = self._in_flight.get(digest)
        if asking is None:
            asking = self._in_flight[digest] = asyncio.create_task(self._reply(body, digest))
            asking.add_done_callback(lambda _: self._in_flight.pop(digest, None))
        return await asyncio.shield(asking)  # a caller that gives up does not take the answer from the others, or from the disk

    async def close(self) -> None:
        """End what is still being asked. Safe to call twice."""
        for asking in list(self._in_flight.values()):
            asking.cancel()
        await asyncio.gather(*self._in_flight.values(), return_exceptions=True)
        await self._service.close()

    async def _reply(self, body: Mapping[str, Any], digest: str) -> Reply:
        path = None if self.config.cache is None else Path(self.config.cache) / digest[:2] / f"{digest}.json"
        if path is not None and (kept := _kept(path)) is not None and self._is_kept(kept.text):
            return kept
        reply = await self._service.post("/chat/completions", body, _parsed)
        self.num_asked += 1
        if path is not None and self._is_kept(reply.text):
            await asyncio.to_thread(_keep, path, {"request": dict(body), "reply": asdict(reply)})
        return reply


def _kept(path: Path) -> Reply | None:
    """What is kept there; None where there is nothing, or what cannot be read, which is asked for again."""
    if not path.exists():
        return None
    try:
        return Reply(**read_json(path)["reply"])
    except (RunError, TypeError, KeyError):
        return None


def _keep(path: Path, told: Mapping[str, Any]) -> None:
    """Under a name that no other writer has, and then under its own: runs that share a cache may ask the same at once."""
    own = path.with_name(f"{path.stem}.{uuid.uuid4().hex}")
    write_json(own, told)
    own.replace(path)


def _parsed(answer: Any) -> Reply:
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        if text is None and _is_thought_alone(choice):
            text = ""
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ServiceRefused(f"the service answered without choices[0].message.content: {str(answer)[:200]}")
    return Reply(
        text=text,
        finish_reason=str(choice.get("finish_reason") or ""),
        num_prompt_tokens=_number(answer.get("usage"), "prompt_tokens"),
        num_completion_tokens=_number(answer.get("usage"), "completion_tokens"),
    )


def _is_thought_alone(choice: Mapping[str, Any]) -> bool:
    """Whether all that was said are thoughts, which a parser of the service keeps apart: cut off, or ended, among them."""
    message = choice["message"]
    return choice.get("finish_reason") == "length" or bool(message.get("reasoning_content") or message.get("reasoning"))


def _number(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else 0
