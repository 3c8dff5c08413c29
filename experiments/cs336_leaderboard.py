"""The leaderboard of CS336 assignment 5 (section 9) on a tiny model: held-out accuracy in a budget of wall-clock time.

    make experiments-faithful ONLY=cs336-leaderboard

Runs recipes/cs336-leaderboard.toml with three seeds (a second call goes on where the first ended) and writes what is asked for
there: accuracy of the last policy, and held-out accuracy against seconds up to the budget, to
results/faithful-cs336-leaderboard.{json,txt} and results/cs336/leaderboard.svg. The bars, of the worst seed: no step past the
budget, and after it an interval above that before. Seconds are of this machine, so nothing else should run on it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from provenance import provenance

from strop.recipe.load import recipe_of
from strop.reports.log import read_run
from strop.reports.number_format import Unit
from strop.reports.plots import compare_plots, draw
from strop.run_directory import RunDirectory, read_json, write_json, write_text
from strop.stages.rl import RL

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "cs336-leaderboard.toml"
COMMAND = "make experiments-faithful ONLY=cs336-leaderboard"
STAGE = "rl"
SEEDS = (0, 1, 2)
_CURVE = {"seconds": "time/elapsed_s", "accuracy": "validation/accuracy"}
_CURVE |= {"low": "validation/accuracy_low", "high": "validation/accuracy_high"}


def summarise(runs: Mapping[int, RunDirectory]) -> dict[str, Any]:
    """The figures of finished runs, by seed."""
    seeds = {str(seed): summarise_seed(run) for seed, run in runs.items()}
    return {
        "command": COMMAND,
        "bars": bars(seeds.values()),
        "provenance": provenance(runs.values(), ROOT),
        "budget_s": next(iter(seeds.values()))["budget_s"],
        "seeds": seeds,
    }


def summarise_seed(run: RunDirectory) -> dict[str, Any]:
    recipe, log = recipe_of(run), read_run(run)
    stage = recipe.stages[STAGE]
    assert isinstance(stage, RL)
    steps = next(each for each in log.stages if each.name == STAGE).steps
    evaluations = {name: read_json(run.stage(name).evaluation) for name in ("before", "after")}
    held_out = {
        name: {key: found[key] for key in ("num_tasks", "k", "accuracy", "accuracy_low", "accuracy_high")}
        for name, found in evaluations.items()
    }
    return {
        "budget_s": stage.config.budget_s,
        "steps": len(steps),
        "left_s": steps[max(steps)].get("budget/left_s"),
        "curve": [
            {"step": step} | {name: round(metrics[key], 4) for name, key in _CURVE.items()}
            for step, metrics in steps.items()
            if "validation/accuracy" in metrics
        ],
        "held_out": held_out,
    }


def bars(seeds: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    seeds = list(seeds)
    left_s = min(each["left_s"] for each in seeds)
    gained = min(each["held_out"]["after"]["accuracy_low"] - each["held_out"]["before"]["accuracy_high"] for each in seeds)
    return {
        "left_s": {"value": left_s, "bar": ">= 0", "holds": left_s >= 0},
        "between_intervals": {"value": gained, "bar": "> 0", "holds": gained > 0},
    }


def table(results: Mapping[str, Any]) -> str:
    """What a reader wants to see first."""
    rows = []
    for seed, found in results["seeds"].items():
        before, last = found["held_out"]["before"], found["held_out"]["after"]
        rows += [f"seed {seed}", f"{'step':>6} {'seconds':>8} {'accuracy':>9}  95% interval"]
        rows += [
            f"{point['step']:>6} {point['seconds']:>8.1f} {point['accuracy']:>9.3f}  {point['low']:.3f} to {point['high']:.3f}"
            for point in found["curve"]
        ]
        rows.append(
            f"{found['steps']} steps in a budget of {results['budget_s']:g} s, {found['left_s']:.1f} s left. All"
            f" {last['num_tasks']} held-out problems: {before['accuracy']:.3f} before,"
            f" {last['accuracy']:.3f} [{last['accuracy_low']:.3f}, {last['accuracy_high']:.3f}] after."
        )
    rows += [
        f"{name}: {bar['value']:.3g}, must be {bar['bar']}: {'holds' if bar['holds'] else 'DOES NOT HOLD'}"
        for name, bar in results["bars"].items()
    ]
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="holds the runs' directories")
    parser.add_argument("--results", type=Path, default=ROOT / "experiments" / "results")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value of the recipe")
    options = parser.parse_args(arguments)
    runs = {seed: RunDirectory(options.runs / f"{RECIPE.stem}-seed-{seed}") for seed in SEEDS}
    for seed, run in runs.items():
        words = [sys.executable, "-m", "strop.cli", "train", str(RECIPE), "--runs", str(options.runs), "--name", run.path.name]
        words += [word for setting in [f"seed={seed}", *options.set] for word in ("--set", setting)]
        if status := subprocess.run(words, check=False).returncode:
            return status
    results = summarise(runs)
    write_json(options.results / f"faithful-{RECIPE.stem}.json", results)
    write_text(options.results / f"faithful-{RECIPE.stem}.txt", table(results) + "\n")
    title = "held-out accuracy"
    curves = {
        f"seed {seed}": [[(point["seconds"], point["accuracy"]) for point in each["curve"]]]
        for seed, each in results["seeds"].items()
    }
    (plot,) = compare_plots({title: curves}, units={title: Unit.PERCENT}, x_label="seconds").values()
    write_text(options.results / "cs336" / "leaderboard.svg", str(draw(plot, is_standalone=True)) + "\n")
    print(table(results))
    return 0 if all(bar["holds"] for bar in results["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
