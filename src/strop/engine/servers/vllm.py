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
from pathlib import Path
from typing import Any, Self

from strop.engine.config import VllmConfig
from strop.engine.protocol import Capacity, CompletionRequest
from strop.engine.servers.answers import Answer, read
from strop.engine.servers.client import ServerClient
from strop.engine.servers.facts import ModelFacts
from strop.engine.servers.process import ServerProcess
from strop.engine.servers.vllm_answers import AllLoaded, Done, ServerInfo, parse_answer, parse_memory
from strop.errors import EngineLost, StropError, UserError, WeightsNotProven

_log = logging.getLogger(__name__)
_EXTENSION = Path(__file__).with_name("extension")
_EXTENSION_CLASS = "strop_vllm_worker.StropWorker"
_GENERATE, _HEALTH = "/inference/v1/generate", "/health"
_SOCKET = "socket"
_ASK_S = 60.0  # for what needs no model step
_SHARED_FILE = re.compile(r"(/dev/shm/psm_\w+)")  # as Python's multiprocessing names them
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
        if not read(Done, reset, server=self.name).success:
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
        results = read(AllLoaded, told, server=self.name).results
        checksums = {result.checksum for result in results}
        missing = sorted({name for result in results for name in result.missing})
        stale = sorted({name for result in results for name in result.stale})
        if missing:
            raise WeightsNotProven(f"{self.name} found no values for {len(missing)} of its weights: {', '.join(missing[:5])}.")
        if stale:
            raise WeightsNotProven(f"{self.name} still computes with older values of {len(stale)}: {', '.join(stale[:5])}.")
        if num_unproven := max(result.unproven for result in results):
            _log.warning("%s: %d weights were loaded, but what computes with them could not be asked.", self.name, num_unproven)
        if len(checksums) != 1:
            raise WeightsNotProven(f"the workers of {self.name} read different weights: {', '.join(sorted(checksums))}.")
        return checksums.pop()

    async def _learn_capacity(self) -> None:
        metrics = await self._client.get_text("/metrics", timeout_s=_ASK_S)
        num_blocks, block_tokens = parse_memory(metrics, server=self.name)
        total = (num_blocks - 1) * block_tokens  # it keeps one block for itself
        self._capacity = Capacity(
            total_tokens=total,
            max_request_tokens=min(self._config.max_length, total),
            max_running=self._config.slots,
            block_tokens=block_tokens,
        )

    async def _check_settings(self) -> None:
        """Raises `UserError` when a server that was given by address samples otherwise than we need."""
        try:
            told = await self._client.get("/server_info", timeout_s=_ASK_S, query={"config_format": "json"})
        except EngineLost:
            raise
        except StropError as error:
            raise UserError(f"{self.name} does not offer its development routes. {_HOW_TO_START}") from error
        served, config = read(ServerInfo, told, server=self.name).vllm_config, self._config
        model, extension = served.model, served.parallel.worker_extension_cls
        wrong = {
            f"its logprobs_mode is {model.logprobs_mode!r}, not 'processed_logprobs'": model.logprobs_mode
            != "processed_logprobs",
            f"its dtype is {model.dtype}, but engine.dtype is {config.dtype}": config.dtype not in (model.dtype or ""),
            f"it holds conversations of {model.max_model_len} tokens, fewer than engine.max_length"
            f" {config.max_length}": model.max_model_len < config.max_length,
            f"it lacks the worker extension {_EXTENSION_CLASS}": extension != _EXTENSION_CLASS,
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
    # One more for each conversation, whose prefix may have to be used meanwhile; and the server keeps one for itself.
    blocks = config.slots * (math.ceil(config.max_length / config.block_tokens) + 1) + 1
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
