"""`transformers`' generate() in benchmarks/engine.py: turn by turn, in padded batches, each waiting for its slowest tool."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from engine_workload import COMPLETION_TOKENS, NUM_TURNS, conversations, serve
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def play(model: torch.nn.Module, batch: int, seed: int) -> float:
    started = time.perf_counter()
    everybody = conversations(seed)
    for first in range(0, len(everybody), batch):
        part = everybody[first : first + batch]
        contexts = [list(each.prompt) for each in part]
        for turn in range(NUM_TURNS):
            longest = max(map(len, contexts))
            ids = torch.tensor([[0] * (longest - len(context)) + context for context in contexts])
            mask = torch.tensor([[0] * (longest - len(context)) + [1] * len(context) for context in contexts])
            completed = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=COMPLETION_TOKENS,
                max_new_tokens=COMPLETION_TOKENS,
                pad_token_id=0,
            )[:, longest:]
            assert completed.shape[1] == COMPLETION_TOKENS
            for context, completion in zip(contexts, completed.tolist(), strict=True):
                context += completion
            if turn < NUM_TURNS - 1:
                time.sleep(max(each.tool_s[turn] for each in part))
                for context, each in zip(contexts, part, strict=True):
                    context += each.observations[turn]
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    print(json.dumps({}), flush=True)
    played = 0

    def again() -> float:
        nonlocal played
        played += 1
        return play(model, arguments.batch, played)

    serve(again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
