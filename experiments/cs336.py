"""CS336 assignment 5 from end to end: is each rung of the ladder above the last? Zero-shot, SFT, expert iteration, GRPO.

    make experiments-faithful ONLY=cs336

Runs recipes/cs336-ladder.toml with the seeds of cs336_ladder.toml, as `strop sweep` does: a second call goes on
where the first ended. What was expected, and what could be seen at all, was written down first: hypotheses/cs336.md.

Rungs of one seed answer the same held-out problems, so they are compared in pairs: a bootstrap that draws seeds, and then
problems within each, gives the 95 % interval of the difference. A rung whose interval reaches 0 is reported as not above.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance

from strop.evaluation.statistics import Estimate, mean_of_seeds
from strop.pipeline.sweep import run_sweep
from strop.pipeline.sweep_file import load_sweep
from strop.reports.number_format import Unit
from strop.reports.plots import compare_plots, draw
from strop.reports.sweep import SweepConsole
from strop.run_directory import RunDirectory, read_json, read_lines, write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
SWEEP = ROOT / "experiments" / "cs336_ladder.toml"
COMMAND = "make experiments-faithful ONLY=cs336"
RUNGS = {"zero_shot": "zero_shot", "sft": "after_sft", "expert_iteration": "after_expert", "grpo": "after_grpo"}
BESIDE = {"sft_filtered": "after_sft_filtered"}  # no rung: of the demonstrations of SFT those that are right
ROLLOUTS_A_STEP = {"expert": 256, "grpo": 64}
CURVES = ("rollout/accuracy", "policy/entropy_nats", "rollout/length_tokens_mean")
ZERO_SHOT_AT_LEAST, ZERO_SHOT_AT_MOST = 0.05, 0.3

Scores = Mapping[int, float]
"""Problem -> the share of its attempts that are right."""


def scores_of(run: RunDirectory, stage: str) -> Scores:
    """What the evaluation `stage` found, problem by problem."""
    attempts = defaultdict(list)
    for line in read_lines(run.stage(stage).rollouts(0)):
        rollout = line["rollout"]
        attempts[rollout["trajectory"]["key"]["task_index"]].append(float(rollout["reward_parts"]["accuracy"] > 0))
    return {task: sum(each) / len(each) for task, each in attempts.items()}


def paired_difference(pairs: Sequence[tuple[Scores, Scores]], *, num_resamples: int = 10_000) -> Estimate:
    """Mean of second - first over seeds, with a 95 % interval: seeds are drawn with replacement, then problems of each.

    Args:
        pairs: of each seed, the scores of two rungs; problems that either lacks (all attempts void) are left out.
    """
    generator = np.random.default_rng(0)
    differences = [
        np.array([second[task] - first[task] for task in sorted(first.keys() & second.keys())]) for first, second in pairs
    ]
    drawn = generator.integers(len(pairs), size=(num_resamples, len(pairs)))
    means = np.empty(drawn.shape)
    for seed, each in enumerate(differences):
        chosen = np.nonzero(drawn == seed)
        means[chosen] = each[generator.integers(len(each), size=(len(chosen[0]), len(each)))].mean(axis=1)
    low, high = np.quantile(means.mean(axis=1), [0.025, 0.975])
    return Estimate(mean=float(np.mean([each.mean() for each in differences])), low=float(low), high=float(high))


def summarise(runs: Mapping[int, RunDirectory]) -> dict[str, Any]:
    """Every seed's figures, the differences between rungs, and the bars."""
    stages = {**RUNGS, **BESIDE}
    evaluations = {
        name: {seed: read_json(run.stage(stage).evaluation) for seed, run in runs.items()} for name, stage in stages.items()
    }
    scores = {name: {seed: scores_of(run, stage) for seed, run in runs.items()} for name, stage in stages.items()}
    steps = [*zip(list(RUNGS)[:-1], list(RUNGS)[1:], strict=True), ("zero_shot", "grpo"), ("sft_filtered", "grpo")]
    differences = {f"{second}_above_{first}": _difference(scores, first, second) for first, second in steps}
    zero_shot = [each["accuracy"] for each in evaluations["zero_shot"].values()]
    bars = {
        "zero_shot_at_least": _bar(min(zero_shot), ZERO_SHOT_AT_LEAST, is_floor=True),
        "zero_shot_at_most": _bar(max(zero_shot), ZERO_SHOT_AT_MOST, is_floor=False),
    }
    for name in list(differences)[: len(RUNGS) - 1]:
        low = differences[name]["low"]
        bars[f"{name}_low"] = {"value": low, "bar": "> 0", "holds": low > 0}
    return {
        "command": COMMAND,
        "bars": bars,
        "differences": differences,
        "figures": {
            name: {str(seed): {key: each[key] for key in _SHOWN if key in each} for seed, each in by_seed.items()}
            for name, by_seed in evaluations.items()
        },
        "curves": _curves(runs),
    }


_SHOWN = (
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "pass_at_k",
    "num_tasks",
    "k",
    "length_tokens_mean",
    "void_fraction",
)


