"""What a server said, held against what it was asked: garbage must not reach the trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from strop.engine.protocol import CompletionRequest
from strop.engine.requests import check_completion
from strop.errors import EngineLost
from strop.types import Completion, FinishReason

_SHOWN = 300  # characters of an answer in an error
SaidT = TypeVar("SaidT", bound="Said")


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


class Said(BaseModel):
    """Part of an answer, as far as it concerns us; a server may say more."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


def read(kind: type[SaidT], body: Any, *, server: str) -> SaidT:
    """`body` is parsed JSON. Raises `EngineLost`, which names the place, when it is not what `kind` says."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the top"
        shown = json.dumps(body)[:_SHOWN]
        raise EngineLost(f"{server} answered with garbage: {first['msg']}, at {place} of {shown}") from error
