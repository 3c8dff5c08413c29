"""A deterministic engine for tests, which returns given replies, or those of a function of the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from strop.engine.protocol import Capabilities, Capacity, CompletionRequest, check_request, weights_checksum
from strop.engine.publication import Publication
from strop.errors import StropError, WeightsNotProven
from strop.types import Completion, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A scripted completion whose figures matter. `logprobs` and `entropies` in nats, one per id."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]


Policy = Callable[[CompletionRequest], Sequence[int] | Reply]


class ScriptedEngine:
    """An `InferenceEngine` without a model.

    Each completion is cut after its first stop id and at `max_tokens`, as a model's would be; a script that ends before both
    counts as stopped. Bare ids are reported with log-prob and entropy 0: a script is certain of what it says. It samples before
    any weights were published, too.

    Args:
        policy: a function of the request; or completions to give in order of arrival.
        max_request_tokens: the longest conversation.
        policy_version: before the first `load_weights`.
        dtype: of the weights it holds.
    """

    def __init__(
        self,
        policy: Policy | Sequence[Sequence[int]],
        *,
        max_request_tokens: int = 1 << 14,
        policy_version: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.requests: list[CompletionRequest] = []  # all that were accepted, in order of arrival
        self.released: list[str] = []  # every id that `release` was called with
        self.weights: dict[str, torch.Tensor] = {}  # of the newest load
        self._policy = policy
        self.policy_version, self._dtype = policy_version, dtype
        self.capacity = Capacity(total_tokens=1 << 20, max_request_tokens=max_request_tokens, max_running=1 << 10)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_deterministic=True, can_fork=True, entropies="full", dtype=self._dtype)

    async def complete(self, request: CompletionRequest) -> Completion:
        check_request(request, max_length=self.capacity.max_request_tokens)
        self.requests.append(request)
        return self.completion(request, len(self.requests) - 1)

    async def progress(self) -> int:
        return len(self.requests)

    async def abort(self, request_id: str) -> None:
        """There is nothing to stop: completions take no time."""

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)

    async def load_weights(self, publication: Publication) -> None:
        self.weights = {name: tensor.detach().to(self._dtype, copy=True) async for name, tensor in publication.tensors()}
        version, checksum, held = publication.version, await publication.checksum(), weights_checksum(self.weights.items())
        if held != checksum:
            raise WeightsNotProven(f"version {version} was published with checksum {checksum}, but the engine holds {held}.")
        self.policy_version = version

    async def close(self) -> None:
        """There is nothing to close."""

    def completion(self, request: CompletionRequest, number: int, *, cached_tokens: int = 0) -> Completion:
        """The scripted reply to `request`, the `number`-th from 0, as a model's completion."""
        start = request.num_before
        whole = replace(request, ids=request.ids[:-start], max_tokens=start + request.max_tokens) if start else request
        reply = self._reply(whole, number)
        ids = reply.ids[start:]
        stop = next((index + 1 for index, token in enumerate(ids) if token in request.stop_ids), None)
        length = min(stop or len(ids), request.max_tokens)
        is_stopped = length == stop or length < request.max_tokens
        return Completion(
            ids=ids[:length],
            logprobs=reply.logprobs[start : start + length],
            entropies=reply.entropies[start : start + length],
            is_forced=(False,) * length,
            spans=((self.policy_version, length),),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            cached_tokens=cached_tokens,
        )

    def _reply(self, request: CompletionRequest, number: int) -> Reply:
        if callable(self._policy):
            said = self._policy(request)
        else:
            if number >= len(self._policy):
                raise StropError(f"the script has {len(self._policy)} completions; request {request.id} is number {number}.")
            said = self._policy[number]
        if isinstance(said, Reply):
            return said
        return Reply(ids=tuple(said), logprobs=(0.0,) * len(said), entropies=(0.0,) * len(said))
