"""Do the methods differ as their papers say? Claims at small scale, each by paired seeds.

    make experiments-faithful               all of them
    make experiments-faithful ONLY=roc      one of them

Runs the sweeps of experiments/faithful/ as `strop sweep` does: arms of a seed share their cold start, as do claims that begin
alike; a second call goes on where the first ended. What was expected was written down first: hypotheses/faithful.md.
Writes experiments/results/faithful-<name>.{json,txt} and faithful-<name>-<metric>.svg, with seconds, commit, versions and
processor (provenance.py). `cs336` (its ladder), its sweeps and leaderboard, `grader` and `grader-unseen` are scripts of their
own. `--pilot` runs one seed that is not among those of the experiment, and only prints.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cs336_sweeps import SWEEPS as CS336_SWEEPS
from faithful_measures import (
    accuracy_by_calls,
    at,
    costs_by_step,
    curve_of,
    evaluated,
    mean_up_to,
    on_common_grid,
    paired,
)
from provenance import provenance

from strop.errors import UserError
from strop.pipeline.sweep import plan_runs, run_sweep, write_arms
from strop.pipeline.sweep_file import Sweep, load_sweep
from strop.recipe.load import recipe_of
from strop.reports.number_format import Unit
from strop.reports.plots import compare_plots, draw
from strop.reports.sweep import SweepConsole
from strop.run_directory import RunDirectory, write_json, write_text
from strop.runs.lineage import copy_stages, num_common, num_done
from strop.runs.manifest import write_manifest

ROOT = Path(__file__).resolve().parent.parent
SWEEPS = ROOT / "experiments" / "faithful"
RESULTS = ROOT / "experiments" / "results"
PILOT_SEED = 100
BUDGET, ON_THE_WAY = "accuracy at the budget", "accuracy, mean up to the budget"

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
    is_more_expected: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One experiment. Each of the first `num_bars` comparisons is a bar; the others are reported."""

    comparisons: tuple[Comparison, ...]
    curves: tuple[str, ...] = ("rollout/accuracy",)
    figures: tuple[str, ...] = ("accuracy",)  # of the evaluation `after`
    num_bars: int = 1
    begins_as: str = ""  # the claim whose cold starts are its own, too
    further: Callable[[Runs], tuple[Figures, dict[str, Any]]] | None = None  # more figures, and curves by arm and seed


def start_and_end(runs: Runs) -> tuple[Figures, dict[str, Any]]:
    """The evaluations before and after RL, as if they were arms."""
    (by_seed,) = runs.values()
    figures = ("accuracy", "length_tokens_mean")
    return {each: {stage: evaluated(by_seed, each, stage=stage) for stage in ("before", "after")} for each in figures}, {}


def by_tool_calls(runs: Runs) -> tuple[Figures, dict[str, Any]]:
    """Held-out accuracy against tool calls, and what was spent up to the calls of the arm that made fewest."""
    figures: Figures = {}
    curves: dict[str, Any] = {"accuracy by tool calls": {arm: {} for arm in runs}}
    for seed in next(iter(runs.values())):
        costs = {arm: costs_by_step(by_seed[seed]) for arm, by_seed in runs.items()}
        budget = min(float(spent[-1].calls) for spent in costs.values())
        for arm, spent in costs.items():
            accuracy = accuracy_by_calls(runs[arm][seed], spent)
            curves["accuracy by tool calls"][arm][seed] = accuracy
            found = {
                BUDGET: at(accuracy, budget),
                ON_THE_WAY: mean_up_to(accuracy, budget),
                "calls of the budget": budget,
                "steps at the budget": at([(each.calls, step) for step, each in enumerate(spent)], budget),
            }
            for what in sorted(asdict(spent[0]).keys() - {"calls"}):
                found[f"{what} at the budget"] = at([(each.calls, getattr(each, what)) for each in spent], budget)
            for name, value in found.items():
                figures.setdefault(name, {}).setdefault(arm, {})[seed] = value
    return figures, curves


