"""How long an RL step takes with rollouts sampled ahead (`async_rollouts`) and without, where tool calls wait and where not.

    make bench-async

Runs the demo's RL stage with 8 tasks a step, each arm from one cold start in a process of its own. "synchronous" samples and
trains in one process, "partial" has `max_staleness = 2` and lets rollouts go on over publications. The tool runs its program in
the sandbox; in the waiting case each call then waits for a log-normal time with a median of 1 s. A ratio compares arms of one
round; the median of the rounds counts. Times are of the steps in which as many batches are in flight as may be. Writes
results/async_rollouts.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from pydantic import Field
from result_file import write_result

from strop.config import load_toml, validate
from strop.pipeline.run import train
from strop.recipe.recipe import Recipe, resolve
from strop.reports.trackers import Progress
from strop.sandbox.protocol import CodeRunner
from strop.tools.limits import WrappedTool
from strop.tools.protocol import Tool, ToolResult
from strop.tools.python import Python

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "demo.toml"
COMMAND = "make bench-async"
STEPS, TASKS_PER_STEP, NUM_ROUNDS, STALENESS, SIGMA = 10, 8, 5, 2, 0.75
ARMS: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {},
    "partial": {"max_staleness": STALENESS, "partial": True},
}
MEDIAN_S = {"waiting": 1.0, "not waiting": 0.0}  # of a call
METRICS = (
    *("time/rollout_s", "time/score_s", "time/update_s", "time/publish_s", "time/ahead_wait_s", "scheduler/busy_share"),
    *("rollout/staleness_mean", "rollout/turns_mean", "rollout/length_tokens_mean", "rollout/accuracy"),
)


class WaitingPython(Python):
    """The Python tool, whose calls then wait."""

    class Config(Python.Config):
        """How long a call waits."""

        median_s: float = Field(ge=0, description="Median seconds of a wait.")

    config: Config

    async def open(self, stack: AsyncExitStack, runner: CodeRunner, *, key: str) -> list[Tool]:
        return [Waiting(tool, self.config.median_s) for tool in await super().open(stack, runner, key=key)]


class Waiting(WrappedTool):
    """Another tool, whose calls then wait."""

    def __init__(self, tool: Tool, median_s: float) -> None:
        super().__init__(tool)
        self._median_s = median_s

    def around(self, tool: Tool) -> Tool:
        return Waiting(tool, self._median_s)

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        result = await super().call(arguments, seed=seed)
        if self._median_s:
            await asyncio.sleep(random.Random(seed).lognormvariate(math.log(self._median_s), SIGMA))
        return result


def train_arm(arm: str, median_s: float, steps: int, model: Path, directory: Path) -> None:
    """Train the RL stage from the weights in `model`."""
    keys: dict[str, Any] = {
        "tools.python.kind": "async_rollouts:WaitingPython",
        "tools.python.median_s": median_s,
        "engine.own_process": bool(ARMS[arm]),
        "engine.slots": TASKS_PER_STEP * 16,  # all rollouts of a step; each publication computes as many contexts again
        "engine.max_length": 256,
        "sampling.max_tokens": 96,
        "stages.rl.steps": steps,
        "stages.rl.tasks_per_step": TASKS_PER_STEP,
        "stages.rl.trainer.optimizer.schedule": "constant",
        "stages.rl.checkpoint_every": steps,
    }
    keys |= {f"stages.rl.async_rollouts.{key}": value for key, value in ARMS[arm].items()}
    tree = resolve(load_toml(RECIPE, [f"{key}={json.dumps(value)}" for key, value in keys.items()]))
    stages = {"start": {"kind": "model", "path": str(model)}, "rl": {**tree["stages"]["rl"], "init": "start"}}
    recipe = validate(Recipe, {**tree, "name": directory.name, "stages": stages}, place=COMMAND)
    asyncio.run(train(recipe, directory, progress=Progress(), command=COMMAND))


def steps_in(metrics: Path) -> list[dict[str, Any]]:
    """The whole lines of the RL stage."""
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in found if line["stage"] == "rl"]


def processor_s(process: psutil.Process) -> float:
    """Processor time of a process, of those that it started, and of those that these have waited for."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(each.cpu_times()[:4])
    return total


def measure(arm: str, case: str, steps: int, model: Path) -> dict[str, float]:
    """Means over the steps of a run during which all batches are in flight."""
    with tempfile.TemporaryDirectory(prefix="strop-async-") as scratch:
        directory, used = Path(scratch, "run"), []
        process = multiprocessing.get_context("spawn").Process(
            target=train_arm, args=(arm, MEDIAN_S[case], steps, model, directory)
        )
        process.start()
        for num_steps in (STALENESS + 1, steps - STALENESS):
            while process.is_alive() and len(steps_in(directory / "metrics.jsonl")) < num_steps:
                time.sleep(0.1)
            used.append(processor_s(psutil.Process(process.pid)))
        process.join()
        lines = steps_in(directory / "metrics.jsonl")
    window = lines[STALENESS + 1 : -STALENESS]
    elapsed_s = window[-1]["time/elapsed_s"] - lines[STALENESS]["time/elapsed_s"]
    figures = {"step_s": elapsed_s / len(window), "processor_s": (used[1] - used[0]) / len(window)}
    figures |= {name.partition("/")[2]: mean(line.get(name, 0.0) for line in window) for name in METRICS}
    figures = {name: round(value, 3) for name, value in figures.items()}
    print(f"{case}, {arm}: {figures}", flush=True)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--model", type=Path, help="the cold start; by default it is trained first")
    arguments = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="strop-async-") as scratch:
        model = arguments.model
        if model is None:
            words = ["train", str(RECIPE), "--runs", scratch, "--until", "sft"]
            subprocess.run([sys.executable, "-m", "strop.cli", *words], check=True)
            model = Path(scratch, "demo", "stages", "sft", "model")
        for _ in range(arguments.rounds):
            runs = {f"{case}, {arm}": measure(arm, case, arguments.steps, model) for case in MEDIAN_S for arm in ARMS}
            rounds.append({"load_average": round(os.getloadavg()[2], 2), "runs": runs})
            status = write(rounds, arguments.steps)
    return status


def write(rounds: Sequence[Mapping[str, Any]], steps: int) -> int:
    """Write the result of these rounds, and return the exit status."""

    def ratio(name: str, to: str, key: str = "step_s") -> float:
        return round(median(each["runs"][name][key] / each["runs"][to][key] for each in rounds), 3)

    waiting, quiet = "waiting, synchronous", "not waiting, synchronous"
    ratios = {
        "share of a synchronous step that waits": round(1 - ratio(quiet, waiting), 3),
        "waiting: synchronous / partial": ratio(waiting, "waiting, partial"),
        "not waiting: partial / synchronous": ratio("not waiting, partial", quiet),
        "not waiting: partial / synchronous, processor time": ratio("not waiting, partial", quiet, "processor_s"),
    }
    bars = {
        name: {"value": value, "bar": f"{sign} {bar}", "holds": value >= bar if sign == ">=" else value <= bar}
        for (name, value), (sign, bar) in zip(ratios.items(), ((">=", 0.5), (">=", 1.6), ("<=", 1.05)), strict=False)
    }
    for name, value in ratios.items():
        print(f"{name}: {value}", flush=True)
    keys = {"steps": steps, "tasks_per_step": TASKS_PER_STEP, "max_staleness": STALENESS, "sigma": SIGMA}
    return write_result("async_rollouts", command=COMMAND, bars=bars, keys=keys, ratios=ratios, rounds=rounds)


if __name__ == "__main__":
    raise SystemExit(main())
