"""vLLM: its token endpoint, its development routes for weights, and how one is started.

Answers carry the version of the weights that sampled each token, so that a server which was restarted, or which somebody else
published to, is noticed by its next answer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from strop.engine.config import VllmConfig
from strop.engine.protocol import Capacity, CompletionRequest
from strop.engine.servers.answers import Answer, field
from strop.engine.servers.client import ServerClient
from strop.engine.servers.facts import ModelFacts
from strop.engine.servers.process import ServerProcess
from strop.errors import EngineLost, StropError, UserError, WeightsNotProven

_log = logging.getLogger(__name__)
_EXTENSION = Path(__file__).with_name("extension")
_EXTENSION_CLASS = "strop_vllm_worker.StropWorker"
_GENERATE, _HEALTH = "/inference/v1/generate", "/health"
_SOCKET = "socket"
_ASK_S = 60.0  # for what needs no model step
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_SHARED_FILE = re.compile(r"(/dev/shm/psm_\w+)")  # as Python's multiprocessing names them
_NOT_A_LOGPROB = -9999.0  # what it sends for nan and -inf
_HOW_TO_START = "Start it as docs/engines.md says."


class VllmServer:
    """One vLLM server. Implements `strop.engine.servers.engine.Server`."""

    can_prove_weights = True

    def __init__(self, client: ServerClient, config: VllmConfig, process: ServerProcess | None, folder: Path | None) -> None:
        self._client, self._config, self._process, self._folder = client, config, process, folder
        self._capacity = Capacity(total_tokens=0, max_request_tokens=0, max_running=config.slots)
        self._shared = shared_memory_of(process.pid) if process is not None else set()

    @classmethod
    async def start(cls, name: str, model: ModelFacts, config: VllmConfig, *, log: Path) -> Self:
        """A server of our own, without weights, on a socket that no other user can open.

        Raises:
            EngineLost: it did not start within `start_timeout_s`; names its log.
        """
        folder = Path(tempfile.mkdtemp(prefix="strop-vllm-"))
        (folder / "generation_config.json").write_text("{}", encoding="utf-8")
        client = ServerClient(name, "http://vllm", socket=folder / _SOCKET)
        try:
            process = await ServerProcess.start(
                command_line(model, config, folder),
                env=environment(config),
                log=log,
                is_ready=lambda: client.is_up(_HEALTH),
                deadline_s=config.start_timeout_s,
            )
        except BaseException:
            await client.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        server = cls(client, config, process, folder)
        try:
            await server._learn_capacity()
        except BaseException:
            await server.close()
            raise
        return server

    @classmethod
    async def connect(cls, address: str, model: ModelFacts, config: VllmConfig) -> Self:
        """A server that runs already; it stays when this is closed.

        Raises:
            EngineLost: nobody answers there.
            UserError: it was not started as it must be.
        """
        server = cls(ServerClient(f"vLLM at {address}", address), config, None, None)
        try:
            await server._check_settings()
            await server._learn_capacity()
        except BaseException:
            await server.close()
            raise
        return server

    @property
    def name(self) -> str:
        return self._client.name

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    async def complete(self, request: CompletionRequest, *, timeout_s: float) -> Answer:
        return parse_answer(await self._client.post(_GENERATE, to_body(request), timeout_s=timeout_s), server=self.name)

    async def read_weights(self, directory: Path, *, label: str) -> str:
        """Pauses the server meanwhile. Its worker extension reads the files and tells the checksum of what it loaded."""
        await self._client.post("/pause", timeout_s=_ASK_S, query={"mode": "abort"})
        timeout_s = self._config.publish_timeout_s
        told = await self._client.post(
            "/collective_rpc",
            {"method": "strop_load_weights", "args": [str(directory)], "timeout": timeout_s},
            timeout_s=timeout_s,
        )
        checksum = self._checksum_of_all(told)
        reset = await self._client.post("/reset_prefix_cache", timeout_s=_ASK_S)
        if not field(reset, "success", server=self.name):
            raise WeightsNotProven(f"{self.name} could not drop the KV cache of its older weights.")
        await self._client.post("/update_weight_version", {"new_version": label}, timeout_s=_ASK_S)
        await self._client.post("/resume", timeout_s=_ASK_S)
        return checksum

    def has_ended(self) -> str:
        if self._process is None or self._process.is_alive:
            return ""
        return f"{self.name}: {self._process.describe(self._process.end)}"

    async def close(self) -> None:
        await self._client.close()
        if self._process is not None:
            await self._process.stop()
        for path in self._shared:  # its processes did not get to it, when they were killed
            path.unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _checksum_of_all(self, told: Any) -> str:
        """Of every worker's reading: each must have read all, and the same, and compute with it."""
        results = field(told, "results", server=self.name)
        checksums = {field(result, "checksum", server=self.name) for result in results}
        missing, stale = (
            sorted({name for result in results for name in field(result, key, server=self.name)})
            for key in ("missing", "stale")
        )
        if missing:
            raise WeightsNotProven(f"{self.name} found no values for {len(missing)} of its weights: {', '.join(missing[:5])}.")
        if stale:
            raise WeightsNotProven(f"{self.name} still computes with older values of {len(stale)}: {', '.join(stale[:5])}.")
        if num_unproven := max(field(result, "unproven", server=self.name) for result in results):
            _log.warning("%s: %d weights were loaded, but what computes with them could not be asked.", self.name, num_unproven)
        if len(checksums) != 1:
            raise WeightsNotProven(f"the workers of {self.name} read different weights: {', '.join(sorted(checksums))}.")
        return str(checksums.pop())

    async def _learn_capacity(self) -> None:
        metrics = await self._client.get_text("/metrics", timeout_s=_ASK_S)
        found = _CACHE_INFO.search(metrics)
        if found is None:
            raise EngineLost(f"{self.name} does not tell its KV memory: no vllm:cache_config_info at /metrics.")
        facts = dict(re.findall(r'(\w+)="([^"]*)"', found.group(1)))
        total = (int(facts["num_gpu_blocks"]) - 1) * int(facts["block_size"])  # it keeps one block for itself
        config = self._config
        self._capacity = Capacity(
            total_tokens=total, max_request_tokens=min(config.max_length, total), max_running=config.slots
        )

    async def _check_settings(self) -> None:
        """Raises `UserError` when a server that was given by address samples otherwise than we need."""
        try:
            told = await self._client.get("/server_info", timeout_s=_ASK_S, query={"config_format": "json"})
        except EngineLost:
            raise
        except StropError as error:
            raise UserError(f"{self.name} does not offer its development routes. {_HOW_TO_START}") from error
        served = field(told, "vllm_config", server=self.name)
        model, parallel = (field(served, part, server=self.name) for part in ("model_config", "parallel_config"))
        wrong = {
            f"its logprobs_mode is {model.get('logprobs_mode')!r}, not 'processed_logprobs'": model.get("logprobs_mode")
            != "processed_logprobs",
            f"its dtype is {model.get('dtype')}, but engine.dtype is {self._config.dtype}": self._config.dtype
            not in str(model.get("dtype")),
            f"it holds conversations of {model.get('max_model_len')} tokens, fewer than engine.max_length"
            f" {self._config.max_length}": int(model.get("max_model_len", 0)) < self._config.max_length,
            f"it lacks the worker extension {_EXTENSION_CLASS}": parallel.get("worker_extension_cls") != _EXTENSION_CLASS,
        }
        for fault, is_so in wrong.items():
            if is_so:
                raise UserError(f"{self.name} cannot be used: {fault}. {_HOW_TO_START}")


