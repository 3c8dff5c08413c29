"""A server that speaks SGLang's published schema and samples from a fixed script, for tests of our side of the wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

Mend = Callable[[dict[str, Any]], Any]


@dataclass
class FakeSglang:
    """`mend` may change an answer to /generate before it is sent; `delay_s` is how long each takes."""

    mend: Mend = field(default=lambda body: body)
    delay_s: float = 0.0
    weight_version: str = "default"
    files: list[str] = field(default_factory=list)  # in the directory of the last weights
    calls: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    dtype: str = "float32"
    refuses_weights: bool = False
    is_computing: bool = True

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/health_generate", self._health)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        for path in ("/pause_generation", "/continue_generation"):
            app.router.add_post(path, self._note)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/abort_request", self._abort)
        runner = web.AppRunner(app, shutdown_timeout=0.1)  # of answers that hang on purpose
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"dtype": self.dtype, "context_length": 100, "max_total_num_tokens": 640})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_computing else 503)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        aborted = self.running[body["rid"]] = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(aborted.wait(), self.delay_s)
        del self.running[body["rid"]]
        params = body["sampling_params"]
        ids = [(body["input_ids"][-1] + 1 + index) % 67 for index in range(params["max_new_tokens"])]
        stop = next((index for index, each in enumerate(ids) if each in params["stop_token_ids"]), None)
        reason: dict[str, Any] = {"type": "length", "length": len(ids)}
        if stop is not None:
            ids, reason = ids[: stop + 1], {"type": "stop", "matched": ids[stop]}
        meta = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.weight_version,
            "output_token_logprobs": [[-0.5, each, None] for each in ids],
        }
        answer = self.mend({"text": "", "output_ids": ids, "meta_info": meta})
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append("/update_weights_from_disk")
        self.files = sorted(path.name for path in Path(body["model_path"]).glob("*.safetensors"))
        if self.refuses_weights:
            return web.json_response({"success": False, "message": "shape mismatch"}, status=200)
        self.weight_version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _note(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        return web.json_response({"status": "ok"})

    async def _flush(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self.running:
            self.running[rid].set()
        return web.Response()
