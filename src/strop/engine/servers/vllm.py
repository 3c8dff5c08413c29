"""vLLM: its token endpoint, its development routes for weights, and how one is started.

Answers carry the version of the weights that sampled each token, so that a server which was restarted, or which somebody else
published to, is noticed by its next answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from strop.engine.config import VllmConfig
from strop.engine.model_directory import ModelFacts
from strop.engine.protocol import Capacity, CompletionRequest, Entropies, Truncation
from strop.engine.servers.reaper import descendants
from strop.engine.servers.server import Answer, Begun, Said, Server, ServerClient, command_of, environment_of, num_logprobs
from strop.errors import EngineLost, StropError, UserError, WeightsNotProven
from strop.types import derive_seed

_log = logging.getLogger(__name__)

EXTENSION = Path(__file__).with_name("extension")
EXTENSION_CLASS = "strop_vllm_worker.StropWorker"
TRANSFER = {"backend": "strop"}  # which the extension registers
_GENERATE = "/inference/v1/generate"
_SOCKET = "socket"
_BLOCK_TOKENS = 32  # of a KV block
_FREE_AT_START = 0.05  # of a device; with the KV memory given vLLM only checks it, and a trainer has memory there
_SHARED_FILE = re.compile(r"(/dev/shm/psm_\w+)")  # as Python's multiprocessing names them


class VllmServer(Server[VllmConfig]):
    """One vLLM server. One that strop starts listens on a socket that no other user can open."""

    title, health = "vLLM", "/health"

    def __init__(self, client: ServerClient, config: VllmConfig, folder: Path | None = None) -> None:
        super().__init__(client, config)
        self._folder = folder
        self._shared: set[Path] = set()
        self._asleep: list[str] = []  # vLLM's tags of what is not in the memory of the devices
        self._label = ""  # of the weights
        self._adapters: list[str] = []  # labels; requests that begin now are sampled with the last
        if config.tensor_parallel > 1:  # no worker holds a whole matrix to multiply with
            how = "by names, shapes and checksum, but not by what its workers compute with"
            _log.warning("%s: with tensor_parallel = %d weights are proven %s.", client.name, config.tensor_parallel, how)

    @classmethod
    async def start(cls, name: str, model: ModelFacts, config: VllmConfig, *, log: Path) -> Self:
        folder = Path(tempfile.mkdtemp(prefix="strop-vllm-"))
        (folder / "generation_config.json").write_text("{}", encoding="utf-8")
        server = cls(ServerClient(name, "http://vllm", socket=folder / _SOCKET), config, folder)
        return await server._run(command_line(model, config, folder), environment=environment(config), log=log)

    async def complete(self, request: CompletionRequest, *, timeout_s: float | None, begun: Begun | None = None) -> Answer:
        adapter, body = (self._adapters or [""])[-1], to_body(request)
        if adapter:
            body["model"] = adapter
        if begun is not None and request.probe is not None:
            said = await self._streamed(body, request.probe.num_tokens, begun)
        else:
            said = await self._client.post(_GENERATE, body, timeout_s=timeout_s)
        answer = parse_answer(said, server=self.name)
        if adapter and all(label == self._label for label, _ in answer.spans):
            return replace(answer, spans=[(adapter, len(answer.ids))])
        return answer

    async def _streamed(self, body: Mapping[str, Any], num_tokens: int, begun: Begun) -> Any:
        """What is answered to `body`, which comes in parts, as it would come whole; `begun` once `num_tokens` have come."""
        ids, sampled = list[int](), list[_Sampled]()
        usage, last = None, dict[str, Any]()
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with contextlib.aclosing(self._client.stream(_GENERATE, body)) as events:
            async for event in events:
                part, num_before = _Part.read(event, server=self.name), len(sampled)
                usage = event.get("usage") or usage
                for number, choice in enumerate(part.choices):
                    ids += choice.token_ids
                    sampled += choice.logprobs.content if choice.logprobs is not None else []
                    last = event["choices"][number]
                if num_before < num_tokens <= len(sampled):
                    begun([_likeliest(each) for each in sampled[:num_tokens]])
        logprobs = {"content": [each.model_dump() for each in sampled]}
        return {"usage": usage, "choices": [{**last, "token_ids": ids, "logprobs": logprobs}]}

    async def progress(self) -> int:
        return parse_progress(await self._client.get_text("/metrics"))

    async def read_weights(self, directory: Path, *, checksum: str, label: str, keeps_requests: bool) -> None:
        """Pauses the server meanwhile. Our transfer engine in its workers reads the files, and fails if it cannot prove them.

        Requests that are kept lose their KV cache. Resumed, the server computes their context again, with the new weights.
        """
        await self._wake("weights")
        await self._client.post("/pause", query={"mode": "keep" if keeps_requests else "abort"})
        await self._client.post("/start_weight_update")
        files = {"update_info": {"directory": str(directory), "checksum": checksum}}
        try:
            await self._client.post("/update_weights", files, timeout_s=self._config.start_timeout_s)
        except EngineLost as error:
            raise WeightsNotProven(f"the published weights are not proven: {error}") from error
        await self._client.post("/finish_weight_update", {"weight_version": label})
        self._label = label
        query = {"reset_running_requests": str(keeps_requests)}
        reset = await self._client.post("/reset_prefix_cache", query=query)
        if not Done.read(reset, server=self.name).success:
            raise WeightsNotProven(f"{self.name} could not drop the KV cache of its older weights.")
        await self._wake("kv_cache")
        await self._client.post("/resume")

    async def read_adapter(self, directory: Path, *, checksum: str, label: str) -> None:
        """Keeps the KV caches: vLLM looks a prefix up under the name of its adapter."""
        limit, adapter = self._config.start_timeout_s, {"lora_name": label, "lora_path": str(directory)}
        prove = {"method": "prove_adapter", "args": [str(directory), checksum]}
        try:
            await self._client.post("/v1/load_lora_adapter", adapter, timeout_s=limit, parsed=False)
            await self._client.post("/collective_rpc", prove, timeout_s=limit, parsed=False)
        except EngineLost as error:
            raise WeightsNotProven(f"the published adapter is not proven: {error}") from error
        self._adapters.append(label)
        while len(self._adapters) > self._config.adapter_slots:
            old = {"lora_name": self._adapters.pop(0)}
            await self._client.post("/v1/unload_lora_adapter", old, parsed=False)

    async def sleep(self) -> None:
        """Level 2: nothing is kept in the memory of the host, since the next publication brings all weights."""
        await self._client.post("/sleep", timeout_s=self._config.start_timeout_s, query={"level": "2"})
        self._asleep = ["weights", "kv_cache"]

    async def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            await self._client.post("/wake_up", timeout_s=self._config.start_timeout_s, query={"tags": tag})
            self._asleep.remove(tag)

    async def close(self) -> None:
        await super().close()
        for path in self._shared:  # its processes did not get to it, when they were killed
            path.unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _learn_capacity(self) -> Capacity:
        if self._process is None:
            await self._check_settings()
        else:
            self._shared = shared_memory_of(self._process.pid)
        metrics = await self._client.get_text("/metrics")
        num_blocks, block_tokens = parse_memory(metrics, server=self.name)
        total = (num_blocks - 1) * block_tokens  # it keeps one block for itself
        longest, slots = min(self._config.max_length, total), self._config.slots
        return Capacity(total_tokens=total, max_request_tokens=longest, max_running=slots, block_tokens=block_tokens)

    async def _check_settings(self) -> None:
        """Raises `UserError` when a server that was given by address samples otherwise than we need."""
        try:
            answer = await self._client.get("/server_info", query={"config_format": "json"})
        except EngineLost:
            raise
        except StropError as error:
            raise UserError(f"{self.name} does not offer its development routes. Start it as docs/engines.md says.") from error
        served, config = ServerInfo.read(answer, server=self.name).vllm_config, self._config
        model, transfer = served.model, served.transfer
        mode = model.logprobs_mode
        wrong = {
            f"its logprobs_mode is {mode!r}, not 'processed_logprobs'": mode != "processed_logprobs",
            f"its dtype is {model.dtype}, but engine.dtype is {config.dtype}": config.dtype not in (model.dtype or ""),
            f"its weight_transfer_config is not {json.dumps(TRANSFER)}": transfer is None or transfer.backend != "strop",
            "it has no --enable-sleep-mode, but engine.sleep is true": config.sleep and not model.enable_sleep_mode,
        }
        self._refuse(wrong, length=model.max_model_len)


def command_line(model: ModelFacts, config: VllmConfig, folder: Path) -> list[str]:
    """What starts a server of `model`. `folder` holds an empty generation config, and gets the socket that it listens at."""
    # Not `vllm serve`: that fails in the CPU build, which looks for the version of a package called vllm.
    module = "vllm.entrypoints.openai.api_server"
    options: dict[str, object] = {
        "--model": model.directory,
        "--uds": folder / _SOCKET,
        "--dtype": config.dtype,
        "--max-model-len": config.max_length,
        "--max-num-seqs": config.slots,
        "--block-size": _BLOCK_TOKENS,
        "--kv-cache-memory-bytes": kv_bytes(model, config),
        "--tensor-parallel-size": config.tensor_parallel,
        "--logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from
        "--max-logprobs": num_logprobs(Entropies.FULL),
        "--generation-config": folder,  # the model directory's own would change how we sample, and ban its EOS with stop ids
        "--load-format": "dummy",  # weights come only by publication, which proves them
        "--worker-extension-cls": EXTENSION_CLASS,
        "--weight-transfer-config": json.dumps(TRANSFER),
    }
    if config.dtype != "float32":
        # Logits of a trained model are around 20, where bfloat16 goes in steps of an eighth: most of the gap to the trainer.
        options["--hf-overrides"] = '{"head_dtype": "float32"}'
    flags = ["--enable-scale-out", "--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    flags += ["--enforce-eager"] if config.eager else []
    if config.adapter_slots:
        flags.append("--enable-lora")
        options |= {"--max-loras": config.adapter_slots, "--max-lora-rank": config.adapter_rank}
    if config.sleep:
        flags.append("--enable-sleep-mode")
        options["--gpu-memory-utilization"] = _FREE_AT_START
    return command_of(module, options, flags, model, config)


def environment(config: VllmConfig) -> dict[str, str]:
    """Of a server that we start. Its development routes are safe where only we can reach its socket."""
    variables = {"PYTHONPATH": str(EXTENSION), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if config.adapter_slots:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.eager:
        variables["TORCHDYNAMO_DISABLE"] = "1"  # else the first request compiles the sampler for 20 s
    return environment_of(config, variables)


def shared_memory_of(pid: int) -> set[Path]:
    """Files in shared memory that a process or its descendants have open: this server's channels between its processes."""
    found = set()
    for member in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):
            found |= set(_SHARED_FILE.findall(Path(f"/proc/{member}/maps").read_text()))
    return {Path(name) for name in found}