def command_line(model: ModelFacts, config: VllmConfig, folder: Path) -> list[str]:
    """What starts a server of `model`. `folder` holds an empty generation config, and gets the socket that it listens at."""
    # Not `vllm serve`: that fails in the CPU build, which looks for the version of a package called vllm.
    words = [str(config.python), "-m", "vllm.entrypoints.openai.api_server"]
    options: dict[str, object] = {
        "--model": model.directory,
        "--uds": folder / _SOCKET,
        "--dtype": config.dtype,
        "--max-model-len": config.max_length,
        "--max-num-seqs": config.slots,
        "--block-size": config.block_tokens,
        "--kv-cache-memory-bytes": kv_bytes(model, config),
        "--tensor-parallel-size": config.tensor_parallel,
        "--logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from: law 5
        "--max-logprobs": 0,
        "--generation-config": folder,  # the model directory's own would change how we sample, and ban its EOS with stop ids
        "--load-format": "dummy",  # weights come by publication alone, so that none is used unproven
        "--worker-extension-cls": _EXTENSION_CLASS,
    }
    if config.dtype != "float32":
        # Logits of a trained model are around 20, where bfloat16 goes in steps of an eighth: most of the gap to the trainer.
        options["--hf-overrides"] = '{"head_dtype": "float32"}'
    words += [str(word) for option in options.items() for word in option]
    words += ["--enable-scale-out", "--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    words += ["--enforce-eager"] if config.eager else []
    words += [] if model.has_tokenizer else ["--skip-tokenizer-init"]
    return [*words, *config.arguments]


def environment(config: VllmConfig) -> dict[str, str]:
    """Of a server that we start. Its development routes are safe where only we can reach its socket."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    variables |= {
        "PYTHONPATH": str(_EXTENSION),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if config.eager:
        variables["TORCHDYNAMO_DISABLE"] = "1"  # else its sampler alone is compiled, for 20 s, in the first request
    if config.devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.devices))
    return variables | config.environment


def shared_memory_of(pid: int) -> set[Path]:
    """Files in shared memory that a process or its descendants have open: this server's channels between its processes."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    found = set()
    for member in family:
        with contextlib.suppress(OSError):
            found |= set(_SHARED_FILE.findall(Path(f"/proc/{member}/maps").read_text()))
    return {Path(name) for name in found}


def kv_bytes(model: ModelFacts, config: VllmConfig) -> int:
    """KV memory of one device of one replica."""
    if config.kv_mib is not None:
        return config.kv_mib << 20
    blocks = config.slots * math.ceil(config.max_length / config.block_tokens) + 1  # it keeps one for itself
    total = blocks * config.block_tokens * model.kv_elements_per_token * config.torch_dtype.itemsize
    return math.ceil(total / config.tensor_parallel)


def to_body(request: CompletionRequest) -> dict[str, Any]:
    """A request in vLLM's words."""
    return {
        "token_ids": list(request.ids),
        "sampling_params": {
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": request.seed % 2**63,
            "max_tokens": request.max_tokens,
            "min_tokens": request.min_tokens,
            "stop_token_ids": sorted(request.stop_ids),
            "stop": list(request.stop_strings),
            "ignore_eos": True,  # only our stop ids stop
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(request.stop_strings),
            "skip_special_tokens": False,  # a stop string may spell one out
        },
    }


def parse_answer(body: Mapping[str, Any], *, server: str) -> Answer:
    """Raises `EngineLost` when something is missing, or the request was aborted in the server."""
    choice = field(body, "choices", 0, server=server)
    ids = field(choice, "token_ids", server=server)
    reason = field(choice, "finish_reason", server=server)
    if reason not in ("stop", "length"):
        raise EngineLost(f"{server} ended a request with {reason!r}: somebody aborted it, or it ran out of memory.")
    logprobs = [field(entry, "logprob", server=server) for entry in field(choice, "logprobs", "content", server=server)]
    spans = field(choice, "weight_versions", server=server) or []
    return Answer(
        ids=ids,
        logprobs=[-math.inf if each <= _NOT_A_LOGPROB else each for each in logprobs],
        is_stopped=reason == "stop",
        cached_tokens=_cached_tokens(body),
        label=" then ".join(str(field(span, "version", server=server)) for span in spans),
    )


def _cached_tokens(body: Mapping[str, Any]) -> int:
    with contextlib.suppress(KeyError, TypeError):
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)
    return 0  # it leaves the details out when nothing was cached
