"""An OpenAI-compatible endpoint on this machine, for other programs that evaluate a policy.

Requests for the embedded engine are rendered and sampled here; a server engine gets them as they are. Requests that arrive
together are sampled together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socketserver
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from strop.engine.protocol import LOWEST_TEMPERATURE, CompletionRequest, InferenceEngine, Truncation
from strop.engine.servers.engine import ServerEngine
from strop.errors import MachineError, StropError, UserError
from strop.rollout.chat_template import ChatFormat, Span, message
from strop.run_directory import parse_json
from strop.types import Completion, FinishReason, derive_seed

_log = logging.getLogger(__name__)

CHAT, TEXT, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
_DEFAULT_MAX_TOKENS = 16  # of a text completion, as OpenAI's
# Keys that change the answer, and that the embedded engine does not have.
_NOT_OFFERED = (
    *("stream", "tools", "functions", "response_format", "logprobs", "echo", "suffix", "logit_bias"),
    *("presence_penalty", "frequency_penalty"),
)


class _Part(BaseModel):
    text: str


class _Message(BaseModel):
    role: str
    content: str | list[_Part]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Asked(BaseModel):
    """The keys of a request that the embedded engine has. Others that change nothing are ignored."""

    messages: list[_Message] = Field(default=[])
    prompt: str | list[str] | list[int] | list[list[int]] = Field(default=[])
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = 0
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    n: int = Field(default=1, ge=1, le=1024)
    seed: int | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True


def refusal(text: str, status: int = 400) -> tuple[int, Mapping[str, Any]]:
    """An answer in the form of OpenAI's errors."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return status, {"error": {"message": text, "type": kind, "code": status}}


class Endpoint(ABC):
    """The address of a served policy, and what was asked there. A subclass gives `found`."""

    def __init__(self, model: str, num_engines: int) -> None:
        self.model, self.port = model, 0  # the name of the model in answers; requests may call it anything
        self.num_requests = self.num_refused = 0
        self.num_tokens = 0  # that were sampled
        self.first_refusal = ""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error of the engine when that is lost."""
        self._num_running = [0] * num_engines  # of each engine
        self._running: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def found(self, path: str, body: dict[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a request. Raises `MachineError` if the engine is lost; any other `StropError` refuses it."""

    async def answer(self, path: str, body: Any) -> tuple[int, Mapping[str, Any]]:
        """Return the status and the answer to a request."""
        self.num_requests += 1
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            if self.lost.done():
                raise MachineError("it does not answer any more.")
            if not isinstance(body, dict):
                raise UserError("the body is no JSON object.")
            answer = await self.found(path, body)
        except Exception as error:  # noqa: BLE001 - it ends the stage, which awaits `lost`
            self.num_refused += 1
            status, answer = refusal(str(error))
            if not isinstance(error, StropError) or isinstance(error, MachineError):
                status, answer = refusal(f"the engine is lost: {error}", 500)
                if not self.lost.done():
                    self.lost.set_exception(error)
            self.first_refusal = self.first_refusal or str(answer["error"]["message"])
            return status, answer
        finally:
            self._running.discard(task)
        self.num_tokens += answer["usage"]["completion_tokens"]
        return 200, answer

    @contextmanager
    def least_busy(self) -> Iterator[int]:
        """The number of the engine with the fewest requests, which has one more for the time of a `with`."""
        at = self._num_running.index(min(self._num_running))
        self._num_running[at] += 1
        try:
            yield at
        finally:
            self._num_running[at] -= 1

    def close(self) -> None:
        """Cancel what is still sampled: nothing reads it any more."""
        for task in self._running:
            task.cancel()
        if not self.lost.cancel() and not self.lost.cancelled():
            self.lost.exception()  # it was raised by the stage, or came after its end


