"""Measures a whole GRPO step of SmolLM2-135M, rollout and update, against TRL's GRPOTrainer: 8 prompts x 8 of 128 tokens.

Every completion has its full length on both sides, so that both do the same work. Both live in processes of their own and take
turns; TRL has an environment of its own (`make bench-training` makes it) and generates with `transformers`, its default.
Each side's micro-batches are swept over one step; TRL's fastest goes on, or of those within 5% of it the one with the least
memory, and of ours likewise one that needs no more memory than TRL's. The bar of speed is about the median of the rounds'
ratios, which are all shown with what large products reached before each; memory is to be at most TRL's. With
`--precision float32` everything is in float32, as on processors without AVX-512; `make bench-training` limits the libraries to
AVX2 meanwhile. Prints a table and writes results/training_step.json or training_step_float32.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from result_file import write_result
from rich.console import Console
from rich.table import Table

from strop.run_directory import write_text
from training import COMMAND, NUM_WEIGHTS_BODY, NUM_WEIGHTS_HEAD, OPTIONS, RESULTS, TIE, Worker, matmul_flops

NUM_PROMPTS, GROUP_SIZE, COMPLETION_TOKENS, ROUNDS = 8, 8, 128, 3
# Tokens: one group, two, three; in float32 three take more memory than TRL.
OUR_MICRO_BATCHES = {"bfloat16": (2048, 2560, 4096), "float32": (1024, 2048, 2560)}
THEIR_MICRO_BATCHES = ((1, "again"), (4,), (8,))  # rows; activations computed again in the backward pass
SPEED_BARS = {"bfloat16": 4.0, "float32": 2.1}
_ITEMS = ("apples", "tickets", "books", "marbles", "stamps", "coins", "shells", "pencils")


def make_prompts() -> list[str]:
    """Word problems of some 60 to 90 tokens."""
    draw = random.Random(0)
    return [
        f"Question: {item.capitalize()} come in boxes of {draw.randint(3, 24)}. On Monday a shop sells {draw.randint(10, 99)}"
        f" boxes, on Tuesday {draw.randint(10, 99)} more than that, and on Wednesday half as many as on both days together."
        f" {draw.randint(2, 9)} boxes come back. How many {item} does the shop sell in the three days? Think step by step, and"
        " write the number at the end.\nAnswer:"
        for item in _ITEMS[:NUM_PROMPTS]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the directory of SmolLM2-135M")
    parser.add_argument("--trl-python", type=Path, required=True, help="the interpreter of an environment with trl")
    parser.add_argument("--precision", choices=list(SPEED_BARS), default="bfloat16", help="of products, on both sides")
    chosen = parser.parse_args()
    precision = chosen.precision
    console = Console(record=True, width=110)
    workload = {"prompts": make_prompts(), "group_size": GROUP_SIZE, "completion_tokens": COMPLETION_TOKENS}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(workload, file)
        file.flush()
        given = [str(chosen.model.resolve()), file.name]
        trl = [os.path.abspath(chosen.trl_python), "training_step_trl.py", *given]
        theirs = _best(
            console,
            {
                ", ".join([f"TRL, {rows} rows", *(OPTIONS[each] for each in again)]): [*trl, str(rows), precision, *again]
                for rows, *again in THEIR_MICRO_BATCHES
            },
        )
        ours = _best(
            console,
            {
                f"strop, {tokens} tokens": [sys.executable, "training_step_strop.py", *given, str(tokens), precision]
                for tokens in OUR_MICRO_BATCHES[precision]
            },
            limit_mib=_peak_mib(theirs),
        )
        for worker in (ours, theirs):  # the sweep left them idle for minutes, and their next step is slower
            worker.update()
        flops = []
        for number in range(1, ROUNDS + 1):
            flops.append(matmul_flops(getattr(torch, precision)))
            seconds = [worker.update()["update_s"] for worker in (ours, theirs)]
            console.print(
                f"round {number}: strop {seconds[0]:.1f} s, TRL {seconds[1]:.1f} s, ratio {seconds[1] / seconds[0]:.2f};"
                f" products at {flops[-1] / 1e9:.0f} GFLOP/s"
            )
        return _report(console, ours, theirs, flops, precision)


def _best(console: Console, settings: Mapping[str, list[str]], *, limit_mib: float = math.inf) -> Worker:
    """The worker whose second step is fastest, or of those within `TIE` of it the one with the least memory.

    The first step warms up. Workers end as soon as they cannot be the best, so that the memory of few is held.

    Args:
        limit_mib: of memory; of workers that need more the one with the least is taken if there are no others.
    """
    workers: list[Worker] = []
    for setting, command in settings.items():
        worker = Worker(setting, command)
        warm_up_s, step_s = (worker.update()["update_s"] for _ in range(2))
        console.print(f"sweep, {setting}: {step_s:.1f} s, the warm-up {warm_up_s:.1f} s, {_peak_mib(worker):.0f} MiB")
        workers.append(worker)
        small = [worker for worker in workers if _peak_mib(worker) <= limit_mib] or [min(workers, key=_peak_mib)]
        least_s = min(worker.updates[1]["update_s"] for worker in small)
        fast = [worker for worker in small if worker.updates[1]["update_s"] <= (1 + TIE) * least_s]
        for worker in workers:
            if worker not in fast:
                worker.close()
        workers = fast
    best = min(workers, key=_peak_mib)
    for worker in workers:
        if worker is not best:
            worker.close()
    return best


def _peak_mib(worker: Worker) -> float:
    return worker.updates[-1]["peak_above_idle_mib"]


def _report(console: Console, ours: Worker, theirs: Worker, flops: list[float], precision: str) -> int:
    rounds = [[one["update_s"] for one in worker.updates[-ROUNDS:]] for worker in (ours, theirs)]
    rollout_s = [one["rollout_s"] for one in ours.updates[-ROUNDS:]]
    ratios = [their_s / our_s for our_s, their_s in zip(*rounds, strict=True)]
    measured = [worker.close() for worker in (ours, theirs)]
    num_tokens = NUM_PROMPTS * GROUP_SIZE * COMPLETION_TOKENS
    title = f"A whole step of {num_tokens} tokens, {precision}"
    table = Table("trainer", "s, median", "tokens/s", "peak above idle, MiB", title=title)
    for one, seconds in zip(measured, map(statistics.median, rounds), strict=True):
        table.add_row(one.setting, f"{seconds:.1f}", f"{num_tokens / seconds:.0f}", f"{one.peak_mib:.0f}")
    console.print(table)
    console.print(f"Of our steps, rollouts took {', '.join(f'{each:.1f}' for each in rollout_s)} s.")
    # Sampling multiplies by every weight once, an update three times; prompts are left out, so the limit is a little low.
    limit_s = num_tokens * 8 * (NUM_WEIGHTS_BODY + NUM_WEIGHTS_HEAD) / statistics.median(flops)
    share = limit_s / statistics.median(rounds[0])
    console.print(f"Products alone would take {limit_s:.1f} s: our step is at {share:.2f} of what they allow.")
    speed = statistics.median(ratios)
    bar = SPEED_BARS[precision]
    holds = speed >= bar
    console.print(
        f"whole_step_over_trl: {speed:.2f} ({min(ratios):.2f} to {max(ratios):.2f} by round), must be >= {bar}:"
        f" {'holds' if holds else 'does not hold'}"
    )
    figures = {
        "num_completion_tokens": num_tokens,
        "rollout_s": rollout_s,
        "ratios": ratios,
        "matmul_gflops": [each / 1e9 for each in flops],
        "products_alone_s": limit_s,
        "share_of_matmul_limit": share,
        "settings": {
            one.setting: {"step_s": seconds, "peak_mib": one.peak_mib} for one, seconds in zip(measured, rounds, strict=True)
        },
    }
    memory = measured[0].peak_mib / measured[1].peak_mib
    bars = {
        "whole_step_over_trl": {"value": speed, "bar": f">= {bar}", "holds": holds},
        "memory_of_trl": {"value": memory, "bar": "<= 1", "holds": memory <= 1},
    }
    name = "training_step" if precision == "bfloat16" else f"training_step_{precision}"
    write_text(RESULTS / f"{name}.txt", console.export_text())
    return write_result(name, command=COMMAND, bars=bars, figures=figures)


if __name__ == "__main__":
    sys.exit(main())
