"""The curves behind docs/results.md: CS336 assignment 5's SFT, expert iteration and ablations (sections 4, 5, 8).

    make experiments-faithful ONLY=cs336-learning-rate

Runs the sweeps cs336-*.toml of recipes/sweeps as `strop sweep` does: a second call goes on where the first ended. Writes the
results of a sweep's arms, their differences from the first arm by seed, and their curves to results/faithful-<sweep>.{json,txt}
and results/cs336/<question>.svg; and rollouts of the first baseline over the steps to results/cs336/rollouts.txt. `--only` runs
one of them; `--draw` runs nothing. Runs that are missing are named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from provenance import provenance

from strop.evaluation.statistics import mean_of_seeds
from strop.pipeline.sweep import run_sweep
from strop.pipeline.sweep_file import load_sweep
from strop.reports.log import read_run
from strop.reports.number_format import Unit
from strop.reports.plots import compare_plots, draw
from strop.reports.sweep import SweepConsole, unit_of
from strop.run_directory import RunDirectory, read_json, read_lines, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
BASELINES = "cs336-baselines"
SWEEPS: Mapping[str, tuple[str, ...]] = {  # the arms; the others are compared with the first
    "cs336-sft-size": ("size_128", "size_256", "size_512", "size_1024", "full_4096", "filtered"),
    "cs336-expert-iteration": ("defaults", "group_2", "group_8", "epochs_1", "epochs_4", "batch_32", "batch_128"),
    "cs336-learning-rate": ("lr-0.0003", "lr-0.0001", "lr-0.001", "lr-0.003"),
    BASELINES: ("reinforce_with_baseline", "no_baseline", "grpo_clip"),
    "cs336-length-normalisation": ("masked_mean", "masked_normalize", "token_mean"),
    "cs336-std-normalisation": ("std", "no_std"),
    "cs336-off-policy": tuple(f"epochs-{epochs}-updates_per_step-{num}" for epochs in (1, 4) for num in (1, 4)),
    "cs336-off-policy-focused": ("on_policy", "off_policy_1x4", "off_policy_4x1"),
    "cs336-clip": ("clip", "no_clip"),
    "cs336-prompt": ("r1_zero", "question_only"),
}
CURVES = (
    "rollout/accuracy",
    "rollout/length_tokens_mean",
    "policy/entropy_nats",
    "update/grad_norm",
    "policy/clip_fraction_low",
    "policy/clip_fraction_high",
    "validation/accuracy",
    "rollout/kept_fraction",
    "rollout/entropy_nats",
)
_DRAWN = {  # metric: how its file's name ends, and what it is called in a title
    "validation/accuracy": ("", "held-out accuracy"),
    "rollout/accuracy": ("-rollouts", "accuracy of rollouts"),
    "rollout/length_tokens_mean": ("-length", "tokens of a response"),
    "policy/entropy_nats": ("-entropy", "entropy of responses, nats"),
    "rollout/entropy_nats": ("-entropy", "entropy of responses, nats"),
}
_FURTHER = ("expert-iteration", "length-normalisation", "off-policy")  # begin the questions with more than one drawing
_DIGITS = 4
_HALF = 0.5


def summarise(name: str, sweep: Mapping[str, Any]) -> dict[str, Any]:
    """What the arms of a sweep came to, from its `sweep.json`, and which runs are missing."""
    missing = [f"{run['arm']}-seed-{run['seed']}" for run in sweep["runs"] if run["state"] != "done" and not _fell(run)]
    return {
        "command": command_of(name),
        "bars": {"runs_missing": {"value": len(missing), "bar": "== 0", "holds": not missing}},
        "recipe": sweep["recipe"].rpartition("/")[2],
        "jobs": sweep["jobs"],
        "missing": missing,
    } | _answer(sweep, SWEEPS[name])


def question_of(name: str) -> str:
    return name.removeprefix("cs336-")


def command_of(name: str) -> str:
    return f"make experiments-faithful ONLY={name}"


def _fell(run: Mapping[str, Any]) -> bool:
    """Whether it ended because no rollout was rewarded any more: an answer, too, where all else is only missing."""
    return run["state"] == "failed" and "could not learn" in run["failure"] and "all 64 rewards are 0" in run["failure"]


def _answer(sweep: Mapping[str, Any], arms: Sequence[str]) -> dict[str, Any]:
    runs = {arm: {run["seed"]: run for run in sweep["runs"] if run["arm"] == arm and run["state"] == "done"} for arm in arms}
    first = runs[arms[0]]
    answer: dict[str, Any] = {"result": sweep["result"], "stage": sweep["stage"], "arms": {}, "curves": {}}
    for arm, by_seed in runs.items():
        above = {seed: run["result"] - first[seed]["result"] for seed, run in by_seed.items() if seed in first}
        answer["arms"][arm] = {
            "changes": sweep["arms"][arm]["changes"],
            "results": {str(seed): round(run["result"], _DIGITS) for seed, run in by_seed.items()},
            "above": {str(seed): round(difference, _DIGITS) for seed, difference in above.items()},
            "above_interval": _interval(above.values()) if arm != arms[0] else None,
            "time_s": {str(seed): round(run["time_s"], 1) for seed, run in by_seed.items()},
            "fell_at_step": {str(run["seed"]): run["num_steps"] for run in sweep["runs"] if run["arm"] == arm and _fell(run)},
        }
    for metric in CURVES:
        drawn = sweep["curves"].get(metric, {})
        answer["curves"][metric] = {
            arm: {
                seed: [[step, round(seconds, 1), round(value, _DIGITS)] for step, seconds, value in curve]
                for seed, curve in drawn[arm].items()
                if seed in answer["arms"][arm]["results"] or seed in answer["arms"][arm]["fell_at_step"]
            }
            for arm in arms
            if drawn.get(arm)
        }
    answer["curves"] = {metric: curves for metric, curves in answer["curves"].items() if curves}
    return answer


def half_right(curve: Sequence[tuple[float, float, float]]) -> tuple[float, float] | None:
    """The step and the seconds by which half of the rollouts of the last three steps were right; None where they never were."""
    for first, second, last in zip(curve, curve[1:], curve[2:], strict=False):
        if _mean((first[2], second[2], last[2])) >= _HALF:
            return last[0], last[1]
    return None


def _half_right(curves: Mapping[str, Sequence[tuple[float, float, float]]]) -> str:
    """By seed, the step and the seconds at which half the rollouts of the last three steps were right."""
    crossings = []
    for curve in curves.values():
        at = half_right(curve)
        crossings.append("never" if at is None else f"step {at[0]:.0f} ({at[1]:.0f} s)")
    return "half right: " + ", ".join(crossings)


def _interval(differences: Iterable[float]) -> list[float] | None:
    """Mean, low and high of Student's 95 % interval over seeds; None of fewer than two."""
    known = list(differences)
    if len(known) < 2:
        return None
    over_seeds = mean_of_seeds(known)
    return [round(value, _DIGITS) for value in (over_seeds.mean, over_seeds.low, over_seeds.high)]


