"""A client for language models with an OpenAI-compatible address. Replies are cached on disk.

The cache key is a digest of the model, the messages, the sampling parameters and the number of the draw. It contains neither
address nor key, so a server may move. A program that was killed does not repeat requests that were answered.
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
from strop.http import JsonService, ServiceRefused, SharedRequests, WebServiceConfig
from strop.run_directory import read_json, write_json


class ChatServiceConfig(WebServiceConfig):
    """A language model behind an OpenAI-compatible address, such as http://127.0.0.1:8000/v1."""

    model: str = Field(description="The model's name at the service.")
    temperature: float = Field(default=0.0, ge=0, le=100, description="Sampling temperature.")
    max_tokens: int = Field(default=1024, ge=1, le=10**9, description="Tokens of a reply.")
    seeded: bool = Field(default=True, description="Send the number of the draw as `seed`; some services refuse that key.")
    extra: dict[str, Any] = Field(
        default={}, description="Further keys of every request, such as `structured_outputs` of vLLM: a regex or a choice."
    )
    cache: str | None = Field(default=None, description="Directory that stores every reply. Unset: nothing is stored.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply of the model."""

    text: str
    finish_reason: str  # "length": truncated


class ChatClient:
    """Many callers of one event loop may use it at once; concurrent equal requests are sent once.

    Args:
        is_kept: whether a reply is stored in the cache.

    Raises:
        UserError: the environment variable of the key is not set.
    """

    def __init__(self, config: ChatServiceConfig, *, is_kept: Callable[[str], bool] = lambda text: True) -> None:
        self.config = config
        self._is_kept = is_kept
        self.num_asked = 0
        """Replies that came from the service and not from disk."""
        self._service = JsonService(config, cache=config.cache)
        self._requests = SharedRequests[Reply]()

    async def reply(self, messages: Sequence[Mapping[str, str]], *, draw: int = 0) -> Reply:
        """The model's reply to `messages` (each with a role and a content).

        Args:
            draw: distinguishes several replies to the same messages.

        Raises:
            ServiceRefused: the service gave no reply in any try.
            RunError: the cache cannot be written.
        """
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [dict(message) for message in messages],
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
            **self.config.extra,
        }
        if self.config.seeded:
            body["seed"] = draw
        digest = hashlib.blake2b(json.dumps([body, draw], sort_keys=True).encode(), digest_size=16).hexdigest()
        return await self._requests.ask(digest, lambda: self._reply(body, digest))

    async def close(self) -> None:
        """Cancel running requests. Safe to call twice."""
        await self._requests.close()
        await self._service.close()

    async def _reply(self, body: Mapping[str, Any], digest: str) -> Reply:
        path = None if self.config.cache is None else Path(self.config.cache) / digest[:2] / f"{digest}.json"
        if path is not None and (kept := _kept(path)) is not None and self._is_kept(kept.text):
            return kept
        reply = await self._service.post("/chat/completions", body, _parsed)
        self.num_asked += 1
        if path is not None and self._is_kept(reply.text):
            content = {"request": dict(body), "reply": asdict(reply)}
            writing = asyncio.get_running_loop().run_in_executor(None, _keep, path, content)
            await asyncio.shield(writing)  # `close` cancels this task, and a reply that has come is stored all the same
        return reply


def _kept(path: Path) -> Reply | None:
    """The stored reply; None if there is none or it cannot be read."""
    if not path.exists():
        return None
    try:
        return Reply(**read_json(path)["reply"])
    except (RunError, TypeError, KeyError):
        return None


def _keep(path: Path, content: Mapping[str, Any]) -> None:
    """Write to a unique name, then rename: runs that share a cache may write the same reply at once."""
    own = path.with_name(f"{path.stem}.{uuid.uuid4().hex}")
    write_json(own, content)
    own.replace(path)


def _parsed(answer: Any) -> Reply:
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        if text is None and _has_only_thoughts(choice):
            text = ""
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ServiceRefused(f"the service answered without choices[0].message.content: {str(answer)[:200]}")
    return Reply(text=text, finish_reason=str(choice.get("finish_reason") or ""))


def _has_only_thoughts(choice: Mapping[str, Any]) -> bool:
    """Whether the reply consists of thoughts, which the service returns separately, and was truncated or ended there."""
    message = choice["message"]
    return choice.get("finish_reason") == "length" or bool(message.get("reasoning_content") or message.get("reasoning"))
