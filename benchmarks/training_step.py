"""Measures a whole GRPO step of SmolLM2-135M, rollout and update, against TRL's GRPOTrainer: 8 prompts x 8 of 128 tokens.

Every completion has its full length on both sides, so that both do the same work. Both live in processes of their own and take
turns; TRL has an environment of its own (`make bench-training` makes it) and generates with `transformers`, its default.
Micro-batches are those that `training.py` found best. Prints a table and writes results/training_step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from strop.runs import write_json, write_text
from training import COMMAND, RESULTS, Measured, Worker

NUM_PROMPTS, GROUP_SIZE, COMPLETION_TOKENS, ROUNDS = 8, 8, 128, 2
SPEED_BAR = 3.0
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
    parser.add_argument("--our-tokens", type=int, default=2048, help="of a micro-batch of ours")
    parser.add_argument("--their-rows", type=int, default=4, help="of a micro-batch of TRL's")
    chosen = parser.parse_args()
    console = Console(record=True, width=110)
    workload = {"prompts": make_prompts(), "group_size": GROUP_SIZE, "completion_tokens": COMPLETION_TOKENS}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(workload, file)
        file.flush()
        given = [str(chosen.model.resolve()), file.name]
        theirs = [os.path.abspath(chosen.trl_python), "training_step_trl.py", *given, str(chosen.their_rows)]
        workers = [
            Worker("strop", [sys.executable, "training_step_strop.py", *given, str(chosen.our_tokens)]),
            Worker("TRL", [*theirs, "float32"]),
        ]
        for number in range(1 + ROUNDS):
            for worker in workers:
                seconds = worker.update()["update_s"]
                console.print(f"{'warm-up' if number == 0 else f'round {number}'}, {worker.setting}: {seconds:.1f} s")
        rollout_s = [one["rollout_s"] for one in workers[0].updates[1:]]
        measured = [worker.close() for worker in workers]
    return report(console, measured, rollout_s)


def report(console: Console, measured: list[Measured], rollout_s: list[float]) -> int:
    num_tokens = NUM_PROMPTS * GROUP_SIZE * COMPLETION_TOKENS
    table = Table("trainer", "s, median", "tokens/s", "peak above idle, MiB", title=f"A whole step of {num_tokens} tokens")
    for one in measured:
        table.add_row(one.setting, f"{one.median_s:.1f}", f"{num_tokens / one.median_s:.0f}", f"{one.peak_mib:.0f}")
    console.print(table)
    console.print(f"Of our steps, rollouts took {', '.join(f'{each:.1f}' for each in rollout_s)} s.")
    ours, theirs = measured
    speed = theirs.median_s / ours.median_s
    bars = {"whole_step_over_trl": {"value": speed, "bar": f">= {SPEED_BAR}", "holds": speed >= SPEED_BAR}}
    console.print(
        f"whole_step_over_trl: {speed:.2f}, must be >= {SPEED_BAR}: {'holds' if speed >= SPEED_BAR else 'does not hold'}"
    )
    figures = {
        "num_completion_tokens": num_tokens,
        "rollout_s": rollout_s,
        "settings": {one.setting: {"step_s": one.update_s, "peak_mib": one.peak_mib} for one in measured},
    }
    write_json(RESULTS / "training_step.json", {"command": COMMAND, "bars": bars, "figures": figures})
    write_text(RESULTS / "training_step.txt", console.export_text())
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