def table(name: str, results: Mapping[str, Any]) -> str:
    """One row an arm: the result by seed, the difference from the first arm by seed, and how curves end."""
    arms = results["arms"]
    seeds = sorted({seed for arm in arms.values() for seed in (*arm["results"], *arm["fell_at_step"])})
    rows = [
        f"seeds {', '.join(seeds)}; differences from the first arm by seed, and Student's 95 % interval of their mean;",
        "†k: no rollout was rewarded any more in three steps in a row, the last of them step k, and the run ended",
        "",
        f"{question_of(name)}: {results['result']}",
        f"  {'arm':<29} {'by seed':<20} {'above the first':<22} {'mean, 95 %':<24} {'s':>5}  last five steps",
    ]
    for arm, each in arms.items():
        ends = [f"{metric.rpartition('/')[2]} {_end(results, metric, arm)}" for metric in _ENDS if metric in results["curves"]]
        if "off-policy" in name:
            ends.append(_half_right(results["curves"].get("rollout/accuracy", {}).get(arm, {})))
        by_seed = _list(each["results"], ".3f", seeds, each["fell_at_step"])
        rows.append(
            f"  {arm:<29} {by_seed:<20} {_list(each['above'], '+.3f', seeds):<22}"
            f" {_shown(each['above_interval']):<24} {_mean(each['time_s'].values()):>5.0f}  {', '.join(ends)}"
        )
    if results["missing"]:
        rows += ["", f"not run, or not to the end: {', '.join(results['missing'])}"]
    return "\n".join(rows)


_ENDS = (
    "rollout/accuracy",
    "rollout/kept_fraction",
    "policy/entropy_nats",
    "rollout/entropy_nats",
    "update/grad_norm",
    "rollout/length_tokens_mean",
)


def _end(results: Mapping[str, Any], metric: str, arm: str) -> str:
    """The mean of the last five steps over all seeds."""
    values = [point[2] for curve in results["curves"][metric].get(arm, {}).values() for point in curve[-5:]]
    return f"{_mean(values):.3g}" if values else "–"


def _list(values: Mapping[str, float], spec: str, seeds: Sequence[str], fell: Mapping[str, int] | None = None) -> str:
    ends = {seed: f"†{step}" for seed, step in (fell or {}).items()} | {seed: format(values[seed], spec) for seed in values}
    return " ".join(ends.get(seed, "–") for seed in seeds)


def _shown(interval: Sequence[float] | None) -> str:
    return "–" if interval is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*interval)


