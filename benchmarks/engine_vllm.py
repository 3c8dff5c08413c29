"""vLLM's side of benchmarks/engine.py, in its own environment and its own process, without HTTP between."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from engine_workload import COMPLETION_TOKENS, MAX_LENGTH, NUM_CONVERSATIONS, Conversation, conversations, serve
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


async def converse(engine: Any, name: str, conversation: Conversation, has_seeds: bool, num_logprobs: int | None) -> None:
    context = list(conversation.prompt)
    for turn in range(len(conversation.observations) + 1):
        settings = SamplingParams(
            temperature=1.0,
            max_tokens=COMPLETION_TOKENS,
            min_tokens=COMPLETION_TOKENS,
            ignore_eos=True,
            seed=conversation.seed + turn if has_seeds else None,
            logprobs=num_logprobs,
            detokenize=False,
        )
        final = None
        async for output in engine.generate({"prompt_token_ids": context}, settings, request_id=f"{name}/{turn}"):
            final = output
        assert final is not None
        completion = list(final.outputs[0].token_ids)
        assert len(completion) == COMPLETION_TOKENS
        context += completion
        if turn < len(conversation.observations):
            await asyncio.sleep(conversation.tool_s[turn])
            context += conversation.observations[turn]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=NUM_CONVERSATIONS)
    parser.add_argument("--no-seeds", action="store_true", help="no seed of each request")
    parser.add_argument("--no-logprobs", action="store_true", help="no log-probs, which training needs")
    arguments = parser.parse_args()
    played = 0

    async def start() -> Any:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=arguments.model,
                dtype="bfloat16",
                max_model_len=MAX_LENGTH,
                max_num_seqs=arguments.rows,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
            )
        )

    with asyncio.Runner() as runner:
        engine = runner.run(start())
        print(json.dumps({}), flush=True)

        async def everybody() -> float:
            nonlocal played
            played += 1
            started = time.perf_counter()
            await asyncio.gather(
                *(
                    converse(engine, f"{played}/{number}", each, not arguments.no_seeds, None if arguments.no_logprobs else 0)
                    for number, each in enumerate(conversations(played))
                )
            )
            return time.perf_counter() - started

        serve(lambda: runner.run(everybody()))
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
