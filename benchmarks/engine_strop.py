"""The embedded engine's side of benchmarks/engine.py: plays the workload whenever it is told to."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from engine_workload import COMPLETION_TOKENS, MAX_LENGTH, AnonymousPeak, Conversation, conversations, serve

from strop.engine.config import EngineConfig
from strop.engine.model_directory import config_of
from strop.engine.protocol import CompletionRequest
from strop.engine.torch.cpu.resources import keep_little_freed_memory
from strop.engine.torch.engine import TorchEngine


async def converse(engine: TorchEngine, name: str, conversation: Conversation) -> None:
    context, last, at = conversation.prompt, "", 0
    for turn in range(len(conversation.observations) + 1):
        request = CompletionRequest(
            id=f"{name}/{turn}",
            ids=context,
            max_tokens=COMPLETION_TOKENS,
            stop_ids=frozenset(),
            temperature=1.0,
            seed=conversation.seed + turn,
            extends=last,
            at=at,
        )
        completion = await engine.complete(request)
        assert len(completion.ids) == len(completion.logprobs) == COMPLETION_TOKENS
        context += completion.ids
        last, at = request.id, len(context)
        if turn < len(conversation.observations):
            await asyncio.sleep(conversation.tool_s[turn])
            context += conversation.observations[turn]
    await engine.release(last)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--deterministic", type=int, default=1)
    arguments = parser.parse_args()
    config = EngineConfig(
        slots=arguments.slots,
        max_length=MAX_LENGTH,
        dtype="bfloat16",
        device="cpu",
        deterministic=bool(arguments.deterministic),
    )
    keep_little_freed_memory()
    config_of(arguments.model)  # transformers imports 80 MiB of modules when it first reads a config
    peak = AnonymousPeak()
    idle_kib = peak.kib
    engine = TorchEngine.from_directory(arguments.model, config)
    print(json.dumps({"idle_kib": idle_kib, "kv_tokens": engine.capacity.total_tokens}), flush=True)
    played = 0

    async def everybody() -> float:
        nonlocal played
        played += 1
        started = time.perf_counter()
        await asyncio.gather(
            *(converse(engine, f"{played}/{number}", each) for number, each in enumerate(conversations(played)))
        )
        return time.perf_counter() - started

    with asyncio.Runner() as runner:
        serve(lambda: runner.run(everybody()), peak)
        runner.run(engine.close())
    return 0


if __name__ == "__main__":
    sys.exit(main())
