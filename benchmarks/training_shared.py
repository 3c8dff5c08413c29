"""Measures an update on rows that share beginnings, against the same update on rows that share nothing.

    python benchmarks/training_shared.py --model models/smollm2-135m

Rows: a prompt of 1024 tokens with 16 completions of 256; a tree of 8 leaves as ARPO grows it, whose trunks are trained in each
leaf; and completions without a common beginning, which must cost no more than before. Each side is a process of its own that
lays rows end to end; they take turns, and ratios are medians over pairs of neighbours. Prints a table and writes
results/training_shared.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from result_file import write_result
from rich.console import Console
from rich.table import Table
from training_memory import Memory

from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Aggregation
from strop.training import OptimizerConfig, Trainer, TrainerConfig, batch
from strop.training.batch import Row, TokenBatch, pack_rows

COMMAND = "python benchmarks/training_shared.py --model models/smollm2-135m"
MAX_TOKENS = 6144
SLACK, EXTRA = 1.15, 1.02  # of time: on top of the share of distinct tokens, and where nothing is shared


def tokens(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(1000, 40000) for _ in range(length)]


def prompt_rows(chance: random.Random) -> list[tuple[int, list[int]]]:
    prompt = tokens(chance, 1024)
    return [(1024, prompt + tokens(chance, 256)) for _ in range(16)]


def tree_rows(chance: random.Random) -> list[tuple[int, list[int]]]:
    rows = [tokens(chance, 512)]
    for _ in range(3):  # every row of a level has two branches
        rows = [row + tokens(chance, 256) for row in rows for _ in range(2)]
    chance.shuffle(rows)
    return [(512, row) for row in rows]


def unlike_rows(chance: random.Random) -> list[tuple[int, list[int]]]:
    return [(128, tokens(chance, 128 + chance.randrange(64, 448))) for _ in range(16)]


SHAPES = {"prompt of 1 K, 16 x 256": prompt_rows, "ARPO tree, 8 leaves": tree_rows, "nothing shared": unlike_rows}


def make_batch(shape: str) -> TokenBatch:
    chance = random.Random(0)
    rows = [
        Row(
            ids=ids,
            loss_mask=[place >= num_prompt for place in range(len(ids))],
            advantages=torch.full((len(ids),), chance.gauss(0, 1)),
            sampled_logprobs=[0.0] * len(ids),
            group=0,
        )
        for num_prompt, ids in SHAPES[shape](chance)
    ]
    return pack_rows(rows, aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)


async def serve(model: Path, shape: str, precision: str, shares: bool) -> None:
    """An update for each line on standard input; prints one JSON object a line."""
    torch.set_num_threads(2)
    if not shares:
        batch.MIN_SHARED = 10**9
    memory = Memory()
    config = TrainerConfig(
        precision=precision,  # type: ignore[arg-type]
        max_tokens_per_microbatch=MAX_TOKENS,
        optimizer=OptimizerConfig(lr=1e-6, grad_clip=1e6),
    )
    trainer, method, rows = Trainer.from_directory(model, config), GRPO(), make_batch(shape)
    loop = asyncio.get_running_loop()
    print(json.dumps({"ready": True}), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        memory.begin()
        report = await trainer.update(rows, method.token_loss, method.token_statistics)
        assert report.cost is not None
        figures = {**memory.end(), "loss": report.loss, "grad_norm": report.grad_norm}
        print(
            json.dumps(
                {**figures, "tokens": report.cost.tokens, "row_tokens": report.cost.row_tokens, "flops": report.cost.flops}
            ),
            flush=True,
        )
    await trainer.close()


class Side:
    """A trainer in a process of its own."""

    def __init__(self, model: Path, shape: str, precision: str, *, shares: bool) -> None:
        command = [sys.executable, __file__, "--model", str(model), "--serve", shape, precision, str(int(shares))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def update(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("update\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit("the trainer ended; its message is above")


def compare(model: Path, shape: str, precision: str, rounds: int) -> dict[str, Any]:
    sides = {"shared": Side(model, shape, precision, shares=True), "unshared": Side(model, shape, precision, shares=False)}
    first = {name: side.update() for name, side in sides.items()}
    for side in sides.values():  # memory that a machine gives for the first time comes slowly
        side.update()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            times[name].append(sides[name].update()["update_s"])
    last = {name: side.update() for name, side in sides.items()}
    for side in sides.values():
        side.close()
    ratios = [shared / unshared for shared, unshared in zip(*times.values(), strict=True)]
    return {
        "distinct_share": first["shared"]["tokens"] / first["shared"]["row_tokens"],
        "operations_share": first["shared"]["flops"] / first["unshared"]["flops"],
        "time_ratio": statistics.median(ratios),
        "memory_ratio": last["shared"]["peak_above_idle_mib"] / last["unshared"]["peak_above_idle_mib"],
        "loss_difference": abs(first["shared"]["loss"] - first["unshared"]["loss"]),
        "grad_norm_ratio": first["shared"]["grad_norm"] / first["unshared"]["grad_norm"],
        "peak_mib": {name: figures["peak_above_idle_mib"] for name, figures in last.items()},
        "update_s": times,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the directory of SmolLM2-135M")
    parser.add_argument("--precision", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument(
        "--rounds", type=int, default=3, help="pairs of updates; of rows that share nothing three times as many"
    )
    parser.add_argument("--serve", nargs=3, metavar=("SHAPE", "PRECISION", "SHARES"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        shape, precision, shares = chosen.serve
        asyncio.run(serve(chosen.model, shape, precision, shares == "1"))
        return 0
    table = Table("rows", "precision", "distinct tokens", "time", "memory", title="An update, shared / unshared")
    figures, bars = {}, {}
    for precision in chosen.precision:
        for shape in SHAPES:
            found = compare(chosen.model, shape, precision, chosen.rounds * (3 if shape == "nothing shared" else 1))
            name = f"{shape}, {precision}"
            figures[name] = found
            share = found["distinct_share"]
            bar = SLACK * share if share < 1 else EXTRA
            bars[f"time: {name}"] = {"value": found["time_ratio"], "bar": f"<= {bar:.3f}", "holds": found["time_ratio"] <= bar}
            memory = found["memory_ratio"]
            bars[f"memory: {name}"] = {"value": memory, "bar": "<= 1.02", "holds": memory <= 1.02}
            table.add_row(shape, precision, f"{share:.3f}", f"{found['time_ratio']:.3f}", f"{memory:.2f}")
            operations, time = found["operations_share"], found["time_ratio"]
            print(f"{name}: operations {operations:.3f}, time {time:.3f}, bar {bar:.3f}; memory {memory:.2f}", flush=True)
    Console().print(table)
    command = f"{COMMAND} --precision {' '.join(chosen.precision)}"
    return write_result("training_shared", command=command, bars=bars, rows=figures)


if __name__ == "__main__":
    sys.exit(main())
