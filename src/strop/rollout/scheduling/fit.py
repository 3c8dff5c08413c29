"""Whether a rollout could ever be held by an engine; asked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from strop.errors import RequestTooLong, StropError
from strop.rollout.scheduling.events import EngineSpec, GroupOffered


def check_fits(event: GroupOffered, engines: Sequence[EngineSpec]) -> None:
    """Whether each rollout of a group could be held by one of the engines, were nothing else there.

    Raises:
        RequestTooLong: with the arithmetic.
        StropError: there is no engine.
    """
    if not engines:
        raise StropError("rollouts were offered, but there is no engine that takes them.")
    longest = max(event.rollouts, key=lambda offer: offer.max_tokens)
    total = event.prompt_tokens + longest.max_tokens
    if any(total <= spec.longest for spec in engines):
        return
    largest = max(engines, key=lambda spec: spec.longest)
    blocks, room = largest.blocks_for(total), largest.kv_blocks * largest.block_tokens
    limit = "" if largest.longest == room else f", and takes conversations of up to {largest.longest}"
    raise RequestTooLong(
        f"rollout {longest.key}: a prompt of {event.prompt_tokens} tokens and a response of up to {longest.max_tokens} are"
        f" {total} tokens, which take {blocks} KV blocks of {largest.block_tokens} tokens. The largest engine, {largest.name},"
        f" has {largest.kv_blocks} ({room} tokens){limit}. Lower sampling.max_tokens, leave out long prompts, or give an"
        " engine more KV memory."
    )
