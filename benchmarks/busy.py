"""How much RL steps of the demo slow down while other processes keep cores busy.

    make bench-busy

Trains the demo's first stages once, then runs its RL stage on two cores with 0, 1 and 2 other processes that each keep a core
busy. An arm is a spin count of libgomp: strop's own (`GOMP_SPINCOUNT` as `import strop` sets it), and libgomp's default without
neighbours, as a step takes minutes with them. Each round starts a run for each arm in turn and measures every number of its
neighbours, so that a slow phase of the machine touches all of them. A ratio compares values of one round; the median over the
rounds counts.
Writes results/busy.{json,txt}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import strop
from strop.run_directory import write_json, write_text

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "busy.json"
COMMAND = "make bench-busy"
LIBGOMP_DEFAULT = "300000"
NEIGHBOURS = (0, 1, 2)
BARS = {"quiet_over_libgomp_default": 0.97, "one_busy_over_quiet": 0.7, "two_busy_over_quiet": 0.4}
START_LIMIT_S = 600.0  # for the first step
MIN_STEPS = 3


def command(runs: Path, until: str) -> list[str]:
    overrides = {
        "stages.before.num_tasks": 4,
        "stages.rl.steps": 10_000,
        "stages.rl.trainer.optimizer.schedule": "constant",
        "stages.rl.checkpoint_every": 10_000,
    }
    words = [word for key, value in overrides.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return [sys.executable, "-m", "strop.cli", "train", "recipes/demo.toml", "--runs", str(runs), "--until", until, *words]


@contextmanager
def running(words: list[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and end it."""
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def busy_neighbours(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def steps_in(metrics: Path) -> list[dict[str, Any]]:
    """Return the whole lines of the RL stage."""
    if not metrics.exists():
        return []
    text = metrics.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [row for row in rows if row.get("stage") == "rl"]


def wait_for(metrics: Path, num_steps: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while len(steps_in(metrics)) < num_steps:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{metrics}: no step {num_steps} within {START_LIMIT_S:.0f} s (exit code {process.poll()})")
        time.sleep(0.2)


def tokens_per_s(metrics: Path, num_neighbours: int, window_s: float, process: subprocess.Popen[bytes]) -> float:
    """Return the rate of the whole steps in a window; 0.0 if there is none in ten windows.

    A window is extended until it has `MIN_STEPS` whole steps.
    """
    with busy_neighbours(num_neighbours):
        first = len(steps_in(metrics)) + 1  # the step that runs now began before the window
        started = time.monotonic()
        while (waited := time.monotonic() - started) < 10 * window_s and process.poll() is None:
            steps = steps_in(metrics)[first:]
            if waited >= window_s and len(steps) >= MIN_STEPS:
                break
            time.sleep(0.2)
        steps = steps_in(metrics)[first:]
    seconds = sum(step["time/step_s"] for step in steps)
    return sum(num_tokens_of(step) for step in steps) / seconds if seconds else 0.0


def num_tokens_of(step: Mapping[str, Any]) -> float:
    return float(step["rollout/tokens_per_s"] * step["time/rollout_s"])


def measure_round(prepared: Path, spin_count: str | None, neighbours: Sequence[int], window_s: float) -> dict[int, float]:
    """Return tokens per second by number of neighbours, of one run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    if spin_count is not None:
        environment["GOMP_SPINCOUNT"] = spin_count
    with tempfile.TemporaryDirectory(prefix="strop-busy-") as scratch:
        runs = Path(scratch, "runs")
        shutil.copytree(prepared, runs)
        metrics = runs / "demo" / "metrics.jsonl"
        with running(command(runs, "rl"), environment) as process:
            wait_for(metrics, 1, process)
            return {number: tokens_per_s(metrics, number, window_s, process) for number in neighbours}


def ratios_of(arms: Mapping[str, list[dict[int, float]]]) -> dict[str, float]:
    """Return the medians over rounds of ratios within a round; 0.0 where the slower side took no step."""
    own, other = arms["strop"], arms["libgomp"]

    def median(pairs: Iterator[tuple[float, float]]) -> float:
        return statistics.median(upper / lower if lower else 0.0 for upper, lower in pairs)

    return {
        "quiet_over_libgomp_default": median((mine[0], its[0]) for mine, its in zip(own, other, strict=True)),
        "one_busy_over_quiet": median((mine[1], mine[0]) for mine in own),
        "two_busy_over_quiet": median((mine[2], mine[0]) for mine in own),
    }


def table(figures: Mapping[str, Any]) -> str:
    lines = [f"{'tokens/s, median of rounds':<28}" + "".join(f"{number} busy".rjust(10) for number in NEIGHBOURS)]
    for name, rounds in figures["arms"].items():
        medians = (statistics.median(each[number] for each in rounds) for number in rounds[0])
        lines.append(f"{name:<28}" + "".join(f"{value:10.0f}" for value in medians))
    for name, bar in figures["bars"].items():
        verdict = "holds" if bar["holds"] else "DOES NOT HOLD"
        lines.append(f"{name:<28}{bar['value']:10.2f}, must be {bar['bar']}: {verdict}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window-s", type=float, default=30.0, help="seconds for each number of neighbours")
    parser.add_argument("--spin-count", help="GOMP_SPINCOUNT of the arm 'strop', to compare values; by default strop sets it")
    parser.add_argument("--shared-machine", action="store_true", help="record that others used the machine meanwhile")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # inherited by all that this starts
    given = {"strop": (arguments.spin_count, NEIGHBOURS), "libgomp": (LIBGOMP_DEFAULT, NEIGHBOURS[:1])}
    arms: dict[str, list[dict[int, float]]] = {name: [] for name in given}
    with tempfile.TemporaryDirectory(prefix="strop-busy-") as scratch:
        prepared = Path(scratch)
        subprocess.run(command(prepared, "before"), cwd=ROOT, check=True)
        for number in range(arguments.rounds):
            for name, (count, neighbours) in given.items():
                arms[name].append(measure_round(prepared, count, neighbours, arguments.window_s))
                print(f"round {number + 1}, {name}: {arms[name][-1]}", flush=True)
    bars = {
        name: {"value": round(value, 3), "bar": f">= {BARS[name]}", "holds": value >= BARS[name]}
        for name, value in ratios_of(arms).items()
    }
    figures: dict[str, Any] = {
        "command": COMMAND,
        "bars": bars,
        "is_shared_machine": arguments.shared_machine,
        "spin_count": arguments.spin_count or os.environ["GOMP_SPINCOUNT"],
        "arms": arms,
        "machine": {"processor": platform.processor(), "num_cores": os.cpu_count(), "strop": strop.__version__},
    }
    write_json(RESULTS, figures)
    text = table(figures)
    write_text(RESULTS.with_suffix(".txt"), text)
    print(text, end="")
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