def at_equal_calls(first: str, *others: str, begins_as: str = "arpo") -> Claim:
    """Each of `others` is expected to be more accurate than `first` when both have made as many tool calls."""
    return Claim(
        begins_as=begins_as,
        comparisons=tuple(Comparison(figure=each, first=first, second=arm) for each in (ON_THE_WAY, BUDGET) for arm in others),
        num_bars=len(others),
        figures=("accuracy", "tool_calls_mean"),
        curves=("branching/branches_per_task",),
        further=by_tool_calls,
    )


_ROC_FIGURES = ("accuracy", "tool_error_rate", "tool_error_rate_correct", "tool_calls_mean", "length_tokens_mean")
_OF_CORRECT = "tool_error_rate_correct"
_ARPO_ARMS = ("grpo", "dapo", "reinforce_pp")
CLAIMS: Mapping[str, Claim] = {
    "r1-zero": Claim(
        comparisons=tuple(
            Comparison(figure=each, first="before", second="after") for each in ("accuracy", "length_tokens_mean")
        ),
        num_bars=2,
        figures=(),
        curves=("rollout/accuracy", "rollout/length_tokens_mean"),
        further=start_and_end,
    ),
    "roc": Claim(
        comparisons=(
            Comparison(figure="accuracy", first="grpo", second="grpo_roc"),
            Comparison(figure="accuracy", first="dapo_no_tool", second="grpo"),
            Comparison(figure="accuracy", first="grpo_16", second="grpo_roc"),
            Comparison(figure=_OF_CORRECT, first="grpo", second="grpo_roc", is_more_expected=False),
            Comparison(figure="length_tokens_mean", first="grpo", second="grpo_roc", is_more_expected=False),
        ),
        num_bars=2,
        figures=_ROC_FIGURES,
        curves=("rollout/accuracy", "rollout/tool_error_rate_correct", "rollout/length_tokens_mean"),
    ),
    "roc-updates": Claim(
        begins_as="roc",
        comparisons=tuple(
            Comparison(figure="accuracy", first=f"grpo-updates_per_step-{each}", second=f"grpo_roc-updates_per_step-{each}")
            for each in (1, 4, 16)
        ),
        num_bars=3,
        figures=_ROC_FIGURES,
    ),
    "roc-eps": Claim(
        begins_as="roc",
        comparisons=tuple(
            Comparison(figure=figure, first="eps_roc-1", second=f"eps_roc-{each}", is_more_expected=is_more)
            for figure, is_more in (("accuracy", True), (_OF_CORRECT, False))
            for each in ("0.001", "0.01", "0.1")
        ),
        num_bars=3,
        figures=_ROC_FIGURES,
    ),
    "roc-floors": Claim(
        begins_as="roc",
        comparisons=(Comparison(figure="accuracy", first="floors_0", second="floors_2"),),
        figures=_ROC_FIGURES,
    ),
    "arpo": Claim(
        comparisons=tuple(
            Comparison(figure=figure, first=first, second=second)
            for figure in (ON_THE_WAY, BUDGET)
            for first, second in (*((each, "arpo") for each in _ARPO_ARMS), ("grpo", "aepo"), ("grpo", "tree_grpo"))
        )
        + tuple(Comparison(figure=figure, first="grpo_6", second="arpo") for figure in (ON_THE_WAY, BUDGET))
        + tuple(Comparison(figure="accuracy", first="grpo", second=each) for each in ("arpo", "aepo", "tree_grpo")),
        num_bars=10,
        figures=("accuracy", "tool_calls_mean"),
        curves=("branching/branches_per_task",),
        further=by_tool_calls,
    ),
    "arpo-beta": at_equal_calls("entropy_weight-0", "entropy_weight-0.2", "entropy_weight-1"),
    "arpo-beam": at_equal_calls("beam_size-2", "beam_size-3", "beam_size-5"),
    "arpo-initial": at_equal_calls("initial_rollouts-8", "initial_rollouts-2", "initial_rollouts-4", "initial_rollouts-6"),
    "arpo-probe": at_equal_calls("probe_tokens-1", "probe_tokens-5", "probe_tokens-20"),
    "credit": Claim(
        comparisons=(Comparison(figure="accuracy", first="hard", second="soft"),),
        figures=("accuracy", "tool_calls_mean", "tool_error_rate"),
        curves=("rollout/accuracy", "policy/clip_fraction_low", "policy/clip_fraction_high", "policy/entropy_nats"),
    ),
    "drgrpo": Claim(
        comparisons=(
            Comparison(figure="length_tokens_mean_wrong", first="grpo", second="dr_grpo", is_more_expected=False),
            Comparison(figure="accuracy", first="grpo", second="dr_grpo"),
        ),
        figures=("length_tokens_mean_wrong", "length_tokens_mean_correct", "accuracy", "truncated_fraction"),
        curves=("rollout/length_tokens_mean_wrong", "rollout/length_tokens_mean_correct", "rollout/accuracy"),
    ),
    "overlong": Claim(
        begins_as="drgrpo",
        comparisons=(
            Comparison(figure="truncated_fraction", first="filter_off", second="filter_on"),
            Comparison(figure="accuracy", first="filter_off", second="filter_on", is_more_expected=False),
        ),
        figures=("truncated_fraction", "accuracy", "length_tokens_mean"),
        curves=("rollout/truncated_fraction", "rollout/length_tokens_mean", "rollout/accuracy"),
    ),
}
SCRIPTS = {  # which write their own results
    "cs336": ("cs336.py",),
    **{name: ("cs336_sweeps.py", "--only", name) for name in CS336_SWEEPS},
    "cs336-leaderboard": ("cs336_leaderboard.py",),
    "grader": ("grader.py",),
    "grader-unseen": ("grader.py", "--unseen"),
}
_PERCENT = ("accuracy", "fraction", "rate")


