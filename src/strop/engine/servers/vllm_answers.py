"""What a vLLM server says, read strictly: a number of the wrong type is garbage, and not a traceback somewhere else."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import Field

from strop.engine.servers.answers import Answer, Said, read
from strop.errors import EngineLost

_NOT_A_LOGPROB = -9999.0  # what it sends for nan and -inf
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)


class _Ended(Said):
    finish_reason: str


class _AllEnded(Said):
    choices: Annotated[list[_Ended], Field(min_length=1)]


class _Logprob(Said):
    logprob: float


class _Logprobs(Said):
    content: list[_Logprob]


class _Span(Said):
    version: str


class _Choice(Said):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span] | None = None


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


class Loaded(Said):
    """What one worker tells of the weights that it read; see the worker extension."""

    checksum: str
    missing: list[str]
    stale: list[str]
    unproven: int


class AllLoaded(Said):
    results: Annotated[list[Loaded], Field(min_length=1)]


class Done(Said):
    success: bool


class ModelSettings(Said):
    logprobs_mode: str | None = None
    dtype: str | None = None
    max_model_len: int = 0


class ParallelSettings(Said):
    worker_extension_cls: str | None = None


class Settings(Said):
    model: ModelSettings = Field(alias="model_config")  # pydantic has plans of its own for that name
    parallel: ParallelSettings = Field(alias="parallel_config")


class ServerInfo(Said):
    vllm_config: Settings


def parse_answer(body: Any, *, server: str) -> Answer:
    """Raises `EngineLost` when something is missing or of another type, or the request was aborted in the server."""
    reason = read(_AllEnded, body, server=server).choices[0].finish_reason
    if reason not in ("stop", "length"):
        raise EngineLost(f"{server} ended a request with {reason!r}: somebody aborted it, or it ran out of memory.")
    generated = read(_Generated, body, server=server)
    choice = generated.choices[0]
    logprobs = [each.logprob for each in choice.logprobs.content]
    return Answer(
        ids=choice.token_ids,
        logprobs=[-math.inf if each <= _NOT_A_LOGPROB else each for each in logprobs],
        is_stopped=reason == "stop",
        cached_tokens=generated.cached_tokens,
        label=" then ".join(span.version for span in choice.weight_versions or []),
    )


def parse_memory(metrics: str, *, server: str) -> tuple[int, int]:
    """Blocks of its KV cache, and tokens of a block, as /metrics tells them. Raises `EngineLost` when it does not."""
    found = _CACHE_INFO.search(metrics)
    facts = dict(re.findall(r'(\w+)="(\d+)"', found.group(1) if found else ""))
    if not {"num_gpu_blocks", "block_size"} <= set(facts):
        raise EngineLost(f"{server} does not tell its KV memory: no blocks in vllm:cache_config_info at /metrics.")
    return int(facts["num_gpu_blocks"]), int(facts["block_size"])
