"""What a server said, held against what it was asked: garbage must not reach the trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.engine.protocol import CompletionRequest
from strop.engine.requests import check_completion
from strop.errors import EngineLost
from strop.types import Completion, FinishReason

_SHOWN = 300  # characters of an answer in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion as a server gave it, in our words. `label` names the weights that sampled it."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    is_stopped: bool  # by a stop id or string; False: by its length
    cached_tokens: int
    label: str


def completion_of(answer: Answer, request: CompletionRequest, *, server: str, vocab_size: int, version: int) -> Completion:
    """Raises `EngineLost`, naming the server, when the answer cannot be one to this request."""
    ids = tuple(answer.ids)
    is_stopped = answer.is_stopped or (bool(ids) and ids[-1] in request.stop_ids)
    completion = Completion(
        ids=ids,
        logprobs=tuple(answer.logprobs),
        entropies=(),
        is_forced=(False,) * len(ids),
        policy_version=version,
        finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        cached_tokens=answer.cached_tokens,
    )
    try:
        check_completion(request, completion, vocab_size=vocab_size, policy_version=version)
    except EngineLost as error:
        raise EngineLost(f"{server}: {error}") from error
    return replace(completion, logprobs=tuple(min(each, 0.0) for each in completion.logprobs))


def field(body: Any, *path: str | int, server: str) -> Any:
    """What lies at `path` in parsed JSON. Raises `EngineLost` when nothing does."""
    node = body
    for step in path:
        is_there = (isinstance(node, Mapping) and step in node) or (
            isinstance(node, list) and isinstance(step, int) and -len(node) <= step < len(node)
        )
        if not is_there:
            place = ".".join(map(str, path))
            raise EngineLost(f"{server} answered with garbage: nothing at {place} of {json.dumps(body)[:_SHOWN]}")
        node = node[step]
    return node
