"""Speaks vLLM's token and development routes, and reads weights as its worker would, for fast tests of our side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from strop.engine.servers.extension.strop_weights_proof import checksum_of, read_weights


@dataclass
class FakeVllm:
    """`refusal` is why its workers refuse weights; `settings` overrides what /server_info says of the model.

    Its sleep mode is as in vLLM's documentation: nothing can be loaded or sampled while what it needs is asleep.
    """

    refusal: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, str] | None = field(default_factory=lambda: {"backend": "strop"})
    is_reset: Any = True
    block_size: int = 32
    num_blocks: int = 22
    seconds: dict[int, float] = field(default_factory=dict)  # that a completion takes, by the last id of its prompt
    version: str = "default"
    calls: list[str] = field(default_factory=list)
    asleep: set[str] = field(default_factory=set)
    adapters: dict[str, str] = field(default_factory=dict)  # name -> directory

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        self.add_routes(app.router)
        runner = web.AppRunner(app, shutdown_timeout=0.1)  # of answers that hang on purpose
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/server_info", self._server_info)
        router.add_get("/metrics", self._metrics)
        router.add_post("/inference/v1/generate", self._generate)
        for path in ("pause", "resume", "start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"):
            router.add_post(f"/{path}", getattr(self, f"_{path}"))
        router.add_post("/v1/load_lora_adapter", self._load_lora_adapter)
        router.add_post("/v1/unload_lora_adapter", self._unload_lora_adapter)
        router.add_post("/collective_rpc", self._collective_rpc)
        if self.settings.get("enable_sleep_mode"):
            router.add_post("/sleep", self._sleep)
            router.add_post("/wake_up", self._wake_up)

    async def _server_info(self, request: web.Request) -> web.Response:
        if request.query.get("config_format") != "json":
            return web.json_response({"vllm_config": "one long text"})
        model = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "max_model_len": 100} | self.settings
        config = {"model_config": model, "weight_transfer_config": self.transfer}
        return web.json_response({"vllm_config": config})

    async def _metrics(self, _: web.Request) -> web.Response:
        facts = f'block_size="{self.block_size}",engine="0",num_gpu_blocks="{self.num_blocks}"'
        return web.Response(text=f"vllm:cache_config_info{{{facts}}} 1.0\n")

    async def _pause(self, request: web.Request) -> web.Response:
        self.calls.append(f"pause {request.query['mode']}")
        return web.json_response({"status": "paused"})

    async def _sleep(self, request: web.Request) -> web.Response:
        if self.asleep:
            raise web.HTTPInternalServerError(text="it sleeps already")
        self.calls.append(f"sleep {request.query['level']}")
        self.asleep, self.version = {"weights", "kv_cache"}, "discarded"
        return web.json_response({"status": "sleeping", "level": int(request.query["level"])})

    async def _wake_up(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags")
        if not self.asleep.issuperset(tags):
            raise web.HTTPInternalServerError(text=f"{tags} is awake")
        self.calls.append(f"wake {' '.join(tags)}")
        self.asleep -= set(tags)
        return web.json_response({"status": "sleeping" if self.asleep else "awake", "tags": tags})

    async def _resume(self, _: web.Request) -> web.Response:
        self.calls.append("resume")
        return web.json_response({"status": "resumed"})

    async def _start_weight_update(self, _: web.Request) -> web.Response:
        return web.json_response({"message": "Weight update started"})

    async def _update_weights(self, request: web.Request) -> web.Response:
        if "weights" in self.asleep:
            raise web.HTTPInternalServerError(text="there is no memory for weights")
        update = (await request.json())["update_info"]
        self.calls.append("update")
        digests: list[Future[bytes]] = []
        with ThreadPoolExecutor(1) as threads:
            list(read_weights(Path(update["directory"]), digests, threads))
        refusal = self.refusal or (checksum_of(digests) != update["checksum"] and "they are damaged")
        if refusal:
            message = f"Call to collective_rpc method failed: {refusal}"
            return web.json_response({"error": {"message": message, "type": "InternalServerError"}}, status=500)
        return web.json_response({"message": "Weights updated"})

    async def _finish_weight_update(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["weight_version"]
        return web.json_response({"message": "Weight update finished"})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        self.calls.append("reset")
        return web.json_response({"success": self.is_reset})

    async def _load_lora_adapter(self, request: web.Request) -> web.Response:
        said = await request.json()
        self.calls.append("load adapter")
        self.adapters[said["lora_name"]] = said["lora_path"]
        return web.Response(text=f"Success: LoRA adapter '{said['lora_name']}' added successfully.")

    async def _unload_lora_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        del self.adapters[name]
        self.calls.append("unload adapter")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        said = await request.json()
        assert said["method"] == "prove_adapter"
        directory, checksum = said["args"]
        assert directory == [*self.adapters.values()][-1]
        self.calls.append("prove adapter")
        digests: list[Future[bytes]] = []
        with ThreadPoolExecutor(1) as threads:
            list(read_weights(Path(directory), digests, threads))
        if refusal := self.refusal or (checksum_of(digests) != checksum and "they are damaged"):
            raise web.HTTPInternalServerError(text=str(refusal))
        return web.json_response({"results": [None]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.asleep:
            raise web.HTTPInternalServerError(text=f"{self.asleep} is asleep")
        body = await request.json()
        if "model" in body and body["model"] not in self.adapters:
            raise web.HTTPNotFound(text=f"The model `{body['model']}` does not exist.")
        pause_s = self.seconds.get(body["token_ids"][-1], 0.0)
        if not body.get("stream"):
            await asyncio.sleep(pause_s)
        params = body["sampling_params"]
        ids = [(body["token_ids"][-1] + 1 + index) % 67 for index in range(params["max_tokens"])]
        end = next((index for index, each in enumerate(ids) if each in params["stop_token_ids"]), None)
        ids = ids if end is None else ids[: end + 1]
        choice = {
            "index": 0,
            "finish_reason": "length" if end is None else "stop",
            "token_ids": ids,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
            "logprobs": {"content": [self._logprobs(each, params["logprobs"]) for each in ids]},
        }
        usage = {"prompt_tokens_details": {"cached_tokens": None}}
        if not body.get("stream"):
            return web.json_response({"choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index, (each, logprobs) in enumerate(zip(ids, choice["logprobs"]["content"], strict=True)):
            of_token = {"index": 0, "token_ids": [each], "logprobs": {"content": [logprobs]}}
            is_last = index + 1 == len(ids)
            end = {key: choice[key] if is_last else None for key in ("finish_reason", "weight_versions")}
            await response.write(f"data: {json.dumps({'choices': [of_token | end], 'usage': None})}\n\n".encode())
            await asyncio.sleep(pause_s if index == 1 else 0.0)
        for last in (json.dumps({"choices": [], "usage": usage}), "[DONE]"):
            await response.write(f"data: {last}\n\n".encode())
        return response

    @staticmethod
    def _logprobs(token: int, num: int) -> dict[str, Any]:
        return {"token_id": token, "logprob": -0.5, "top_logprobs": [{"token_id": 0, "logprob": -0.5}] * num}
