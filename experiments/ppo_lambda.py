"""DeepSeek-R1 (arXiv 2501.12948), appendix A.3, on a tiny model: PPO with lambda 0.95 and 1.0 against GRPO.

    make experiments-ppo-lambda

Runs recipes/sweeps/ppo-lambda.toml as `strop sweep` does (a second call goes on where the first ended), and writes accuracy by
arm and seed, how far arms lie from lambda 0.95, and their curves: results/ppo-lambda.{json,txt}, results/ppo-lambda/*.svg.
What was expected stands in hypotheses/ppo-lambda.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.evaluation.statistics import mean_of_seeds
from strop.pipeline.sweep import run_sweep
from strop.pipeline.sweep_file import load_sweep
from strop.reports.number_format import Unit
from strop.reports.plots import compare_plots, draw
from strop.reports.sweep import SweepConsole
from strop.run_directory import read_json, write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
SWEEP = ROOT / "recipes" / "sweeps" / "ppo-lambda.toml"
COMMAND = "make experiments-ppo-lambda"
CURVES: Mapping[str, Unit] = {  # metric -> what it counts
    "rollout/accuracy": Unit.PERCENT,
    "rollout/length_tokens_mean": Unit.PLAIN,
    "policy/entropy_nats": Unit.PLAIN,
    "critic/explained_variance": Unit.PLAIN,
}
_DIGITS = 4


def summarise(sweep: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison, from the `sweep.json` of a sweep; arms are compared with its first, seed by seed.

    A run without a result (it did not end, or its evaluation is stale) is in no figure, and neither is what it would be
    compared with.
    """
    runs = {
        arm: {run["seed"]: run for run in sweep["runs"] if run["arm"] == arm and run["result"] is not None}
        for arm in sweep["arms"]
    }
    first = next(iter(runs.values()))
    arms: dict[str, Any] = {}
    for arm, by_seed in runs.items():
        common = [seed for seed in by_seed if seed in first]
        arms[arm] = {
            "changes": sweep["arms"][arm]["changes"],
            "results": {str(seed): round(run["result"], _DIGITS) for seed, run in by_seed.items()},
            "time_s": {str(seed): round(run["time_s"], 1) for seed, run in by_seed.items()},
        }
        if by_seed is not first:
            arms[arm]["above_the_first"] = _interval([by_seed[seed]["result"] - first[seed]["result"] for seed in common])
    curves = {
        metric: {
            arm: {seed: [[step, round(value, _DIGITS)] for step, _, value in curve] for seed, curve in of_arm.items()}
            for arm, of_arm in sweep["curves"][metric].items()
        }
        for metric in CURVES
        if metric in sweep["curves"]
    }
    return {"command": COMMAND, "metric": sweep["result"], "bars": _bars(arms), "arms": arms, "curves": curves}


def _bars(arms: Mapping[str, Any]) -> dict[str, Any]:
    """What the hypothesis expects: lambda 1.0 above 0.95 by the whole interval."""
    above = arms["ppo_lambda_1"]["above_the_first"]
    if "interval" not in above:
        return {}
    low = above["interval"][0]
    return {"ppo_lambda_1_above_0_95_low": {"value": low, "bar": "> 0", "holds": low > 0}}


def _interval(differences: Sequence[float]) -> dict[str, Any]:
    """Their mean, with Student's interval where there are several."""
    found: dict[str, Any] = {"by_seed": [round(each, _DIGITS) for each in differences]}
    if len(differences) > 1:
        over_seeds = mean_of_seeds(differences)
        found |= {
            "mean": round(over_seeds.mean, _DIGITS),
            "interval": [round(over_seeds.low, _DIGITS), round(over_seeds.high, _DIGITS)],
        }
    return found


def table(results: Mapping[str, Any]) -> str:
    """One row an arm."""
    rows = [f"{results['metric']}", f"{'arm':<18} {'by seed':<22} {'above the first':<34} {'s a run':>8}"]
    for name, arm in results["arms"].items():
        by_seed = " ".join(f"{value:.3f}" for value in arm["results"].values())
        above = arm.get("above_the_first", {})
        said = f"{above['mean']:+.3f} [{above['interval'][0]:+.3f}, {above['interval'][1]:+.3f}]" if "mean" in above else "–"
        times = list(arm["time_s"].values())
        mean_s = f"{sum(times) / len(times):.0f}" if times else "–"
        rows.append(f"{name:<18} {by_seed:<22} {said:<34} {mean_s:>8}")
    for name, bar in results["bars"].items():
        rows.append(f"{name}: {bar['value']:+.3f}, must be {bar['bar']}: {'holds' if bar['holds'] else 'does not hold'}")
    return "\n".join(rows)


def write_plots(results: Mapping[str, Any], directory: Path) -> None:
    """One drawing a metric, with a line an arm; a critic's has no line of GRPO."""
    for metric, arms in results["curves"].items():
        drawn = {arm: [[(step, value) for step, value in curve] for curve in by_seed.values()] for arm, by_seed in arms.items()}
        known = {arm: curves for arm, curves in drawn.items() if any(curves)}
        (plot,) = compare_plots({metric: known}, units={metric: CURVES[metric]}).values()
        write_text(directory / f"{metric.rpartition('/')[2]}.svg", str(draw(plot, is_standalone=True)) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="holds the sweep's directory")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value of the recipe: a pilot")
    options = parser.parse_args(arguments)
    if options.set and options.results == RESULTS:
        parser.error("--set makes a pilot, which must not take the place of the results: name another place with --results")
    sweep, directory = load_sweep(SWEEP, options.set), options.runs / SWEEP.stem
    with SweepConsole() as progress:
        log = run_sweep(sweep, directory, jobs=options.jobs, progress=progress, command=COMMAND)
    if log.failures:
        failed = ", ".join(run.name for run in log.failures)
        print(f"{failed} failed, so the results stay as they were. The same command goes on.", file=sys.stderr)
        return 1
    results = summarise(read_json(directory / "sweep.json"))
    write_json(options.results / "ppo-lambda.json", results)
    write_text(options.results / "ppo-lambda.txt", table(results) + "\n")
    write_plots(results, options.results / "ppo-lambda")
    print(table(results))
    return 0 if all(bar["holds"] for bar in results["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
