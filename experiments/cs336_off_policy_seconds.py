"""How long on-policy and off-policy steps take, and when each has half of its rollouts right (CS336 assignment 5, section 8).

    make experiments-cs336-off-policy-seconds

Runs recipes/sweeps/cs336-off-policy.toml one run at a time with one thread (a second call goes on where the first ended), and
writes of each arm and seed the seconds of its phases and the step and second by which half of the rollouts of three steps were
right, to results/cs336-off-policy-seconds.{json,txt}. Seconds are of this machine, so nothing else should run on it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cs336_sweeps import half_right

from strop.pipeline.sweep import run_sweep
from strop.pipeline.sweep_file import load_sweep
from strop.reports.sweep import SweepConsole
from strop.run_directory import RunDirectory, read_json, read_lines, write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
COMMAND = "make experiments-cs336-off-policy-seconds"
SWEEP = ROOT / "recipes" / "sweeps" / "cs336-off-policy.toml"
STAGE = "rl"
_PHASES = ("step", "rollout", "score", "update")


def of_run(run: RunDirectory) -> dict[str, Any]:
    """Accuracy after training, seconds by phase, and accuracy of rollouts by step and by seconds since the stage began."""
    lines = [line for line in read_lines(run.metrics) if line["stage"] == STAGE]
    curve: list[tuple[int, float, float]] = []
    elapsed = 0.0
    for line in lines:
        elapsed += line["time/step_s"]
        curve.append((line["step"], round(elapsed, 1), round(line["rollout/accuracy"], 4)))
    return {
        "accuracy": round(read_json(run.stage("after").evaluation)["accuracy"], 4),
        "seconds": {phase: round(sum(line.get(f"time/{phase}_s", 0.0) for line in lines), 1) for phase in _PHASES},
        "half_right_at": half_right(curve),
        "curve": curve,
    }


def summarise(runs: Mapping[str, Mapping[int, RunDirectory]], *, num_seeds: int) -> dict[str, Any]:
    """The figures of every arm by seed; `runs` holds the finished ones of `num_seeds` an arm."""
    arms = {arm: {str(seed): of_run(run) for seed, run in by_seed.items()} for arm, by_seed in runs.items()}
    num_missing = sum(num_seeds - len(by_seed) for by_seed in arms.values())
    bars = {"runs_missing": {"value": num_missing, "bar": "== 0", "holds": num_missing == 0}}
    return {"command": COMMAND, "bars": bars, "arms": arms}


def table(results: Mapping[str, Any]) -> str:
    """A row for each arm: means over seeds, and of each seed when half of its rollouts were right."""
    rows = [f"{'arm':<34} {'seconds':>7} {'rollouts':>8} {'scores':>6} {'updates':>7}  half right by seed"]
    for name, by_seed in results["arms"].items():
        means = {phase: sum(each["seconds"][phase] for each in by_seed.values()) / max(1, len(by_seed)) for phase in _PHASES}
        crossed = [each["half_right_at"] for each in by_seed.values()]
        told = ", ".join("never" if at is None else f"step {at[0]:.0f}, {at[1]:.0f} s" for at in crossed)
        rows.append(
            f"{name:<34} {means['step']:>7.1f} {means['rollout']:>8.1f} {means['score']:>6.1f} {means['update']:>7.1f}  {told}"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "cs336-off-policy-seconds", help="holds the runs")
    options = parser.parse_args(arguments)
    sweep = load_sweep(SWEEP)
    with SweepConsole() as progress:
        log = run_sweep(sweep, options.runs, jobs=1, progress=progress, command=COMMAND)
    found = {
        arm.name: {
            seed: run
            for seed in arm.recipes
            if (run := RunDirectory(options.runs / arm.run_name(seed))).stage("after").evaluation.exists()
        }
        for arm in sweep.arms
    }
    results = summarise(found, num_seeds=len(sweep.file.seeds))
    write_json(RESULTS / "cs336-off-policy-seconds.json", results)
    write_text(RESULTS / "cs336-off-policy-seconds.txt", table(results) + "\n")
    print(table(results))
    return 1 if log.failures else 0


if __name__ == "__main__":
    sys.exit(main())
