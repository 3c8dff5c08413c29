"""The interface of engines: token ids in, token ids and log-probs out, sampled from the newest published weights.

Requests are checked before anything is computed, and completions before they are used.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from strop.errors import EngineLost, ModelError, RequestTooLong, StropError, UserError
from strop.types import Completion, FinishReason

if TYPE_CHECKING:
    import torch

    from strop.engine.publication import Publication


class Entropies(StrEnum):
    """What a completion reports of the entropy of each sampled token."""

    ANY = "any"  # the whole distribution's from an engine that has it at no cost, none from others
    FULL = "full"  # of the whole distribution; a server estimates it, see `strop.engine.servers.server.entropy_of`
    TOP10 = "top10"  # the sum of -p log p over the `NUM_LIKELIEST` likeliest tokens: ARPO's released code


NUM_LIKELIEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Limits of the distribution that is sampled from, as in vLLM. For evaluation: what is trained on has none."""

    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens in the prompt or the completion


NamedTensor: TypeAlias = "tuple[str, torch.Tensor]"
_NUM_THREADS = min(4, os.cpu_count() or 1)  # of hashing
COPIED_AT_ONCE = 2**24  # bytes of a publication that are copied in one turn; each turn releases OpenMP threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Asks for the entropies of a completion's first tokens while the rest is sampled.

    An engine that can tell them earlier than the completion calls `tell` once, in the caller's thread, if the completion is
    long enough; never after `complete` has returned or raised. Others (SGLang) ignore it. With `num_tokens` 0 nothing
    is asked: a server calls `tell` before it samples, the embedded engine after the first token.
    """

    num_tokens: int
    tell: Callable[[tuple[float, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One completion to sample.

    `ids` is the whole conversation so far. `extends` names an earlier request whose first `at` ids of (request + completion)
    equal the first `at` ids of this one: the engine may keep that prefix's KV cache, or compute it again.
    """

    id: str  # unique among requests that are not released
    ids: tuple[int, ...]
    max_tokens: int  # of new tokens, the stop id included
    stop_ids: frozenset[int]
    temperature: float
    seed: int  # only the seed and the position in the completion decide how a token is drawn
    num_before: int = 0  # tokens of the same completion that requests before this one sampled
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0  # stop ids are banned before it; log-probs are computed with the same ban
    extends: str = ""
    at: int = 0
    entropies: Entropies = Entropies.ANY
    truncation: Truncation | None = None  # log-probs are of the truncated distribution
    probe: Probe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Optional abilities of an engine."""

    is_deterministic: bool  # a request's tokens do not depend on what else is in the batch
    can_fork: bool  # `extends` at any length, from several requests at once, without computing the prefix again
    entropies: Literal["full", "estimated"]  # of a request that needs them
    dtype: torch.dtype  # of its weights; published weights are cast to it first
    takes_adapters: bool = False  # it adds a published LoRA adapter to the weights that it was opened with


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """KV memory, in tokens."""

    total_tokens: int
    max_request_tokens: int  # the longest single conversation
    max_running: int  # conversations that can hold KV memory at once
    block_tokens: int | None = None  # tokens of a KV block, if the engine reports it


class InferenceEngine(Protocol):
    """Samples from the newest published weights. Many rollouts may call it at once."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def capacity(self) -> Capacity: ...

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next request samples from; -1 before the first `load_weights`."""

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one completion. Waits while KV memory is full.

        A request that is refused changes nothing: the conversation that it extends keeps its id. Any other error releases the
        request, and the conversation that it continued.

        Raises:
            EngineLost: the engine failed; a part of a completion is never returned.
            WeightsNotProven: the weights differ from the published ones.
            RequestTooLong: ids + max_tokens can never fit.
        """

    async def progress(self) -> int:
        """Return a count that grows while the engine computes, for whichever request. Raises `EngineLost`."""

    async def abort(self, request_id: str) -> None:
        """Stop a running request, whose `complete` raises `asyncio.CancelledError`, and release it. Unknown ids are ignored."""

    async def release(self, request_id: str) -> None:
        """Free the request's KV memory. Call it once per conversation, also after an error. Unknown ids are ignored."""

    async def load_weights(self, publication: Publication) -> None:
        """Replace the weights by those of `publication`, which are in the engine's dtype, and drop all KV caches.

        With `publication.keeps_requests`, requests may run: they pause meanwhile, their context is computed again, and their
        further tokens are sampled from the new weights.

        An engine in this process reads `publication.tensors`, one in another process `publication.files`. Raises
        `WeightsNotProven` if the checksum of what it holds then is not that of the publication.
        """

    async def close(self) -> None: ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An `InferenceEngine` that can leave its devices to others."""

    async def sleep(self) -> None:
        """Free the memory of weights and KV caches on the devices. `load_weights` takes it again.

        Raises:
            EngineLost: it could not.
            StropError: completions are running or waiting; nothing was changed.
        """


def in_parts(tensors: Iterable[NamedTensor], num_bytes: int) -> Iterator[list[NamedTensor]]:
    """Yield the tensors in lists, each of at least so many bytes, but for the last."""
    part: list[NamedTensor] = []
    num = 0
    for name, tensor in tensors:
        part.append((name, tensor))
        num += tensor.nbytes
        if num >= num_bytes:
            yield part
            part, num = [], 0
    if part:
        yield part


def weights_checksum(tensors: Iterable[NamedTensor]) -> str:
    """Return a digest of names, shapes, dtypes and bytes. The order of `tensors` does not matter."""
    return checksum_of(digest for _, digest in digests_of(tensors))


def checksum_of(digests: Iterable[bytes]) -> str:
    """Return `weights_checksum` of the tensors that have these digests, in any order."""
    total = hashlib.blake2b(digest_size=16)
    for each in sorted(digests):
        total.update(each)
    return total.hexdigest()


def digests_of(tensors: Iterable[NamedTensor]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and digest of each tensor, a few computed at once. Few tensors are held at the same time."""
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        pending: deque[tuple[str, Future[bytes]]] = deque()
        for name, tensor in tensors:
            pending.append((name, threads.submit(_digest, name, tensor)))
            if len(pending) > _NUM_THREADS:
                first, digest = pending.popleft()
                yield first, digest.result()
        for name, digest in pending:
            yield name, digest.result()


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    import torch

    flat = tensor.detach().contiguous().cpu()
    digest = hashlib.blake2b(f"{name} {tuple(flat.shape)} {flat.dtype}".encode(), digest_size=16)
    digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


