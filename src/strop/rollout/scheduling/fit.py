"""Whether engines could ever do what is asked of their memory; asked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from strop.errors import ConfigError, RequestTooLong, StropError
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


def check_can_oversubscribe(spec: EngineSpec, times: float) -> None:
    """Whether reserving the memory of an engine `times` over could start even one more rollout.

    Raises:
        ConfigError: it holds as many of the longest conversations as it holds conversations, as one with slots always does.
    """
    if times > 1 and spec.kv_blocks >= spec.max_conversations * spec.blocks_for(spec.longest):
        raise ConfigError(
            f"scheduler.oversubscription = {times:g} can start nothing more on engine {spec.name}: it takes"
            f" {spec.max_conversations} conversations at once, and holds as many of the longest, {spec.longest} tokens."
            " Leave it at 1; or use an engine with paged memory which takes more conversations than it could hold at their"
            " longest: a server with less memory (engine.kv_mib, for vllm) or more engine.slots."
        )
