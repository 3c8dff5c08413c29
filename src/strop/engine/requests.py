"""What can be told wrong of a request before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from strop.engine.protocol import CompletionRequest
from strop.errors import ModelError, RequestTooLong, StropError


def check_request(request: CompletionRequest, *, max_length: int) -> None:
    """Raises:
    RequestTooLong: ids + max_tokens exceed `max_length`, the longest conversation the engine can hold.
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


def check_vocabulary(request: CompletionRequest, vocab_size: int) -> None:
    """Raises `ModelError` when an id or a stop id is none of the model's."""
    largest = max((*request.ids, *request.stop_ids))
    if largest >= vocab_size or min((*request.ids, *request.stop_ids)) < 0:
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
