"""SGLang: its native token endpoints, and how a server is started. Unproven.

Written to the published request schema (docs.sglang.io, "SGLang Native APIs", and its `io_struct.py`), and tested against a
server that speaks it, but never against SGLang itself, which has no build for a machine without accelerator. SGLang tells no
checksum that we could compare, so that a publication is believed as far as its `success` and the version in each answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Strict

from strop.engine.config import SglangConfig
from strop.engine.model_directory import ModelFacts
from strop.engine.protocol import Capacity, CompletionRequest, Truncation
from strop.engine.servers.server import Answer, Begun, Said, Server, ServerClient, command_of, environment_of, num_logprobs
from strop.errors import EngineLost, StropError, WeightsNotProven

_log = logging.getLogger(__name__)


class SglangServer(Server[SglangConfig]):
    """One SGLang server. One that strop starts listens on a port of the loopback interface."""

    title, health = "SGLang", "/health_generate"

    def __init__(self, client: ServerClient, config: SglangConfig) -> None:
        super().__init__(client, config)
        self._aborting: set[asyncio.Task[None]] = set()
        self._progress = 0
        _log.warning(
            "%s: the sglang engine is unproven: it was never run against SGLang itself (docs/engines.md).", client.name
        )

    @classmethod
    async def start(cls, name: str, model: ModelFacts, config: SglangConfig, *, log: Path) -> Self:
        port = _free_port()
        server = cls(ServerClient(name, f"http://127.0.0.1:{port}"), config)
        return await server._run(command_line(model, config, port), environment=environment(config), log=log)

    async def complete(self, request: CompletionRequest, *, timeout_s: float | None, begun: Begun | None = None) -> Answer:
        rid = uuid.uuid4().hex
        try:
            answer = await self._client.post("/generate", to_body(request, rid), timeout_s=timeout_s)
        except asyncio.CancelledError:
            # It notices a closed connection only every few seconds.
            task = asyncio.create_task(self._abort(rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
            raise
        return parse_answer(answer, server=self.name)

    async def progress(self) -> int:
        """It answers the path of health only after its model has computed something."""
        self._progress += await self._client.is_up(self.health)
        return self._progress

    async def read_weights(self, directory: Path, *, checksum: str, label: str, keeps_requests: bool) -> None:
        await self._client.post("/pause_generation", {"mode": "abort"})
        files = {"model_path": str(directory), "load_format": "safetensors", "weight_version": label}
        body = {**files, "abort_all_requests": True, "flush_cache": True}
        answer = await self._client.post("/update_weights_from_disk", body, timeout_s=self._config.start_timeout_s)
        if not (updated := _Updated.read(answer, server=self.name)).success:
            raise WeightsNotProven(f"{self.name} did not read the weights: {updated.message}")
        await self._client.post("/flush_cache", parsed=False)
        await self._client.post("/continue_generation", {})

    async def close(self) -> None:
        await asyncio.gather(*self._aborting)
        await super().close()

    async def _abort(self, rid: str) -> None:
        try:
            await self._client.post("/abort_request", {"rid": rid}, parsed=False)
        except StropError as error:  # the caller has gone; the log is the only place
            _log.warning("%s", error)

    async def _learn_capacity(self) -> Capacity:
        info = _ServerInfo.read(await self._client.get("/server_info"), server=self.name)
        config, total = self._config, info.max_total_num_tokens
        is_other = info.dtype not in ("auto", config.dtype)
        wrong = {f"its dtype is {info.dtype!r}, but engine.dtype is {config.dtype!r}": is_other}
        self._refuse(wrong, length=info.context_length)
        return Capacity(total_tokens=total, max_request_tokens=min(config.max_length, total), max_running=config.slots)


def command_line(model: ModelFacts, config: SglangConfig, port: int) -> list[str]:
    """What starts a server of `model` on a port of the loopback interface."""
    options: dict[str, object] = {
        "--model-path": model.directory,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": config.dtype,
        "--context-length": config.max_length,
        "--max-running-requests": config.slots,
        "--tp-size": config.tensor_parallel,
        "--sampling-defaults": "openai",  # the model directory's own would change how we sample
    }
    flags = ["--enable-deterministic-inference"]  # without it a request's seed is ignored
    return command_of("sglang.launch_server", options, flags, model, config)


def environment(config: SglangConfig) -> dict[str, str]:
    # The variable would have log-probs computed before the temperature.
    return environment_of(config, {}, without=("SGLANG_RETURN_ORIGINAL_LOGPROB",))


def to_body(request: CompletionRequest, rid: str) -> dict[str, Any]:
    """A request in SGLang's words."""
    truncation = request.truncation or Truncation()
    return {
        "rid": rid,
        "input_ids": list(request.ids),
        "sampling_params": {
            "temperature": request.temperature,
            **asdict(truncation),
            "top_k": truncation.top_k or -1,
            "sampling_seed": request.seed % 2**31,
            "max_new_tokens": request.max_tokens,
            "min_new_tokens": request.min_tokens,
            "stop_token_ids": sorted(request.stop_ids),
            "stop": list(request.stop_strings),
            "ignore_eos": not request.stop_ids,  # it would ignore stop_token_ids, too
            "skip_special_tokens": False,  # a stop string may spell one out
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "logprob_start_len": -1,  # none of the prompt
        "top_logprobs_num": num_logprobs(request.entropies),
        "stream": False,
    }


class _Reason(Said):
    type: str
    message: str = "no reason given"


class _Ending(Said):
    finish_reason: _Reason


class _Ended(Said):
    meta_info: _Ending


class _Meta(Said):
    output_token_logprobs: list[Annotated[tuple[float, int, str | None], Strict(False)]]  # JSON has no tuples
    output_top_logprobs: list[list[Annotated[tuple[float, int, str | None], Strict(False)]]] | None = None
    weight_version: str
    cached_tokens: int = 0


class _Generated(Said):
    output_ids: list[int]
    meta_info: _Meta


class _Updated(Said):
    success: bool
    message: str = ""


class _ServerInfo(Said):
    dtype: str
    max_total_num_tokens: int
    context_length: int | None = None


def parse_answer(body: Any, *, server: str) -> Answer:
    """Raises `EngineLost` when something is missing or of another type, ids and log-probs disagree, or the request was
    aborted in the server."""
    reason = _Ended.read(body, server=server).meta_info.finish_reason
    if reason.type not in ("stop", "length"):
        raise EngineLost(f"{server} ended a request with {reason.type!r}: {reason.message}")
    generated = _Generated.read(body, server=server)
    figures = generated.meta_info.output_token_logprobs
    if [token for _, token, _ in figures] != generated.output_ids:
        raise EngineLost(f"{server} answered with garbage: the ids of its log-probs are not those that it sampled.")
    return Answer(
        ids=generated.output_ids,
        logprobs=[logprob for logprob, _, _ in figures],
        likeliest=[[logprob for logprob, _, _ in each] for each in generated.meta_info.output_top_logprobs or ()],
        is_stopped=reason.type == "stop",
        cached_tokens=generated.meta_info.cached_tokens,
        spans=[(generated.meta_info.weight_version, len(generated.output_ids))],
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