LOWEST_TEMPERATURE = 0.01  # servers raise a lower one to it, or to their own; at 1e-38 a logit over it is no float32 any more
_ROUNDING_NATS = 1e-4  # by which the logarithm of a probability may come out above 0


def check_request(request: CompletionRequest, *, max_length: int) -> None:
    """Raises:
    RequestTooLong: ids + max_tokens exceed `max_length`, the longest conversation the engine can hold.
    UserError: a temperature that is not 0, and too low to be sampled at.
    StropError: a number out of its range.
    """
    num_tokens = len(request.ids) + request.max_tokens
    if num_tokens > max_length:
        raise RequestTooLong(
            f"request {request.id} may grow to {num_tokens} tokens ({len(request.ids)} ids + max_tokens {request.max_tokens}),"
            f" but a conversation of this engine holds {max_length}. Lower max_tokens, or raise engine.max_length."
        )
    wrong = {
        "ids is empty": not request.ids,
        f"max_tokens is {request.max_tokens}, below 1": request.max_tokens < 1,
        f"temperature is {request.temperature}, below 0": not request.temperature >= 0,
        f"min_tokens is {request.min_tokens}, above max_tokens {request.max_tokens}": request.min_tokens > request.max_tokens,
        f"at is {request.at}, outside its {len(request.ids)} ids": not 0 <= request.at <= len(request.ids),
        f"at is {request.at}, but extends is empty": bool(request.at) and not request.extends,
        "id is empty": not request.id,
    }
    for fault, is_so in wrong.items():
        if is_so:
            raise StropError(f"request {request.id}: {fault}.")
    if 0 < request.temperature < LOWEST_TEMPERATURE:
        raise UserError(
            f"request {request.id} has temperature {request.temperature}; engines sample at no less than"
            f" {LOWEST_TEMPERATURE}. Use 0, or at least {LOWEST_TEMPERATURE}."
        )


def check_vocabulary(request: CompletionRequest, vocab_size: int) -> None:
    """Raises `ModelError` when an id or a stop id is none of the model's."""
    smallest, largest = min((*request.ids, *request.stop_ids)), max((*request.ids, *request.stop_ids))
    if smallest < 0:
        raise ModelError(
            f"request {request.id} has the negative id {smallest}. Ids count from 0: what masks or pads a batch, as -100 does,"
            " is no token of a request."
        )
    if largest >= vocab_size:
        raise ModelError(
            f"request {request.id} has ids up to {largest}, but the model's vocabulary has {vocab_size}."
            " Tokenizer and model do not belong together."
        )