def kv_bytes(model: ModelFacts, config: VllmConfig) -> int:
    """KV memory of one device of one replica."""
    if config.kv_mib is not None:
        return config.kv_mib << 20
    # One more for each conversation, whose prefix may have to be used meanwhile; and the server keeps one for itself.
    blocks = config.slots * (math.ceil(config.max_length / _BLOCK_TOKENS) + 1) + 1
    total = blocks * _BLOCK_TOKENS * model.kv_elements_per_token * config.torch_dtype.itemsize
    return math.ceil(total / config.tensor_parallel)


def to_body(request: CompletionRequest) -> dict[str, Any]:
    """A request in vLLM's words."""
    # vLLM counts positions from the begin of a request: a later piece of a completion needs random numbers of its own.
    seed = derive_seed(request.seed, request.num_before) if request.num_before else request.seed
    return {
        "token_ids": list(request.ids),
        "sampling_params": {
            "temperature": request.temperature,
            **asdict(request.truncation or Truncation()),
            "seed": seed % 2**63,
            "max_tokens": request.max_tokens,
            "min_tokens": request.min_tokens,
            "stop_token_ids": sorted(request.stop_ids),
            "stop": list(request.stop_strings),
            "ignore_eos": True,  # only our stop ids stop
            "logprobs": num_logprobs(request.entropies),  # 0: only of the sampled token
            "detokenize": bool(request.stop_strings),
            "skip_special_tokens": False,  # a stop string may spell one out
        },
    }


