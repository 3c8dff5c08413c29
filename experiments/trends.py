"""Do the methods differ as their papers say? Five trends at small scale, each by paired seeds.

    make experiments                    all of them
    make experiments-trends ONLY=a      one of them: a, b, c, d or e

Runs the sweeps of experiments/trends/ as `strop sweep` does: arms of a seed share their cold start, as do (b) and (c), and (d)
and (e); a second call goes on where the first ended. What was expected, and what could be seen at all, was written down first:
hypotheses/trends.md.
Writes experiments/results/trends/<name>.{json,txt} and <name>-<metric>.svg; with --pilot, of one seed that is not among those
of the experiment, into pilots/ beside them.
The JSON says what it was made of, too: seconds, commit, versions (provenance.py).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from provenance import provenance
from trends_measures import (
    accuracy_by_calls,
    at,
    costs_by_step,
    curve_of,
    evaluated,
    mean_up_to,
    on_common_grid,
    paired,
    smooth,
)

from strop.errors import UserError
from strop.pipeline.sweep import plan_runs, run_sweep, write_arms
from strop.pipeline.sweep_file import Sweep, load_sweep
from strop.recipe.load import recipe_of
from strop.reports.compare import compare_plots
from strop.reports.plots import draw
from strop.reports.scales import Unit
from strop.reports.sweep import SweepConsole
from strop.run_directory import RunDirectory, write_json, write_text
from strop.runs.lineage import copy_stages, num_common, num_done
from strop.runs.manifest import write_manifest

ROOT = Path(__file__).resolve().parent.parent
SWEEPS = ROOT / "experiments" / "trends"
RESULTS = ROOT / "experiments" / "results" / "trends"
PILOT_SEED = 100
SMOOTH = "accuracy, mean, on a smooth curve"

Runs = Mapping[str, Mapping[int, RunDirectory]]
"""Arm -> seed -> its run."""
Figures = dict[str, dict[str, dict[int, float]]]
"""Figure -> arm -> seed -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A sentence of the hypotheses: `second` has more (or less) of `figure` than `first`."""

    figure: str
    first: str
    second: str
    is_more_expected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One experiment. The first comparison decides; the others are told."""

    name: str
    comparisons: tuple[Comparison, ...]
    curves: tuple[str, ...]
    figures: tuple[str, ...] = ()  # of the evaluation `after`
    begins_as: str = ""  # the trend whose cold starts are its own, too
    further: Callable[[Runs], tuple[Figures, dict[str, Any]]] | None = None  # more figures, and curves by arm and seed


def by_tool_calls(runs: Runs) -> tuple[Figures, dict[str, Any]]:
    """Of (b): held-out accuracy against tool calls, and what was spent up to the calls of the arm that made fewest."""
    figures: Figures = {}
    curves: dict[str, Any] = {"accuracy by tool calls": {arm: {} for arm in runs}}
    for seed in next(iter(runs.values())):
        costs = {arm: costs_by_step(by_seed[seed]) for arm, by_seed in runs.items()}
        budget = min(float(spent[-1].calls) for spent in costs.values())
        for arm, spent in costs.items():
            accuracy = accuracy_by_calls(runs[arm][seed], spent)
            curves["accuracy by tool calls"][arm][seed] = accuracy
            told = {
                "accuracy, mean up to the budget": mean_up_to(accuracy, budget),
                SMOOTH: mean_up_to(smooth(accuracy), budget),
                "accuracy at the budget": at(accuracy, budget),
                "calls of the budget": budget,
                "steps at the budget": at([(each.calls, step) for step, each in enumerate(spent)], budget),
            }
            for what in sorted(asdict(spent[0]).keys() - {"calls"}):
                told[f"{what} at the budget"] = at([(each.calls, getattr(each, what)) for each in spent], budget)
            for name, value in told.items():
                figures.setdefault(name, {}).setdefault(arm, {})[seed] = value
    return figures, curves


