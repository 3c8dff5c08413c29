"""Bytes of a token of rollouts: on disk before and after a step is settled, and in memory as objects and as they are kept.

    make bench-rollouts

Takes the short rollouts of recipes/demo.toml's evaluation after SFT, and those of its model with random weights, which seldom
stops: 2000 tokens, as in the papers. Writes results/rollouts.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_file import write_result

from strop.run_directory import RunDirectory, packed
from strop.stages.loop.ledger import read_rollouts
from strop.types import ScoredTrajectory

ROOT = Path(__file__).parents[1]
COMMAND = "make bench-rollouts"
LONG = {
    "stages.before.init": "base",
    "stages.before.num_tasks": 8,
    "stages.before.sampling.max_tokens": 2000,
    "stages.base.tiny.max_length": 4096,
    "engine.max_length": 4096,
}
RUNS: dict[str, dict[str, object]] = {"short": {}, "long": LONG}


def evaluate(settings: dict[str, object], runs: Path) -> Path:
    """Where the rollouts of the evaluation are."""
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "strop.cli", "train", "recipes/demo.toml", "--only", "before", "--runs", str(runs), *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return RunDirectory(runs / "demo").stage("before").rollouts(0)


def as_tuples(scored: ScoredTrajectory) -> ScoredTrajectory:
    """The same with a tuple of new objects for each sequence."""
    for turn in scored.trajectory.turns:
        object.__setattr__(turn, "observation_ids", tuple(json.loads(json.dumps(turn.observation_ids))))
        for name in ("ids", "logprobs", "entropies"):
            object.__setattr__(turn.completion, name, tuple(json.loads(json.dumps([*getattr(turn.completion, name)]))))
    return scored


def memory_of(make: Callable[[], Any]) -> int:
    tracemalloc.start()
    made = make()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return taken


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    figures, bars = {}, {}
    print("", "tokens", "", "before", "after", "ratio", sep="\t")
    for name, settings in RUNS.items():
        with tempfile.TemporaryDirectory() as runs:
            path = evaluate(settings, Path(runs))
            rollouts = read_rollouts(path)
            tokens = sum(each.trajectory.num_response_tokens for each in rollouts)
            content = packed(path).read_bytes()
            sizes = {
                "disk": (len(gzip.decompress(content)), len(content)),
                "memory": (
                    memory_of(lambda path=path: [as_tuples(each) for each in read_rollouts(path)]),
                    memory_of(lambda path=path: read_rollouts(path)),
                ),
            }
        figures[name] = {"tokens_of_a_rollout": tokens / len(rollouts)}
        for what, (before, after) in sizes.items():
            figures[name] |= {f"{what}_before": before / tokens, f"{what}_after": after / tokens}
            if name == "long":  # of short ones the objects take most of the memory, whatever is in them
                bars[what] = {"value": after / before, "bar": 0.5, "holds": after <= before / 2}
            shown = (f"{before / tokens:.1f}", f"{after / tokens:.1f}", f"{after / before:.2f}")
            print(name, f"{tokens / len(rollouts):.0f}", what, *shown, sep="\t")
    return write_result("rollouts", command=COMMAND, bytes_per_token=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(main())
