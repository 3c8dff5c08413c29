"""How much of what branches share with their parents comes from KV memory, with room for all rollouts and without.

    make bench-branching

Trains recipes/two-tools.toml up to four RL steps of ARPO, with 64 slots and with 16: a step has 64 rollouts from prompts and up
to 64 branches. Writes results/branching.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_file import write_result

ROOT = Path(__file__).parents[1]
COMMAND = "make bench-branching"
STEPS = 4
BARS = {64: 0.95, 16: 0.80}  # least share of the last step, by slots
METRICS = {
    "branches per task": "branching/branches_per_task",
    "that waited": "scheduler/branches_queued",
    "share from the cache": "scheduler/branch_cached_token_share",
    "tokens/s": "rollout/tokens_per_s",
}


def steps_with(slots: int, runs: Path) -> list[dict[str, float]]:
    """The metrics of each RL step."""
    settings = {"engine.slots": slots, "stages.rl.steps": STEPS, "stages.before.num_tasks": 2, "stages.after.num_tasks": 2}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [
        sys.executable,
        "-m",
        "strop.cli",
        "train",
        "recipes/two-tools.toml",
        "--runs",
        str(runs),
        "--until",
        "rl",
        *words,
    ]
    subprocess.run([*command, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (runs / "two-tools" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    return [{name: line[key] for name, key in METRICS.items()} for line in logged if METRICS["tokens/s"] in line]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    figures: dict[str, Any] = {}
    for slots in BARS:
        with tempfile.TemporaryDirectory() as runs:
            figures[f"{slots} slots"] = steps_with(slots, Path(runs))
    shares = {f"{slots} slots": figures[f"{slots} slots"][-1]["share from the cache"] for slots in BARS}
    bars = {
        f"share_{slots}_slots": {"value": shares[f"{slots} slots"], "bar": bar, "holds": shares[f"{slots} slots"] >= bar}
        for slots, bar in BARS.items()
    }
    print("slots", "step", *METRICS, sep="\t")
    for name, steps in figures.items():
        for number, step in enumerate(steps, start=1):
            print(name, number, *(f"{step[each]:.4g}" for each in METRICS), sep="\t")
    return write_result("branching", command=COMMAND, figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(main())