_NOT_A_LOGPROB = -9999.0  # what it sends for nan and -inf
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total\{.*\} (\S+)$", re.MULTILINE)
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)


class _Ended(Said):
    finish_reason: str


class _AllEnded(Said):
    choices: Annotated[list[_Ended], Field(min_length=1)]


class _Logprob(Said):
    logprob: float


class _Sampled(_Logprob):
    top_logprobs: list[_Logprob] = Field(default=[])


class _Logprobs(Said):
    content: list[_Sampled]


class _Span(Said):
    version: str
    start: int
    end: int


class _Choice(Said):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]


class _Piece(Said):
    token_ids: list[int]
    logprobs: _Logprobs | None = None  # not where the request was aborted


class _Part(Said):
    choices: list[_Piece]  # none in the last, which has the usage


class _PromptDetails(Said):
    cached_tokens: int | None = None


class _Usage(Said):
    prompt_tokens_details: _PromptDetails | None = None


class _Generated(Said):
    choices: list[_Choice]
    usage: _Usage | None = None

    @property
    def cached_tokens(self) -> int:
        """It leaves the details out when nothing was cached."""
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return (details.cached_tokens if details is not None else None) or 0


class Done(Said):
    success: bool


class ModelSettings(Said):
    logprobs_mode: str | None = None
    dtype: str | None = None
    max_model_len: int = 0
    enable_sleep_mode: bool = False


