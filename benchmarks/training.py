"""Measures an update of 64 rollouts of mixed length with SmolLM2-135M, against TRL's GRPOTrainer at its best micro-batch.

Both trainers live in processes of their own and take turns. TRL has an environment of its own (`make bench-training` makes
it). Completion tokens are counted; precision is equal on both sides. Settings are swept on a quarter of the rollouts, each with
activations kept and computed again in the backward pass. The bars, of speed and memory together, are about our best that
computes activations again and keeps its moments in memory, as TRL does, against TRL's best: its fastest, and of those within
`TIE` of it the one with least memory. These take turns on all, with our fastest, and with our leanest, whose moments are in
files: the system may keep their pages, and gives them to whoever needs them, so that they are not counted. Of the sweep it is
told how the leanest of both sides compare. Prints tables and writes results/training.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from result_file import foreign_environment, write_result
from rich.console import Console
from rich.table import Table

from strop.run_directory import write_json, write_text

HERE = Path(__file__).parent
RESULTS = HERE / "results"
COMMAND = "make bench-training"
NUM_GROUPS, GROUP_SIZE, MAX_LENGTH = 8, 8, 512
NUM_SWEPT_GROUPS = 2
ROUNDS = 2
OUR_MICRO_BATCHES = (1024, 2048, 4096)  # tokens
OUR_LEAN = ((1024, "again"), (1536, "again"), (1536, "again", "disk"))  # tokens, activations computed again, moments in a file
THEIR_MICRO_BATCHES = (1, 2, 4)  # rows
THEIR_LEAN_MICRO_BATCHES = (1, 4)  # rows, activations computed again, as TRL does unless told otherwise
TIE = 0.05  # of the time; settings that are closer cannot be told apart by one update
OPTIONS = {"again": "activations again", "disk": "moments on disk"}
SPEED_BAR, MEMORY_BAR = 2.0, 0.5
NUM_WEIGHTS_BODY, NUM_WEIGHTS_HEAD = 106_203_456, 28_311_552  # of SmolLM2-135M; the head's are the embedding's too
STATE_MIB = 16 * (NUM_WEIGHTS_BODY + NUM_WEIGHTS_HEAD) / 2**20  # weights, gradients and two moments, in float32


Setting = tuple[Any, ...]
"""Side, size of a micro-batch, "again" where activations are computed again, "disk" where the moments lie in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of the updates of one setting, the first of which warmed it up."""

    setting: str
    update_s: list[float]
    peak_mib: float
    grad_norm: float  # of the first

    @property
    def median_s(self) -> float:
        return statistics.median(self.update_s)


class Worker:
    """A trainer in a process of its own, which makes an update when told."""

    def __init__(self, setting: str, command: list[str]) -> None:
        self.setting = setting
        self._command = command
        self.updates: list[dict[str, float]] = []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=HERE,
            env=None if command[0] == sys.executable else foreign_environment(),
        )
        self._read()

    def update(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("update\n")
        self._process.stdin.flush()
        self.updates.append(self._read())
        return self.updates[-1]

    def close(self) -> Measured:
        self._process.kill()
        self._process.wait()
        first, *others = self.updates
        return Measured(
            setting=self.setting,
            update_s=[one["update_s"] for one in others or [first]],
            peak_mib=self.updates[-1]["peak_above_idle_mib"],
            grad_norm=first["grad_norm"],
        )

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise SystemExit(f"{self.setting}: the trainer ended. Run it by hand to see why: {' '.join(self._command)}")


def make_rollouts() -> list[dict[str, Any]]:
    """Eight groups of eight, prompts of 40 to 120 tokens, log-normal completions, nothing longer than `MAX_LENGTH`."""
    draw = random.Random(0)
    rollouts = []
    for group in range(NUM_GROUPS):
        prompt = [draw.randrange(1000, 40000) for _ in range(draw.randint(40, 120))]
        for _ in range(GROUP_SIZE):
            length = min(MAX_LENGTH - len(prompt), max(16, int(draw.lognormvariate(5.2, 0.7))))
            completion = [draw.randrange(1000, 40000) for _ in range(length)]
            rollouts.append({"prompt": prompt, "completion": completion, "advantage": draw.gauss(0, 1), "group": group})
    return rollouts


def matmul_flops(dtype: torch.dtype = torch.bfloat16) -> float:
    """Floating-point operations a second of large products on two threads."""
    torch.set_num_threads(2)
    left, right = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    times = []
    for _ in range(12):
        started_at = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - started_at)
    return 2 * 2048**3 / statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the directory of SmolLM2-135M")
    parser.add_argument("--trl-python", type=Path, required=True, help="the interpreter of an environment with trl")
    chosen = parser.parse_args()
    console = Console(record=True, width=110)
    rollouts = make_rollouts()
    num_tokens = sum(len(rollout["completion"]) for rollout in rollouts)
    model = str(chosen.model.resolve())
    num_once = num_tokens + sum(len(rollout["prompt"]) for rollout in rollouts[::GROUP_SIZE])
    num_fed = num_tokens + sum(len(rollout["prompt"]) for rollout in rollouts)
    with tempfile.TemporaryDirectory() as directory:
        whole, part = Path(directory) / "whole.json", Path(directory) / "part.json"
        write_json(whole, rollouts)
        write_json(part, rollouts[: NUM_SWEPT_GROUPS * GROUP_SIZE])

        def ours(of: Path, tokens: int, *again: str) -> Worker:
            command = [sys.executable, "training_strop.py", model, str(of), str(tokens), *again]
            return Worker(", ".join([f"strop, {tokens} tokens", *(OPTIONS[option] for option in again)]), command)

        def theirs(of: Path, rows: int, *again: str, weights: str = "float32") -> Worker:
            command = [os.path.abspath(chosen.trl_python), "training_trl.py", model, str(of), str(rows), weights, *again]
            return Worker(", ".join([f"TRL, {rows} rows, {weights} weights", *(OPTIONS[option] for option in again)]), command)

        sweep = {("strop", size): _twice(console, ours(part, size)) for size in OUR_MICRO_BATCHES}
        sweep |= {("strop", *setting): _twice(console, ours(part, *setting)) for setting in OUR_LEAN}
        sweep |= {("trl", size): _twice(console, theirs(part, size)) for size in THEIR_MICRO_BATCHES}
        sweep |= {("trl", size, "again"): _twice(console, theirs(part, size, "again")) for size in THEIR_LEAN_MICRO_BATCHES}
        of_ours = {setting: each for setting, each in sweep.items() if setting[0] == "strop"}
        lean = min(of_ours, key=lambda setting: of_ours[setting].peak_mib)
        in_memory = _best({setting: each for setting, each in of_ours.items() if "again" in setting and "disk" not in setting})
        best = _best(of_ours)
        theirs_best = _best({setting: each for setting, each in sweep.items() if setting[0] == "trl"})
        low = _twice(console, theirs(part, *theirs_best[1:], weights="bfloat16"))
        others = dict.fromkeys([lean, best])  # one of them may be the one that the bars are about
        others.pop(in_memory, None)
        workers = [ours(whole, *in_memory[1:]), theirs(whole, *theirs_best[1:]), *(ours(whole, *each[1:]) for each in others)]
        flops = []
        for number in range(1 + ROUNDS):
            flops.append(matmul_flops())
            for worker in workers:
                console.print(f"update {number}, {worker.setting}: {worker.update()['update_s']:.1f} s")
        measured = [worker.close() for worker in workers]
    return _report(
        console,
        [*sweep.values(), low],
        measured,
        num_tokens=num_tokens,
        num_fed=num_fed,
        num_once=num_once,
        flops=statistics.median(flops),
    )


def _best(measured: Mapping[Setting, Measured]) -> Setting:
    """Which is fastest; of those within `TIE` of it the one with least memory."""
    least_s = min(each.median_s for each in measured.values())
    tied = [setting for setting, each in measured.items() if each.median_s <= (1 + TIE) * least_s]
    return min(tied, key=lambda setting: measured[setting].peak_mib)


def _twice(console: Console, worker: Worker) -> Measured:
    """The first update warms up: it makes moments, and compiles kernels for the lengths there are."""
    worker.update()
    console.print(f"sweep, {worker.setting}: {worker.update()['update_s']:.1f} s")
    return worker.close()


def _report(
    console: Console,
    sweep: list[Measured],
    measured: list[Measured],
    *,
    num_tokens: int,
    num_fed: int,
    num_once: int,
    flops: float,
) -> int:
    ours, theirs, *others = measured
    fastest = min([ours, *others], key=lambda one: one.median_s)
    # Forward, and twice that backward; the head on completion tokens alone, and once more in its backward pass.
    limit_s, once_s = ((6 * NUM_WEIGHTS_BODY * num + 8 * NUM_WEIGHTS_HEAD * num_tokens) / flops for num in (num_fed, num_once))
    num_swept = sum(len(rollout["completion"]) for rollout in make_rollouts()[: NUM_SWEPT_GROUPS * GROUP_SIZE])
    swept = Table("setting", "s", "tokens/s", "peak above idle, MiB", title=f"Sweep: {num_swept} completion tokens, once")
    for one in sweep:
        swept.add_row(one.setting, *_figures(one, num_swept))
    console.print(swept)
    title = f"An update of {num_tokens} completion tokens, median of {ROUNDS}"
    table = Table("setting", "s", "tokens/s", "peak above idle, MiB", title=title)
    for one in measured:
        table.add_row(one.setting, *_figures(one, num_tokens))
    table.add_row("products alone, each prompt 8 times", f"{limit_s:.1f}", f"{num_tokens / limit_s:.0f}", "")
    table.add_row("products alone, each prompt once, as ours", f"{once_s:.1f}", f"{num_tokens / once_s:.0f}", "")
    console.print(table)
    share, share_once = limit_s / fastest.median_s, once_s / fastest.median_s
    console.print(
        f"Products at {flops / 1e9:.0f} GFLOP/s: our fastest is at {share:.2f} of what they allow if each prompt is computed"
        f" for every completion, at {share_once:.2f} of what they allow if it is computed once."
    )
    console.print("bfloat16 weights were not measured of ours: strop trains float32 weights only.")
    leanest = [
        min((each for each in sweep if each.setting.startswith(side) and "bfloat16" not in each.setting), key=_peak)
        for side in ("strop", "TRL")
    ]
    lean_speed, lean_memory = leanest[1].median_s / leanest[0].median_s, leanest[0].peak_mib / leanest[1].peak_mib
    console.print(
        f"The leanest of both sides in the sweep ({leanest[0].setting}; {leanest[1].setting}): {lean_speed:.2f} times the"
        f" tokens a second in {lean_memory:.2f} of the memory. {STATE_MIB:.0f} MiB are weights, gradients and moments."
    )
    speed, memory = theirs.median_s / ours.median_s, ours.peak_mib / theirs.peak_mib
    gap = abs(ours.grad_norm - theirs.grad_norm) / theirs.grad_norm
    console.print(f"The first update's gradient norms differ by {gap:.2%}.")
    bars = {
        "tokens_per_s_over_trl": {"value": speed, "bar": f">= {SPEED_BAR}", "holds": speed >= SPEED_BAR},
        "peak_memory_over_trl": {"value": memory, "bar": f"<= {MEMORY_BAR}", "holds": memory <= MEMORY_BAR},
    }
    for name, bar in bars.items():
        console.print(f"{name}: {bar['value']:.2f}, must be {bar['bar']}: {'holds' if bar['holds'] else 'does not hold'}")
    figures = {
        "num_completion_tokens": num_tokens,
        "num_tokens": num_fed,
        "matmul_gflops": flops / 1e9,
        "share_of_matmul_limit": share,
        "share_of_matmul_limit_with_prompts_once": share_once,
        "state_mib": STATE_MIB,
        "leanest": {
            "settings": [each.setting for each in leanest],
            "tokens_per_s_over_trl": lean_speed,
            "peak_memory_over_trl": lean_memory,
        },
        "fastest_over_trl": theirs.median_s / fastest.median_s,
        "relative_grad_norm_difference": gap,
        "sweep": {"num_completion_tokens": num_swept, **{one.setting: _all(one, num_swept) for one in sweep}},
        "settings": {one.setting: _all(one, num_tokens) for one in measured},
    }
    write_text(RESULTS / "training.txt", console.export_text())
    return write_result("training", command=COMMAND, bars=bars, figures=figures)


def _peak(one: Measured) -> float:
    return one.peak_mib


def _all(one: Measured, num_tokens: int) -> dict[str, Any]:
    return {"update_s": one.update_s, "tokens_per_s": num_tokens / one.median_s, "peak_mib": one.peak_mib}


def _figures(one: Measured, num_tokens: int) -> tuple[str, str, str]:
    return f"{one.median_s:.1f}", f"{num_tokens / one.median_s:.0f}", f"{one.peak_mib:.0f}"


if __name__ == "__main__":
    sys.exit(main())