def summarise(claim: Claim, runs: Runs, *, command: str) -> dict[str, Any]:
    """Every arm's and seed's figures, the comparisons with what they show, the bar, and the curves."""
    figures: Figures = {figure: {arm: evaluated(by_seed, figure) for arm, by_seed in runs.items()} for figure in claim.figures}
    curves: dict[str, Any] = {
        metric: {arm: {seed: curve_of(run, metric) for seed, run in by_seed.items()} for arm, by_seed in runs.items()}
        for metric in claim.curves
    }
    if claim.further is not None:
        more_figures, more_curves = claim.further(runs)
        figures, curves = figures | more_figures, curves | more_curves
    comparisons = [
        asdict(each)
        | paired(figures[each.figure][each.first], figures[each.figure][each.second], is_more_expected=each.is_more_expected)
        for each in claim.comparisons
    ]
    return {
        "command": command,
        "seeds": sorted(next(iter(runs.values()))),
        "bars": {
            f"{each['second']}_{each['expected']}_{each['figure']}_than_{each['first']}".replace(" ", "_"): {
                "value": each.get("mean"),
                "bar": f"95 % interval {'above' if each['is_more_expected'] else 'below'} 0",
                "holds": each["verdict"] == "as expected",
            }
            for each in comparisons[: claim.num_bars]
        },
        "comparisons": comparisons,
        "figures": figures,
        "curves": curves,
    }


def table(name: str, results: Mapping[str, Any]) -> str:
    """The figures by arm with their mean and every seed, then the comparisons."""
    seeds = results["seeds"]
    rows = [name, "", f"{'figure':<37} {'arm':<26} {'mean':>9}  by seed {' '.join(f'{seed:>9}' for seed in seeds)}"]
    for figure, arms in results["figures"].items():
        for arm, by_seed in arms.items():
            mean = f"{sum(by_seed.values()) / len(by_seed):.4g}" if by_seed else "–"
            values = " ".join(f"{by_seed[seed]:>9.4g}" if seed in by_seed else f"{'–':>9}" for seed in seeds)
            rows.append(f"{figure:<37} {arm:<26} {mean:>9}          {values}")
    rows += ["", f"{'difference':<84} {'pairs':>5} {'mean':>9}  {'95 %, Student':<22} {'power 80 %':>10}  expected  shown"]
    for each in results["comparisons"]:
        about = f"{each['figure']}: {each['second']} - {each['first']}"
        mean = f"{each['mean']:>+9.4f}" if "mean" in each else f"{'–':>9}"
        interval = f"[{each['low']:+.4f}, {each['high']:+.4f}]" if "low" in each else "–"
        power = f"{each['detectable']:.4f}" if "detectable" in each else "–"
        row = f"{about:<84} {each['num_pairs']:>5} {mean}  {interval:<22} {power:>10}  {each['expected']:<9} {each['verdict']}"
        rows.append(row)
    return "\n".join(rows)


