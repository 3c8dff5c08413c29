"""What an engine owes: token ids in, token ids and log-probs out, from the newest weights it was given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from strop.types import Completion

NamedTensor: TypeAlias = tuple[str, torch.Tensor]
COPIED_AT_ONCE = 2**24  # bytes of a publication in one process: each turn of a thread ends a team of helpers (`teams`)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One completion to sample.

    `ids` is the whole conversation so far. `extends` names an earlier request whose first `at` ids of (request + completion)
    equal the first `at` ids of this one: the engine may keep that prefix's KV cache, or compute it again.
    """

    id: str  # unique among the requests that were not released
    ids: tuple[int, ...]
    max_tokens: int  # of new tokens, the stop id included
    stop_ids: frozenset[int]
    temperature: float
    seed: int  # with the position in the completion, decides every token: nothing else does (law 8)
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0  # stop ids are banned before it; the sampler's log-prob is under the same ban
    extends: str = ""
    at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do beyond the protocol's floor."""

    is_deterministic: bool  # a request's tokens do not depend on what else is in the batch
    can_fork: bool  # `extends` at any length, from several requests at once, without computing the prefix again
    has_entropies: bool
    dtype: torch.dtype  # of its weights; what is published to it is cast to this first


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """KV memory, in tokens."""

    total_tokens: int
    max_request_tokens: int  # the longest single conversation
    max_running: int  # conversations that can hold KV memory at once
    block_tokens: int | None = None  # of a KV block, where memory comes in blocks and the engine tells of which size


class TakesWeights(Protocol):
    """What weights can be published to: an engine, or several at once. See `InferenceEngine.load_weights`."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], *, version: int, checksum: str) -> None: ...


class InferenceEngine(Protocol):
    """Samples from the newest weights it was given; many rollouts may call it at once."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def capacity(self) -> Capacity: ...

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next request samples from; -1 before the first `load_weights`."""

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one completion. Waits while KV memory is full.

        Raises:
            EngineLost: never returns a part of a completion.
            WeightsNotProven: the weights differ from the published ones.
            RequestTooLong: ids + max_tokens can never fit.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a running request, whose `complete` raises `asyncio.CancelledError`, and release it. Unknown ids are ignored."""

    async def release(self, request_id: str) -> None:
        """Give the request's KV memory back. Called once per conversation, also after an error; unknown ids are ignored."""

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], *, version: int, checksum: str) -> None:
        """Replace the weights, drop every KV cache of the older ones, and prove the result against `checksum`.

        `checksum` is `weights_checksum` of what was sent, in the engine's dtype. Raises `WeightsNotProven` when it differs.
        """

    async def close(self) -> None: ...


def weights_checksum(tensors: Iterable[NamedTensor]) -> str:
    """A digest of names, shapes, dtypes and bytes; the order of `tensors` does not matter."""
    import hashlib

    total = hashlib.blake2b(digest_size=16)
    digests = []
    for name, tensor in tensors:
        flat = tensor.detach().contiguous().cpu()
        digest = hashlib.blake2b(f"{name} {tuple(flat.shape)} {flat.dtype}".encode(), digest_size=16)
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
        digests.append(digest.digest())
    for each in sorted(digests):
        total.update(each)
    return total.hexdigest()