def _mean(values: Any) -> float:
    known = list(values)
    return sum(known) / len(known) if known else float("nan")


def write_plots(name: str, results: Mapping[str, Any]) -> None:
    """The curves of a sweep by step; of off-policy by seconds too."""
    question = question_of(name)
    for metric, (ending, title) in _DRAWN.items():
        if ending and not question.startswith(_FURTHER):
            continue
        arms = results["curves"].get(metric, {})
        by_step, by_time = (
            {arm: [[(point[x], point[2]) for point in curve] for curve in seeds.values()] for arm, seeds in arms.items()}
            for x in (0, 1)
        )
        if sum(bool(curves) for curves in by_step.values()) < 2:  # nothing to compare yet
            continue
        _write(question + ending, f"{question}: {title}", by_step, "step", unit_of(metric))
        if question.startswith("off-policy") and metric.endswith("/accuracy"):
            first = {arm: curves[:1] for arm, curves in by_time.items()}
            _write(f"{question}{ending}-time", f"{question}: {title}, the first seed", first, "seconds", unit_of(metric))


def _write(
    name: str, title: str, arms: Mapping[str, Sequence[Sequence[tuple[float, float]]]], x_label: str, unit: Unit
) -> None:
    (plot,) = compare_plots({title: arms}, units={title: unit}, x_label=x_label).values()
    write_text(RESULTS / "cs336" / f"{name}.svg", str(draw(plot, is_standalone=True)) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="holds a directory for each sweep")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--only", choices=SWEEPS, help="run only this sweep")
    parser.add_argument("--draw", action="store_true", help="run nothing: write what earlier calls left")
    options = parser.parse_args(arguments)
    is_whole = True
    for name in (options.only,) if options.only else SWEEPS:
        if not options.draw:
            sweep = load_sweep(ROOT / "recipes" / "sweeps" / f"{name}.toml")
            with SweepConsole() as progress:
                run_sweep(sweep, options.runs / name, jobs=options.jobs, progress=progress, command=command_of(name))
        if (options.runs / name / "sweep.json").exists():
            results = write_results(name, options.runs / name)
            is_whole = is_whole and not results["missing"]
            print(table(name, results) + "\n")
    return 0 if is_whole else 1  # an arm that nothing rewards any more is a result, too


def add_before(results: Mapping[str, Any], directory: Path) -> None:
    """Of each arm and seed the accuracy before, where an evaluation is called so."""
    for name, arm in results["arms"].items():
        evaluations = {seed: read_run(RunDirectory(directory / f"{name}-seed-{seed}")).evaluations for seed in arm["results"]}
        arm["before"] = {
            seed: round(each.figures["accuracy"], _DIGITS)
            for seed, of_run in evaluations.items()
            for each in of_run
            if each.stage == "before"
        }


def rollouts_over_time(run: RunDirectory, steps: Sequence[int]) -> str:
    """Of each of these steps of the stage `rl` two rollouts of every reward that it has, of different tasks where it can be."""
    parts = []
    for step in steps:
        rollouts = sorted(
            (row["rollout"] for row in read_lines(run.stage("rl").rollouts(step))),
            key=lambda each: (each["trajectory"]["key"]["attempt"], each["trajectory"]["key"]["task_index"]),
        )
        for reward in sorted({each["reward"] for each in rollouts}):
            with_it = [each["trajectory"] for each in rollouts if each["reward"] == reward]
            parts.append(f"step {step}: {len(with_it)} of {len(rollouts)} rollouts have reward {reward:g}")
            for trajectory in with_it[:2]:
                parts += [indent(turn["completion_text"], " " * 4) for turn in trajectory["turns"]] + [""]
    return "\n".join(parts).rstrip()


def write_results(name: str, directory: Path) -> dict[str, Any]:
    """Write what a sweep in `directory` came to, so far."""
    sweep = read_json(directory / "sweep.json")
    results = summarise(name, sweep)
    add_before(results, directory)
    runs = [RunDirectory(directory / f"{run['arm']}-seed-{run['seed']}") for run in sweep["runs"]]
    results["provenance"] = provenance([run for run in runs if run.manifest.exists()], ROOT)
    shown = RunDirectory(directory / f"{SWEEPS[name][0]}-seed-0")
    if name == BASELINES and shown.stage("rl").done.exists():
        write_text(RESULTS / "cs336" / "rollouts.txt", rollouts_over_time(shown, (1, 5, 20, 40)) + "\n")
    text = json.dumps(results, separators=(",", ":"), allow_nan=False)  # curves are long, a number a line
    write_text(RESULTS / f"faithful-{name}.json", text + "\n")
    write_text(RESULTS / f"faithful-{name}.txt", table(name, results) + "\n")
    write_plots(name, results)
    return results


if __name__ == "__main__":
    sys.exit(main())