def write_plots(name: str, results: Mapping[str, Any]) -> None:
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
            ending = re.sub(r"\W+", "-", metric.rpartition("/")[2])
            write_text(RESULTS / f"faithful-{name}-{ending}.svg", str(draw(plot, is_standalone=True)) + "\n")


def run_claim(name: str, options: argparse.Namespace) -> bool:
    """Run, or go on with, its sweep, and write what it shows; False where a run failed."""
    claim, path, runs = CLAIMS[name], SWEEPS / f"{name}.toml", options.runs / name
    command = f"make experiments-faithful ONLY={name}"
    if options.pilot:
        runs, command = options.runs / f"{name}-pilot", f"python experiments/faithful.py --only {name} --pilot"
        path = _pilot_of(path, runs)
    sweep = load_sweep(path, options.set)
    if claim.begins_as and not options.pilot:
        take_over_starts(sweep, runs, options.runs / claim.begins_as, command=command)
    with SweepConsole() as progress:
        log = run_sweep(sweep, runs, jobs=options.jobs, progress=progress, command=command)
    if log.failures:
        return False
    by_arm = {arm.name: {run.seed: RunDirectory(runs / run.name) for run in arm.runs} for arm in log.arms}
    results = summarise(claim, by_arm, command=command)
    if not options.pilot:
        results["provenance"] = provenance((run for by_seed in by_arm.values() for run in by_seed.values()), ROOT)
        write_json(RESULTS / f"faithful-{name}.json", results)
        write_text(RESULTS / f"faithful-{name}.txt", table(name, results) + "\n")
        write_plots(name, results)
    print(table(name, results) + "\n")
    return True


def run_script(name: str, options: argparse.Namespace) -> bool:
    script, *words = SCRIPTS[name]
    words += ["--data", str(options.data)] if script == "grader.py" else []
    return subprocess.run([sys.executable, str(ROOT / "experiments" / script), *words]).returncode == 0


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
    """The same sweep with only the pilot's seed, written next to its runs."""
    text = re.sub(r"(?m)^seeds = .*$", f"seeds = [{PILOT_SEED}]", path.read_text(encoding="utf-8"))
    text = text.replace('recipe = "../../', f'recipe = "{ROOT}/')
    pilot = runs.parent / f"{path.stem}-pilot.toml"
    write_text(pilot, text)
    return pilot


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*CLAIMS, *SCRIPTS], help="one of them; all without it")
    parser.add_argument("--pilot", action="store_true", help=f"one run of each arm, of seed {PILOT_SEED}")
    parser.add_argument("--set", action="append", default=[], help="of a pilot: a key of the recipe, as in stages.rl.steps=4")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "faithful", help="holds a directory for each sweep")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="of `grader`: holds gsm8k and math500")
    options = parser.parse_args(arguments)
    if options.set and not options.pilot:
        parser.error("--set is for a pilot: the experiment is what its sweep file says. Give --pilot, too.")
    try:
        has_passed = [
            run_claim(name, options) if name in CLAIMS else run_script(name, options)
            for name in ([options.only] if options.only else [*CLAIMS, *SCRIPTS])
        ]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(has_passed) else 1  # a claim that is not shown is a result, too


if __name__ == "__main__":
    sys.exit(main())