class TransferSettings(Said):
    backend: str


class Settings(Said):
    model: ModelSettings = Field(alias="model_config")  # pydantic has plans of its own for that name
    transfer: TransferSettings | None = Field(alias="weight_transfer_config", default=None)


class ServerInfo(Said):
    vllm_config: Settings


def parse_answer(body: Any, *, server: str) -> Answer:
    """Raises `EngineLost` when something is missing or of another type, or the request was aborted in the server."""
    reason = _AllEnded.read(body, server=server).choices[0].finish_reason
    if reason not in ("stop", "length"):
        raise EngineLost(f"{server} ended a request with {reason!r}: somebody aborted it, or it ran out of memory.")
    generated = _Generated.read(body, server=server)
    choice = generated.choices[0]
    sampled = choice.logprobs.content
    return Answer(
        ids=choice.token_ids,
        logprobs=[_logprob(each) for each in sampled],
        likeliest=[_likeliest(each) for each in sampled],
        is_stopped=reason == "stop",
        cached_tokens=generated.cached_tokens,
        spans=[(span.version, span.end - span.start) for span in choice.weight_versions],
    )


def _likeliest(said: _Sampled) -> list[float]:
    return [_logprob(each) for each in said.top_logprobs]


def _logprob(said: _Logprob) -> float:
    return -math.inf if said.logprob <= _NOT_A_LOGPROB else said.logprob


def parse_memory(metrics: str, *, server: str) -> tuple[int, int]:
    """Blocks of its KV cache, and tokens of a block, as /metrics tells them. Raises `EngineLost` when it does not."""
    found = _CACHE_INFO.search(metrics)
    facts = dict(re.findall(r'(\w+)="(\d+)"', found.group(1) if found else ""))
    if not {"num_gpu_blocks", "block_size"} <= set(facts):
        raise EngineLost(f"{server} does not tell its KV memory: no blocks in vllm:cache_config_info at /metrics.")
    return int(facts["num_gpu_blocks"]), int(facts["block_size"])


def parse_progress(metrics: str) -> int:
    """Tokens that it has computed so far, as /metrics tells them; 0 where it tells none."""
    return sum(int(float(number)) for number in _TOKENS.findall(metrics))
