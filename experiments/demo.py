"""Does the demo learn, honestly? Three seeds, controls, and the arms that a sceptic would ask for.

    make experiments-demo

GRPO runs with its own defaults (token mean, tied groups kept), so its arms differ from the demo in more than the selection.
Per seed, from one and the same cold start: GRPO-RoC (the demo), GRPO with G rollouts, GRPO with 2G rollouts, and SFT continued
for as many tokens as the demo's RL sampled. The demo's policy is also evaluated with every digit of its tool results drawn
anew, and without a tool. Every evaluation is of the same held-out problems.

The bars are the demo's promise: accuracy at most 0.5 before RL and at least 0.9 after, tool errors in correct trajectories at
most a fifth of what they were, and at most 0.3 accuracy under either control; each must hold for the worst seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.config import load_toml, validate
from strop.pipeline.run import train
from strop.pipeline.sweep import Children
from strop.recipe.recipe import Recipe, resolve
from strop.reports.html import render
from strop.reports.number_format import Table, Unit
from strop.reports.plots import drawings_of
from strop.reports.trackers import Progress
from strop.run_directory import RunDirectory, read_lines, write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
COMMAND = "make experiments-demo"
ARMS = ("grpo_roc", "grpo_g", "grpo_2g", "sft_continued")
CURVES = ("rollout/accuracy", "rollout/tool_error_rate_correct", "rollout/length_tokens_mean", "policy/entropy_nats")


async def run_seed(seed: int, runs: Path, threads: int) -> dict[str, Any]:
    """Every arm of one seed, each a resumable run below `runs`; their evaluations and curves."""
    tree = resolve(load_toml(ROOT / "recipes" / "demo.toml", [f"seed={seed}", f"threads={threads}"]))
    stages = tree["stages"]
    controls = {name: {**stages["after"], "tools": name} for name in ("noise", "none")}
    main = await _run(tree, {**stages, **controls}, runs / f"seed-{seed}-grpo_roc")
    results: dict[str, Any] = {"grpo_roc": main}
    start = {**stages["base"], "path": str((runs / f"seed-{seed}-grpo_roc" / "stages" / "sft" / "model").resolve())}
    del start["tiny"], start["demonstrator"]
    rl, after = stages["rl"], stages["after"]
    for name, group_size in (("grpo_g", rl["group_size"]), ("grpo_2g", 2 * rl["group_size"])):
        arm = {"sft": start, "rl": {**rl, "method": "grpo", "group_size": group_size}, "after": after}
        results[name] = await _run(tree, arm, runs / f"seed-{seed}-{name}")
    tokens = sum(result["rl_tokens"] for result in [main])
    sft = stages["sft"]
    mean_tokens = main["sft_tokens"] / sft["num_demonstrations"]
    steps = math.ceil(tokens / (mean_tokens * sft["batch_size"]))
    continued = {"start": start, "rl": {**sft, "init": "start", "steps": steps}, "after": after}
    results["sft_continued"] = await _run(tree, continued, runs / f"seed-{seed}-sft_continued")
    return results


async def _run(tree: Mapping[str, Any], stages: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    recipe = validate(Recipe, {**tree, "name": directory.name, "stages": stages}, place=directory.name)
    started = time.perf_counter()
    result = await train(recipe, directory, progress=Progress(), command=COMMAND)
    run = result.run
    lines = [line for line in read_lines(run.metrics) if line["stage"] == "rl"]
    return {
        "time_s": time.perf_counter() - started,
        "evaluations": {figures["stage"]: figures for figures in result.evaluations},
        "curves": {name: [(line["step"], line[name]) for line in lines if name in line] for name in CURVES},
        "rl_tokens": sum(_num_tokens(run.stage("rl").rollouts(line["step"])) for line in lines),
        "sft_tokens": _num_demonstrated(run),
    }


def _num_tokens(path: Path) -> int:
    """Prompts, completions and observations of the rollouts in `path`."""
    return sum(_length(line["rollout"]["trajectory"]) for line in read_lines(path))


def _num_demonstrated(run: RunDirectory) -> int:
    rows = read_lines(run.stage("sft").path / "data" / "demonstrations.jsonl")
    return sum(_length(row["trajectory"]) for row in rows)


def _length(trajectory: Mapping[str, Any]) -> int:
    turns = trajectory["turns"]
    return len(trajectory["prompt_ids"]) + sum(len(turn["completion"]["ids"]) + len(turn["observation_ids"]) for turn in turns)


def summarise(by_seed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of every seed and arm, and the bars for the worst seed."""
    figures: dict[str, Any] = {}
    for seed, arms in by_seed.items():
        figures[seed] = {
            arm: {
                stage: {key: evaluation[key] for key in _SHOWN if key in evaluation}
                for stage, evaluation in arms[arm]["evaluations"].items()
            }
            for arm in ARMS
        }
    main = [figures[seed]["grpo_roc"] for seed in figures]
    error_ratio = max(each["after"]["tool_error_rate_correct"] / each["before"]["tool_error_rate_correct"] for each in main)
    values = {
        "accuracy_before": (max(each["before"]["accuracy"] for each in main), "<=", 0.5),
        "accuracy_after": (min(each["after"]["accuracy"] for each in main), ">=", 0.9),
        "tool_errors_after_over_before": (error_ratio, "<=", 0.2),
        "accuracy_with_noise_for_results": (max(each["noise"]["accuracy"] for each in main), "<=", 0.3),
        "accuracy_without_tools": (max(each["none"]["accuracy"] for each in main), "<=", 0.3),
    }
    bars = {
        name: {"value": value, "bar": f"{sign} {bar}", "holds": value <= bar if sign == "<=" else value >= bar}
        for name, (value, sign, bar) in values.items()
    }
    curves = {seed: {arm: arms[arm]["curves"] for arm in ARMS if arm != "sft_continued"} for seed, arms in by_seed.items()}
    times = {seed: {arm: round(arms[arm]["time_s"], 1) for arm in ARMS} for seed, arms in by_seed.items()}
    return {"command": COMMAND, "bars": bars, "figures": figures, "time_s": times, "curves": curves}