def _difference(scores: Mapping[str, Mapping[int, Scores]], first: str, second: str) -> dict[str, Any]:
    pairs = [(scores[first][seed], scores[second][seed]) for seed in scores[first]]
    paired = paired_difference(pairs)
    by_seed = [sum(after.values()) / len(after) - sum(before.values()) / len(before) for before, after in pairs]
    figures: dict[str, Any] = {"mean": paired.mean, "low": paired.low, "high": paired.high, "by_seed": by_seed}
    if len(by_seed) > 1:
        student = mean_of_seeds(by_seed)
        figures |= {"student_low": student.low, "student_high": student.high}
    return figures


def _bar(value: float, bar: float, *, is_floor: bool) -> dict[str, Any]:
    return {
        "value": value,
        "bar": f"{'>=' if is_floor else '<='} {bar:g}",
        "holds": value >= bar if is_floor else value <= bar,
    }


def _curves(runs: Mapping[int, RunDirectory]) -> dict[str, dict[str, dict[str, list[tuple[int, float]]]]]:
    """Metric -> stage -> seed -> (rollouts sampled by the end of the step, value). Its policy is the one before the step."""
    curves: dict[str, dict[str, dict[str, list[tuple[int, float]]]]] = {
        metric: {stage: {} for stage in ROLLOUTS_A_STEP} for metric in CURVES
    }
    for seed, run in runs.items():
        lines = read_lines(run.metrics)
        for stage, num in ROLLOUTS_A_STEP.items():
            for metric in CURVES:
                curves[metric][stage][str(seed)] = [
                    (line["step"] * num, line[metric]) for line in lines if line["stage"] == stage and metric in line
                ]
    return curves


def table(results: Mapping[str, Any]) -> str:
    """One row a rung and seed, then the differences and the bars."""
    rows = [f"{'rung':<18} {'seed':>4} {'accuracy':>8}  {'95% interval':<16} {'pass@2':>6} {'tokens':>7}"]
    for name, by_seed in results["figures"].items():
        for seed, each in by_seed.items():
            interval = f"[{each['accuracy_low']:.3f}, {each['accuracy_high']:.3f}]"
            rows.append(
                f"{name:<18} {seed:>4} {each['accuracy']:>8.3f}  {interval:<16} {each['pass_at_k']:>6.3f}"
                f" {each['length_tokens_mean']:>7.1f}"
            )
    rows += ["", f"{'difference':<34} {'mean':>7}  {'95%, paired':<17} {'95%, Student over seeds':<24}"]
    for name, each in results["differences"].items():
        student = f"[{each['student_low']:+.3f}, {each['student_high']:+.3f}]" if "student_low" in each else "–"
        rows.append(f"{name:<34} {each['mean']:>+7.3f}  [{each['low']:+.3f}, {each['high']:+.3f}]  {student}")
    rows.append("")
    for name, bar in results["bars"].items():
        rows.append(f"{name:<38} {bar['value']:>+7.3f}  {bar['bar']:<8} {'holds' if bar['holds'] else 'DOES NOT HOLD'}")
    return "\n".join(rows)


def write_plots(results: Mapping[str, Any]) -> None:
    """The rungs, and what expert iteration and GRPO do on the way, against the rollouts that they have sampled."""
    rungs = {
        "accuracy by rung (0 zero-shot, 1 SFT, 2 expert iteration, 3 GRPO)": {
            "rung": [
                [(index, results["figures"][name][seed]["accuracy"]) for index, name in enumerate(RUNGS)]
                for seed in results["figures"]["zero_shot"]
            ]
        }
    }
    units = dict.fromkeys((*rungs, "rollout/accuracy"), Unit.PERCENT)
    plots = [("rungs", plot) for plot in compare_plots(rungs, units=units, x_label="rung").values()]
    of_seeds = {
        metric: {stage: list(by_seed.values()) for stage, by_seed in stages.items()}
        for metric, stages in results["curves"].items()
    }
    plots += [
        (metric.rpartition("/")[2].partition("_")[0], plot)
        for metric, plot in compare_plots(of_seeds, units=units, x_label="rollouts").items()
    ]
    for name, plot in plots:
        write_text(RESULTS / "cs336" / f"ladder-{name}.svg", str(draw(plot, is_standalone=True)) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "cs336-ladder")
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time, one thread each")
    options = parser.parse_args(arguments)
    sweep = load_sweep(SWEEP)
    with SweepConsole() as progress:
        log = run_sweep(sweep, options.runs, jobs=options.jobs, progress=progress, command=COMMAND)
    if log.failures:
        return 1
    runs = {run.seed: RunDirectory(options.runs / run.name) for run in log.runs}
    results = summarise(runs) | {"provenance": provenance(runs.values(), ROOT)}
    write_json(RESULTS / "faithful-cs336.json", results)
    write_plots(results)
    text = table(results)
    write_text(RESULTS / "faithful-cs336.txt", text + "\n")
    print(text)
    return 0  # a rung that is not above the last is a result, too


if __name__ == "__main__":
    sys.exit(main())
