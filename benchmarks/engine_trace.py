"""Measures decode steps and prefills of the embedded engine, by rows and KV tokens: what the simulator is fitted to.

Prints the fit and what it misses, and writes the file that `strop simulate --timing FILE` reads: `--out FILE`, or by default
src/strop/simulation/engine_trace.json, which it reads unasked. On a quiet machine:
`python benchmarks/engine_trace.py [MODEL] [--out FILE]`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strop.engine.config import EngineConfig
from strop.engine.protocol import CompletionRequest
from strop.engine.torch.engine import TorchEngine
from strop.run_directory import write_json
from strop.simulation.engines import TRACE_PATH, MeasuredTrace

SLOTS = 64
ROWS = (1, 8, 32, 64)
CONTEXTS = (64, 256, 640)
SHORT, LONG = 4, 24  # tokens of two completions, whose difference in time is that of the steps between them
ROUNDS = 2


async def batch_s(engine: TorchEngine, rows: int, prompt: tuple[int, ...], num_tokens: int, tag: str) -> float:
    """Seconds that `rows` completions of one prompt take together."""
    requests = [
        CompletionRequest(id=f"{tag}/{row}", ids=prompt, max_tokens=num_tokens, stop_ids=frozenset(), temperature=1.0, seed=row)
        for row in range(rows)
    ]
    started = time.perf_counter()
    await asyncio.gather(*(engine.complete(request) for request in requests))
    taken = time.perf_counter() - started
    for request in requests:
        await engine.release(request.id)
    return taken


async def measure(engine: TorchEngine) -> dict[str, list[dict[str, float]]]:
    decode, prefill = [], []
    for context in CONTEXTS:
        for rows in ROWS:
            steps = []
            for number in range(ROUNDS):
                prompt = tuple((7 * index + 31 * number + rows) % 1000 + 10 for index in range(context))
                first = await batch_s(engine, 1, prompt, 1, f"prefill/{context}/{rows}/{number}")
                prefill.append({"tokens": context, "seconds": first})
                short = await batch_s(engine, rows, prompt, SHORT, f"short/{context}/{rows}/{number}")
                long = await batch_s(engine, rows, prompt, LONG, f"long/{context}/{rows}/{number}")
                steps.append((long - short) / (LONG - SHORT))
            kv_tokens = rows * (context + (SHORT + LONG) / 2)
            decode.append({"rows": rows, "kv_tokens": kv_tokens, "seconds": min(steps)})
    return {"decode": decode, "prefill": prefill}


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--out", type=Path, default=TRACE_PATH, help="where to write; by default what strop simulate takes unasked"
    )
    arguments = parser.parse_args()
    if not arguments.out.parent.is_dir():
        parser.error(f"--out {arguments.out}: its directory is not there. Make it first.")
    config = EngineConfig(slots=SLOTS, max_length=max(CONTEXTS) + 2 * LONG, dtype=arguments.dtype, deterministic=False)
    engine = TorchEngine.from_directory(arguments.model, config)
    await batch_s(engine, SLOTS, (5, 6, 7), LONG, "warm-up")
    points = await measure(engine)
    await engine.close()
    content: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **points,
    }
    trace = MeasuredTrace.model_validate(content, strict=False)
    timing = trace.fit()
    console = Console(width=132)
    table = Table("rows", "KV tokens", "measured ms", "fitted ms", "residual", title=f"A decode step: {timing}")
    for point in trace.decode:
        fitted = timing.decode_s(1, int(point.rows), int(point.kv_tokens))
        milliseconds = (f"{1e3 * point.seconds:.1f}", f"{1e3 * fitted:.1f}", f"{fitted / point.seconds - 1:+.0%}")
        table.add_row(f"{point.rows:.0f}", f"{point.kv_tokens:.0f}", *milliseconds)
    console.print(table)
    write_json(arguments.out, content)
    console.print(f"strop simulate --timing {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