TRENDS: Mapping[str, Trend] = {
    "a": Trend(
        name="a-roc",
        comparisons=(
            Comparison(figure="tool_error_rate_correct", first="grpo", second="grpo_roc", is_more_expected=False),
            Comparison(figure="accuracy", first="grpo", second="grpo_roc", is_more_expected=True),
            Comparison(figure="length_tokens_mean", first="grpo", second="grpo_roc", is_more_expected=False),
            Comparison(figure="accuracy", first="no_tool", second="grpo", is_more_expected=True),
        ),
        figures=("accuracy", "tool_error_rate", "tool_error_rate_correct", "tool_calls_mean", "length_tokens_mean"),
        curves=("rollout/tool_error_rate_correct", "rollout/accuracy", "rollout/length_tokens_mean"),
    ),
    "b": Trend(
        name="b-arpo",
        comparisons=(
            Comparison(figure="accuracy, mean up to the budget", first="grpo", second="arpo", is_more_expected=True),
            Comparison(figure=SMOOTH, first="grpo", second="arpo", is_more_expected=True),
            Comparison(figure="accuracy at the budget", first="grpo", second="arpo", is_more_expected=True),
        ),
        figures=("accuracy", "tool_calls_mean"),
        curves=("rollout/accuracy", "branching/branch_rate", "branching/branches_per_task"),
        further=by_tool_calls,
    ),
    "c": Trend(
        name="c-credit",
        begins_as="b-arpo",
        comparisons=(Comparison(figure="accuracy", first="hard", second="soft", is_more_expected=True),),
        figures=("accuracy", "tool_calls_mean", "tool_error_rate"),
        curves=("rollout/accuracy", "policy/clip_fraction_low", "policy/clip_fraction_high", "policy/entropy_nats"),
    ),
    "d": Trend(
        name="d-drgrpo",
        comparisons=(
            Comparison(figure="length_tokens_mean_wrong", first="grpo", second="dr_grpo", is_more_expected=False),
            Comparison(figure="accuracy", first="grpo", second="dr_grpo", is_more_expected=True),
        ),
        figures=("length_tokens_mean_wrong", "length_tokens_mean_correct", "accuracy", "truncated_fraction"),
        curves=("rollout/length_tokens_mean_wrong", "rollout/length_tokens_mean_correct", "rollout/accuracy"),
    ),
    "e": Trend(
        name="e-overlong",
        begins_as="d-drgrpo",
        comparisons=(
            Comparison(figure="truncated_fraction", first="filter_off", second="filter_on", is_more_expected=True),
            Comparison(figure="accuracy", first="filter_off", second="filter_on", is_more_expected=False),
        ),
        figures=("truncated_fraction", "accuracy", "length_tokens_mean"),
        curves=("rollout/truncated_fraction", "rollout/length_tokens_mean", "rollout/accuracy"),
    ),
}
_PERCENT = ("accuracy", "fraction", "rate")


def summarise(trend: Trend, runs: Runs, *, command: str) -> dict[str, Any]:
    """Every arm's and seed's figures, the comparisons with what they show, the bar, and the curves."""
    figures: Figures = {figure: {arm: evaluated(by_seed, figure) for arm, by_seed in runs.items()} for figure in trend.figures}
    curves: dict[str, Any] = {
        metric: {arm: {seed: curve_of(run, metric) for seed, run in by_seed.items()} for arm, by_seed in runs.items()}
        for metric in trend.curves
    }
    if trend.further is not None:
        more_figures, more_curves = trend.further(runs)
        figures, curves = figures | more_figures, curves | more_curves
    comparisons = [
        asdict(each)
        | paired(figures[each.figure][each.first], figures[each.figure][each.second], is_more_expected=each.is_more_expected)
        for each in trend.comparisons
    ]
    num_seeds = len(next(iter(runs.values())))
    decides = comparisons[0]
    return {
        "command": command,
        "seeds": sorted(next(iter(runs.values()))),
        "is_pilot": num_seeds < 2,
        "bars": {
            f"{decides['second']}_{decides['expected']}_{decides['figure']}_than_{decides['first']}": {
                "value": decides.get("mean"),
                "bar": f"95 % interval {'above' if decides['is_more_expected'] else 'below'} 0",
                "holds": decides["verdict"] == "as expected",
            }
        },
        "comparisons": comparisons,
        "figures": figures,
        "curves": curves,
    }


def table(trend: Trend, results: Mapping[str, Any]) -> str:
    """The figures by arm with their mean and every seed, then the comparisons."""
    rows = [trend.name]
    if results["is_pilot"]:
        rows.append(f"A pilot of one seed, which decides nothing. Changed: {', '.join(results['changes']) or 'nothing'}.")
    rows.append("")
    seeds = results["seeds"]
    rows.append(f"{'figure':<37} {'arm':<11} {'mean':>9}  by seed {' '.join(f'{seed:>9}' for seed in seeds)}")
    for figure, arms in results["figures"].items():
        for arm, by_seed in arms.items():
            mean = f"{sum(by_seed.values()) / len(by_seed):.4g}" if by_seed else "–"
            values = " ".join(f"{by_seed[seed]:>9.4g}" if seed in by_seed else f"{'–':>9}" for seed in seeds)
            rows.append(f"{figure:<37} {arm:<11} {mean:>9}          {values}")
    rows += ["", f"{'difference':<58} {'pairs':>5} {'mean':>9}  {'95 %, bootstrap':<22} {'95 %, Student':<22} expected  shown"]
    for each in results["comparisons"]:
        name = f"{each['figure']}: {each['second']} - {each['first']}"
        mean = f"{each['mean']:>+9.4f}" if "mean" in each else f"{'–':>9}"
        drawn, student = (_interval(each, prefix) for prefix in ("", "student_"))
        about = f"{name:<58} {each['num_pairs']:>5} {mean}  {drawn:<22} {student:<22}"
        rows.append(f"{about} {each['expected']:<9} {each['verdict']}")
    return "\n".join(rows)