def check_prefix(request: CompletionRequest, held: Sequence[int]) -> None:
    """Raises `StropError` unless the first `at` ids of `request` are the first of `held`, the ids of what it extends."""
    if request.at > len(held):
        raise StropError(
            f"request {request.id} extends {request.extends} at {request.at}, but that has {len(held)} ids. `at` counts ids of"
            " the earlier request and its completion, not of what was observed after it."
        )
    if tuple(request.ids[: request.at]) != tuple(held[: request.at]):
        place = next(index for index in range(request.at) if request.ids[index] != held[index])
        raise StropError(
            f"request {request.id} extends {request.extends} at {request.at}, but their ids differ at position {place}:"
            f" {request.ids[place]} instead of {held[place]}. A conversation is append-only."
        )


def check_completion(
    request: CompletionRequest,
    completion: Completion,
    *,
    vocab_size: int | None,
    policy_version: int | None,
    newest: int | None = None,
) -> None:
    """Raises `EngineLost`, which names what is wrong, unless `completion` can be an answer to `request`.

    Args:
        vocab_size: of the model; None if it is not known.
        policy_version: of the weights that were published last; None to accept any.
        newest: of those that were published while it was sampled. Default: none were.
    """
    versions = None if policy_version is None else (policy_version, policy_version if newest is None else newest)
    if fault := next(_faults(request, completion, vocab_size, versions), None):
        raise EngineLost(f"the engine returned an invalid completion: the completion of request {request.id} {fault}.")


def _faults(
    request: CompletionRequest, completion: Completion, vocab_size: int | None, versions: tuple[int, int] | None
) -> Iterator[str]:
    ids, length = completion.ids, len(completion.ids)
    if not 0 < length <= request.max_tokens:
        yield f"has {length} ids, but max_tokens is {request.max_tokens}"
    for name, is_optional in (("logprobs", False), ("is_forced", False), ("entropies", True)):
        if len(figures := getattr(completion, name)) != length and (figures or not is_optional):
            yield f"has {length} ids and {len(figures)} {name}"
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        bounds = f"0..{vocab_size - 1}" if vocab_size is not None else "0.."
        yield f"has an id outside the vocabulary {bounds}: {min(ids) if min(ids) < 0 else max(ids)}"
    for position, logprob in enumerate(completion.logprobs):
        if not -math.inf < logprob <= _ROUNDING_NATS:
            yield f"has log-prob {logprob} at position {position}"
    for position, entropy in enumerate(completion.entropies):
        if not -_ROUNDING_NATS <= entropy < math.inf:
            yield f"has entropy {entropy} at position {position}"
    if early := [position for position, token in enumerate(ids[:-1]) if token in request.stop_ids]:
        yield f"goes on after stop id {ids[early[0]]} at position {early[0]}"
    has_stop_id = ids[-1] in request.stop_ids
    if completion.finish_reason is FinishReason.LENGTH and (has_stop_id or length < request.max_tokens):
        ending = f"stop id {ids[-1]}" if has_stop_id else f"{length} of {request.max_tokens} tokens"
        yield f"says that it was cut at max_tokens, but ends with {ending}"
    if completion.finish_reason is FinishReason.STOP:
        if not has_stop_id and not request.stop_strings:
            yield f"says that it was stopped, but ends with id {ids[-1]}, and the stop ids are {sorted(request.stop_ids)}"
        if length < request.min_tokens:
            yield f"was stopped after {length} tokens, but min_tokens is {request.min_tokens}"
    if not 0 <= completion.cached_tokens <= len(request.ids):
        yield f"says that {completion.cached_tokens} of {len(request.ids)} ids were cached"
    spans = completion.spans
    if (total := sum(num for _, num in spans)) != length or min(num for _, num in spans) < 1:
        yield f"has {length} ids, and spans of {total} tokens: {spans}"
    if any(later <= earlier for (earlier, _), (later, _) in itertools.pairwise(spans)):
        yield f"has spans whose policy versions do not rise: {spans}"
    if versions is not None and (spans[0][0] < versions[0] or spans[-1][0] > versions[1]):
        wrong = spans[0][0] if spans[0][0] < versions[0] else spans[-1][0]
        published = " to ".join(dict.fromkeys(map(str, versions)))
        yield f"was sampled from policy version {wrong}, but {published} was published"