_SHOWN = ("accuracy", "accuracy_low", "accuracy_high", "tool_error_rate", "tool_error_rate_correct", "length_tokens_mean")


def table(results: Mapping[str, Any]) -> str:
    """One row per seed, arm and evaluation, then the bars."""
    rows = [
        f"{'seed':>4}  {'arm':<14} {'evaluation':<10} {'accuracy':>8}  {'95% interval':<16}"
        f" {'tool errors (correct)':>21} {'tokens':>7}"
    ]
    for seed, arms in results["figures"].items():
        for arm, evaluations in arms.items():
            for stage, each in evaluations.items():
                interval = f"[{each['accuracy_low']:.3f}, {each['accuracy_high']:.3f}]"
                rows.append(
                    f"{seed:>4}  {arm:<14} {stage:<10} {each['accuracy']:>8.3f}  {interval:<16}"
                    f" {each.get('tool_error_rate_correct', math.nan):>21.4f} {each['length_tokens_mean']:>7.1f}"
                )
    rows.append("")
    for name, bar in results["bars"].items():
        rows.append(f"{name:<34} {bar['value']:>7.3f}  {bar['bar']:<7} {'holds' if bar['holds'] else 'DOES NOT HOLD'}")
    return "\n".join(rows)


def page(results: Mapping[str, Any]) -> str:
    """The arms' curves side by side, and every evaluation in a table."""
    curves = {
        metric: {
            arm: [arms[arm][metric] for arms in results["curves"].values() if arms[arm][metric]]
            for arm in ARMS
            if arm != "sft_continued"
        }
        for metric in CURVES
    }
    rows = tuple(
        (f"{arm}, {stage}, seed {seed}", *(f"{each[key]:.3f}" if key in each else "–" for key in _SHOWN))
        for seed, arms in results["figures"].items()
        for arm, evaluations in arms.items()
        for stage, each in evaluations.items()
    )
    return render(
        "compare.html.j2",
        title="The demo: GRPO-RoC and its controls",
        figures=Table(columns=("evaluation", *_SHOWN), rows=rows),
        lead="Each arm starts from the same cold start of its seed; sft_continued has no rollouts, so it has no curve."
        " GRPO runs with its own defaults: token mean, tied groups kept.",
        drawings=drawings_of(curves, units={"rollout/accuracy": Unit.PERCENT, "rollout/tool_error_rate_correct": Unit.PERCENT}),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "experiments-demo")
    parser.add_argument("--parallel", type=int, default=2, help="seeds at a time, one thread each")
    parser.add_argument("--one-seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one_seed is not None:
        result = asyncio.run(run_seed(options.one_seed, options.runs, threads=1))
        write_json(options.runs / f"seed-{options.one_seed}.json", result)
        return 0
    waiting = list(options.seeds)
    with Children() as children:
        while waiting or children.running:
            while waiting and len(children.running) < options.parallel:
                seed = waiting.pop(0)
                command = [sys.executable, __file__, "--runs", str(options.runs), "--one-seed", str(seed)]
                children.start(str(seed), command, options.runs / f"seed-{seed}.log")
            for ended in children.wait(at_most_s=60.0):
                if ended.status:
                    print(f"seed {ended.key} failed: {options.runs / f'seed-{ended.key}.log'} says why", file=sys.stderr)
                    return 1
    by_seed = {str(seed): json.loads((options.runs / f"seed-{seed}.json").read_text()) for seed in options.seeds}
    results = summarise(by_seed)
    write_json(RESULTS / "demo.json", results)
    write_text(RESULTS / "demo.html", page(results))
    text = table(results)
    write_text(RESULTS / "demo.txt", text + "\n")
    print(text)
    return 0 if all(bar["holds"] for bar in results["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