class EngineEndpoint(Endpoint):
    """Answers of engines that know only token ids: prompts come from the tokenizer's own chat template.

    Equal requests with a temperature get different answers, which depend only on `seed` and on how often each was asked.
    """

    def __init__(self, model: str, engines: Sequence[InferenceEngine], chat: ChatFormat, *, seed: int) -> None:
        super().__init__(model, len(engines))
        self._engines, self._chat, self._seed = engines, chat, seed
        self._asked: Counter[tuple[int, ...]] = Counter()  # completions by prompt
        self._num = 0

    async def found(self, path: str, body: dict[str, Any]) -> Mapping[str, Any]:
        given = {key: value for key, value in body.items() if value is not None}
        if refused := [key for key in _NOT_OFFERED if given.get(key)]:
            raise UserError(f"the embedded engine has no {refused[0]!r}. Leave it out, or use a server engine such as vLLM.")
        try:
            asked = _Asked.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise UserError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        prompts = self._prompts(path, asked)
        sampling = [self._sample(path, asked, ids) for ids in prompts for _ in range(asked.n)]
        completions = await asyncio.gather(*sampling, return_exceptions=True)
        if failed := next((each for each in completions if isinstance(each, BaseException)), None):
            raise failed
        done = [each for each in completions if isinstance(each, Completion)]
        usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": sum(len(each.ids) for each in done)}
        return {
            "id": f"strop-{self._num}",
            "object": "chat.completion" if path == CHAT else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [self._choice(path, asked, each, index) for index, each in enumerate(done)],
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }

    def _prompts(self, path: str, asked: _Asked) -> list[tuple[int, ...]]:
        if path == CHAT:
            return [self._chat.prompt_ids([message(each.role, each.text) for each in asked.messages])]
        is_one = isinstance(asked.prompt, str) or (bool(asked.prompt) and isinstance(asked.prompt[0], int))
        texts: Any = [asked.prompt] if is_one else asked.prompt
        return [self._chat.raw_ids([Span(text=each, is_ours=True)]) if isinstance(each, str) else tuple(each) for each in texts]

    async def _sample(self, path: str, asked: _Asked, ids: tuple[int, ...]) -> Completion:
        self._num += 1
        self._asked[ids] += 1
        truncation = asked.model_dump(include={"top_p", "min_p", "repetition_penalty"})
        with self.least_busy() as at:
            engine = self._engines[at]
            room = max(1, engine.capacity.max_request_tokens - len(ids))
            request = CompletionRequest(
                id=f"endpoint-{self._num}",
                ids=ids,
                max_tokens=asked.max_completion_tokens or asked.max_tokens or (room if path == CHAT else _DEFAULT_MAX_TOKENS),
                stop_ids=self._chat.stop_ids | set(asked.stop_token_ids),
                temperature=max(asked.temperature, LOWEST_TEMPERATURE) if asked.temperature else 0.0,  # as vLLM does
                seed=derive_seed("endpoint", self._seed if asked.seed is None else asked.seed, *ids, self._asked[ids]),
                stop_strings=asked.stop,
                truncation=Truncation(top_k=max(0, asked.top_k), **truncation),
            )
            try:
                return await engine.complete(request)
            finally:
                await engine.release(request.id)

    def _choice(self, path: str, asked: _Asked, completion: Completion, index: int) -> dict[str, Any]:
        ids = list(completion.ids)
        if ids[-1] in self._chat.stop_ids | set(asked.stop_token_ids):
            ids.pop()
        text: str = self._chat.tokenizer.decode(
            ids, skip_special_tokens=asked.skip_special_tokens, clean_up_tokenization_spaces=False
        )
        text = text[: min((at for each in asked.stop if (at := text.find(each)) >= 0), default=len(text))]
        reason = "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
        said = {"message": {"role": "assistant", "content": text}} if path == CHAT else {"text": text}
        return {"index": index, **said, "finish_reason": reason, "logprobs": None}


class ServerEndpoint(Endpoint):
    """Answers of servers that have such an endpoint themselves. All of its abilities are there, except that nothing streams."""

    def __init__(self, model: str, engines: Sequence[ServerEngine], chat: ChatFormat) -> None:
        super().__init__(model, len(engines))
        self._engines, self._stop_ids = engines, sorted(chat.stop_ids)
        self._names: dict[int, str] = {}  # of the model at each engine

    async def found(self, path: str, body: dict[str, Any]) -> Mapping[str, Any]:
        if body.get("stream"):
            raise UserError("answers do not stream. Leave out 'stream'.")
        with self.least_busy() as at:
            if at not in self._names:
                self._names[at] = (await self._engines[at].forward(MODELS))["data"][0]["id"]
            # strop starts servers without the model's generation_config.json, which would name what ends a turn.
            body = {"stop_token_ids": self._stop_ids, **body, "model": self._names[at]}
            answer: Mapping[str, Any] = await self._engines[at].forward(path, body)
            return answer


@contextmanager
def serving(endpoint: Endpoint, *, port: int = 0) -> Iterator[None]:
    """Serve `endpoint` on the loopback interface.

    Args:
        port: 0 for a free one.

    Raises:
        UserError: the port is in use.
    """
    loop = asyncio.get_running_loop()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.rstrip("/") == MODELS:
                self._send(200, {"object": "list", "data": [{"id": endpoint.model, "object": "model"}]})
            else:
                self._send(*refusal(f"{self.path}: no such page.", 404))

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path not in (CHAT, TEXT):
                self._send(*refusal(f"{self.path}: no such page. There are {CHAT} and {TEXT}.", 404))
                return
            try:
                body = parse_json(content)
            except ValueError:
                body = None
            self._send(*asyncio.run_coroutine_threadsafe(endpoint.answer(self.path, body), loop).result())

        def _send(self, status: int, answer: Mapping[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        server = _Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(
            f"port {port} cannot be used: {error.strerror}. Name another, or leave it out for a free one."
        ) from error
    endpoint.port = server.server_address[1]
    accepting = threading.Thread(target=server.serve_forever, name="endpoint", daemon=True)
    accepting.start()
    try:
        yield
    finally:
        endpoint.close()
        server.shutdown()
        server.server_close()
        accepting.join()


class _Server(socketserver.ThreadingTCPServer):
    """One thread for each connection; it ends when its client hangs up."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log it: the client hung up, or the stage ended and cancelled the request."""
        _log.debug("a connection from %s ended", client_address, exc_info=True)