def _interval(figures: Mapping[str, Any], prefix: str) -> str:
    if f"{prefix}low" not in figures:
        return "–"
    return f"[{figures[f'{prefix}low']:+.4f}, {figures[f'{prefix}high']:+.4f}]"


def write_plots(trend: Trend, results: Mapping[str, Any], directory: Path) -> None:
    """One plot a curve: the mean of the seeds and their range."""
    for metric, arms in results["curves"].items():
        against_calls = "by tool calls" in metric
        curves = {arm: list(by_seed.values()) for arm, by_seed in arms.items()}
        if not any(curve for seeds in curves.values() for curve in seeds):
            continue
        if against_calls:  # each seed was validated at other numbers of them
            curves = {arm: on_common_grid(seeds) for arm, seeds in curves.items()}
        units = {metric: Unit.PERCENT} if any(word in metric for word in _PERCENT) else None
        x_label = "tool calls" if against_calls else "step"
        for plot in compare_plots({metric: curves}, units=units, x_label=x_label).values():
            name = re.sub(r"\W+", "-", metric.rpartition("/")[2])
            write_text(directory / f"{trend.name}-{name}.svg", str(draw(plot, is_standalone=True)) + "\n")


def run_trend(trend: Trend, options: argparse.Namespace) -> bool:
    """Run, or go on with, its sweep, and write what it shows; False where a run failed."""
    path, runs = SWEEPS / f"{trend.name}.toml", options.runs / trend.name
    directory, command = RESULTS, f"make experiments-trends ONLY={trend.name[0]}"
    if options.pilot:
        runs, directory = options.runs / f"{trend.name}-pilot", RESULTS / "pilots"
        path, command = _pilot_of(path, runs), f"python experiments/trends.py --only {trend.name[0]} --pilot"
    sweep = load_sweep(path, options.set)
    if trend.begins_as and not options.pilot:
        take_over_starts(sweep, runs, options.runs / trend.begins_as, command=command)
    with SweepConsole() as progress:
        log = run_sweep(sweep, runs, jobs=options.jobs, progress=progress, command=command)
    if log.failures:
        return False
    by_arm = {arm.name: {run.seed: RunDirectory(runs / run.name) for run in arm.runs} for arm in log.arms}
    made_of = provenance((run for by_seed in by_arm.values() for run in by_seed.values()), ROOT)
    results = summarise(trend, by_arm, command=command) | {"changes": options.set, "provenance": made_of}
    write_json(directory / f"{trend.name}.json", results)
    write_plots(trend, results, directory)
    text = table(trend, results)
    write_text(directory / f"{trend.name}.txt", text + "\n")
    print(text + "\n")
    return True


def take_over_starts(sweep: Sweep, directory: Path, other: Path, *, command: str) -> None:
    """Put what the runs below `other` have finished into the runs of `sweep`, as far as their recipes begin alike: a cold start
    that is made once is the one that would be made again, to the bit."""
    planned = plan_runs(sweep, directory)
    write_arms(sweep, directory, command=command)
    for run in planned:
        for source in map(RunDirectory, sorted(other.glob(f"*-seed-{run.seed}"))):
            if not source.manifest.exists():
                continue
            recipe = recipe_of(source)
            num = min(num_common(run.recipe, recipe), num_done(source, recipe))
            if num > run.num_done:
                run.directory.path.mkdir(parents=True, exist_ok=True)
                write_manifest(run.directory, run.recipe, run.command)
                copy_stages(run.directory, source, run.recipe, num=num)


def _pilot_of(path: Path, runs: Path) -> Path:
    """The same sweep with the pilot's seed alone, written beside its runs."""
    text = re.sub(r"(?m)^seeds = .*$", f"seeds = [{PILOT_SEED}]", path.read_text(encoding="utf-8"))
    text = text.replace('recipe = "../../', f'recipe = "{ROOT}/')
    pilot = runs.parent / f"{path.stem}-pilot.toml"
    write_text(pilot, text)
    return pilot


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(TRENDS), help="one of them; all without it")
    parser.add_argument("--pilot", action="store_true", help=f"one run of each arm, of seed {PILOT_SEED}")
    parser.add_argument("--set", action="append", default=[], help="of a pilot: a key of the recipe, as in stages.rl.steps=4")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "trends", help="holds a directory for each sweep")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    options = parser.parse_args(arguments)
    if options.set and not options.pilot:
        parser.error("--set is for a pilot: the experiment is what its sweep file says. Give --pilot, too.")
    letters = [options.only] if options.only else sorted(TRENDS)
    try:
        has_passed = [run_trend(TRENDS[letter], options) for letter in letters]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(has_passed) else 1  # a trend that is not shown is a result, too


if __name__ == "__main__":
    sys.exit(main())
