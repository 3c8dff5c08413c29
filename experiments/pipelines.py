"""Do whole pipelines do what their papers say? Seven parts at small scale, each by seeds.

    make experiments-pipelines                 all of them
    make experiments-pipelines ONLY=stages     one: stages, hacking, hacking-again, hacking-noisy, language, ppo or distil

Each part can be run alone, and a second call goes on where the first ended. What was expected, and what could be seen at all,
was written down first: hypotheses/pipelines.md. Writes results/pipelines/<part>.{json,txt} and drawings, and
results/pipelines.json with the bars of all parts that are there; with --pilot, of one seed that is not among those of the
experiment, into pilots/ beside them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pipelines_distil
import ppo_lambda
from pipelines_drawings import Metrics, Rungs, across
from pipelines_measures import Difference, Runs, Side, bars, by_grade, judged, spent, told
from pipelines_rows import write_rows
from provenance import provenance

from strop.errors import UserError
from strop.pipeline.sweep import Children, run_sweep
from strop.pipeline.sweep_file import load_sweep
from strop.reports.plots import draw
from strop.reports.sweep import SweepConsole
from strop.run_directory import RunDirectory, read_json, write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "experiments" / "pipelines"
RESULTS = ROOT / "experiments" / "results"
SEEDS = (0, 1, 2)
PILOT_SEED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One experiment: the sweep that it runs (None: it has a program of its own), what is compared, and what is drawn."""

    name: str
    sweep: Path | None
    evaluations: tuple[str, ...]
    differences: tuple[Difference, ...]
    drawings: tuple[Metrics | Rungs, ...]
    seeds: tuple[int, ...] = SEEDS
    further: Callable[[Runs], dict[str, Any]] = lambda runs: {}


def _of(arm: str, stage: str) -> Side:
    return Side(arm=arm, stage=stage)


STAGES = ("stage1", "stage2", "stage3")
AFTER_STAGES = ("after_sft", *(f"after_{stage}" for stage in STAGES))
PUSHED = ("short", "long")


def _hacking(
    name: str, biased: str, *, of_short: str, of_clean: str, since: str = "after_short", seeds: tuple[int, ...] = SEEDS
) -> Part:
    """A reward model that length pleases against one that is indifferent to it, each pushed on; judged `since` there."""
    return Part(
        name=name,
        sweep=RECIPES / f"{name}.toml",
        seeds=seeds,
        evaluations=("before", "after_short", "after_long"),
        differences=(
            Difference(figure="score", first=_of(biased, since), second=_of(biased, "after_long"), is_deciding=True),
            Difference(
                figure="true", first=_of(biased, since), second=_of(biased, "after_long"), expected="less", is_deciding=True
            ),
            Difference(figure="true", first=_of(biased, "before"), second=_of(biased, "after_short"), expected=of_short),
            Difference(figure="true", first=_of("clean", since), second=_of("clean", "after_long"), expected=of_clean),
            Difference(figure="true", first=_of(biased, "after_long"), second=_of("clean", "after_long")),
        ),
        drawings=(
            Metrics(
                name="",
                title="share of its range in the run",
                metrics={"reward/score_mean": "the model's score", "reward/true_mean": "true reward"},
                stages=PUSHED,
                is_share=True,
                is_together=True,
            ),
            Metrics(
                name="true",
                title="true reward in training",
                metrics={"reward/true_mean": "true reward"},
                stages=PUSHED,
            ),
            Metrics(
                name="remarks",
                title="remarks a response",
                metrics={"reward/remarks_mean": "remarks"},
                stages=PUSHED,
            ),
        ),
        further=lambda runs: {"judge": {arm: _quality(by_seed) for arm, by_seed in runs.items()}},
    )


PARTS: Mapping[str, Part] = {
    "stages": Part(
        name="stages",
        sweep=RECIPES / "stages.toml",
        evaluations=AFTER_STAGES,
        differences=tuple(
            Difference(figure="accuracy", first=_of("base", before), second=_of("base", after), is_deciding=True)
            for before, after in pairwise(AFTER_STAGES)
        ),
        drawings=(
            Metrics(
                name="",
                title="accuracy in training",
                metrics={"rollout/accuracy": "accuracy"},
                stages=STAGES,
                is_share=True,
            ),
            Rungs(
                name="evaluated",
                title="accuracy (0 cold start, 1 to 3: after each stage)",
                evaluations=AFTER_STAGES,
            ),
            Metrics(
                name="length",
                title="response length in training, tokens",
                metrics={"rollout/length_tokens_mean": "length"},
                stages=STAGES,
            ),
            Metrics(
                name="truncated",
                title="truncated in training",
                metrics={"rollout/truncated_fraction": "truncated"},
                stages=STAGES,
                is_share=True,
            ),
        ),
        further=lambda runs: {"accuracy_by_grade": {stage: by_grade(runs["base"], stage) for stage in AFTER_STAGES}},
    ),
    "hacking": _hacking("hacking", "biased", of_short="more", of_clean="less"),
    "hacking-again": _hacking("hacking-again", "always_longer", of_short="less", of_clean="more", seeds=(3, 4, 5)),
    "hacking-noisy": _hacking(
        "hacking-noisy", "always_longer", of_short="less", of_clean="more", since="before", seeds=(6, 7, 8)
    ),
    "language": Part(
        name="language",
        sweep=RECIPES / "language.toml",
        evaluations=("before", "after"),
        differences=(
            Difference(
                figure="language", first=_of("accuracy_alone", "after"), second=_of("with_language", "after"), is_deciding=True
            ),
            Difference(
                figure="accuracy",
                first=_of("accuracy_alone", "after"),
                second=_of("with_language", "after"),
                expected="not less",
                is_deciding=True,
            ),
            Difference(
                figure="language",
                first=_of("accuracy_alone", "before"),
                second=_of("accuracy_alone", "after"),
                expected="less",
            ),
            Difference(figure="accuracy", first=_of("with_language", "before"), second=_of("with_language", "after")),
        ),
        drawings=(
            Metrics(
                name="",
                title="share of English words in training",
                metrics={"reward/language_mean": "consistency"},
                stages=("rl",),
                is_share=True,
            ),
            Metrics(
                name="accuracy",
                title="accuracy in training",
                metrics={"reward/accuracy_mean": "accuracy"},
                stages=("rl",),
                is_share=True,
            ),
        ),
    ),
    "ppo": Part(
        name="ppo",
        sweep=ppo_lambda.SWEEP,
        evaluations=("before", "after"),
        differences=(
            Difference(
                figure="accuracy", first=_of("ppo_lambda_0_95", "after"), second=_of("ppo_lambda_1", "after"), is_deciding=True
            ),
            Difference(figure="accuracy", first=_of("ppo_lambda_1", "after"), second=_of("grpo", "after")),
            Difference(figure="accuracy", first=_of("ppo_lambda_0_95", "after"), second=_of("grpo", "after")),
        ),
        drawings=tuple(
            Metrics(
                name=name,
                title=metric,
                metrics={metric: metric},
                stages=("rl",),
                is_share=metric == "rollout/accuracy",
            )
            for name, metric in (("", "rollout/accuracy"), ("length", "rollout/length_tokens_mean"))
        ),
        seeds=(3, 4, 5, 6, 7),  # 0, 1 and 2 were run before this part was written
        further=lambda runs: {"spent": spent(runs, "rl")},
    ),
    "distil": Part(
        name="distil",
        sweep=None,
        evaluations=("after_teacher", *(f"after_{arm}" for arm in ("distilled", "demonstrated", "demonstrated_right"))),
        differences=(
            Difference(
                figure="accuracy",
                first=_of("students", "after_demonstrated"),
                second=_of("students", "after_distilled"),
                is_deciding=True,
            ),
            Difference(
                figure="accuracy",
                first=_of("students", "after_demonstrated_right"),
                second=_of("students", "after_distilled"),
                is_deciding=True,
            ),
            Difference(figure="accuracy", first=_of("students", "after_distilled"), second=_of("students", "after_teacher")),
        ),
        drawings=(
            Rungs(
                name="",
                title="0 all, 1 no guesses, 2 distilled, 3 the teacher",
                evaluations=("after_demonstrated", "after_demonstrated_right", "after_distilled", "after_teacher"),
            ),
        ),
        further=lambda runs: {
            "tokens": {str(seed): read_json(run.path / "tokens.json") for seed, run in runs["students"].items()}
        },
    ),
}
"""By the name that ONLY takes."""


def _quality(by_seed: Mapping[int, RunDirectory]) -> dict[str, Any]:
    """What the reward models were measured to be, on pairs of their own distribution that they had not seen."""
    return {str(seed): read_json(run.stage("judge").path / "quality.json") for seed, run in by_seed.items()}


def run_part(part: Part, seeds: Sequence[int], runs: Path, *, jobs: int, overrides: Sequence[str] = ()) -> Runs | None:
    """Every arm's run of every seed, made or gone on with in `runs`; None where one failed, which was said then."""
    write_rows(runs.parent / "rows")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(RECIPES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    if part.sweep is None:
        return _run_distil(seeds, runs, jobs=jobs, overrides=overrides)
    sweep = load_sweep(write_sweep(part.sweep, seeds, runs), overrides)
    with SweepConsole() as progress:
        log = run_sweep(sweep, runs, jobs=jobs, progress=progress, command=_command(part))
    if log.failures:
        return None
    return {arm.name: {run.seed: RunDirectory(runs / run.name) for run in arm.runs} for arm in log.arms}


def write_sweep(path: Path, seeds: Sequence[int], runs: Path) -> Path:
    """The sweep in `path` with these seeds and with the places of its recipe and rows, written beside its runs."""
    text = re.sub(r"(?m)^seeds = .*$", f"seeds = {list(seeds)}", path.read_text(encoding="utf-8"))
    text = re.sub(r'(?m)^recipe = "(.*)"$', lambda found: f'recipe = "{path.parent / found[1]}"', text)
    text = text.replace("{rows}", str((runs.parent / "rows").resolve()))
    filled = runs.parent / f"{runs.name}.toml"
    write_text(filled, text)
    return filled


def _run_distil(seeds: Sequence[int], runs: Path, *, jobs: int, overrides: Sequence[str]) -> Runs | None:
    waiting, has_failed = list(seeds), False
    more = [word for one in overrides for word in ("--set", one)]
    with Children() as children:
        while waiting or children.running:
            while waiting and len(children.running) < jobs:
                seed = waiting.pop(0)
                command = [sys.executable, pipelines_distil.__file__, "--seed", str(seed), "--runs", str(runs), *more]
                children.start(str(seed), command, runs / f"seed-{seed}.log")
            for ended in children.wait(at_most_s=60.0):
                if ended.status:
                    has_failed = True
                    print(f"seed {ended.key} failed: {runs / f'seed-{ended.key}.log'} says why", file=sys.stderr)
    return None if has_failed else {"students": {seed: RunDirectory(runs / f"seed-{seed}") for seed in seeds}}


def summarise(part: Part, runs: Runs, *, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The figures of every arm and seed, the comparisons and what they show, the bars, and the curves."""
    differences = [judged(runs, each) for each in part.differences]
    seeds = sorted(next(iter(runs.values())))
    return {
        "command": _command(part),
        "seeds": seeds,
        "is_pilot": len(seeds) < 2,
        "changes": list(overrides),
        "provenance": provenance((run for by_seed in runs.values() for run in by_seed.values()), ROOT),
        "bars": bars(differences),
        "differences": differences,
        "figures": told(runs, part.evaluations),
        **part.further(runs),
        "curves": {
            metric: {
                arm: {str(seed): across(run, drawn.stages, metric) for seed, run in by_seed.items()}
                for arm, by_seed in runs.items()
            }
            for drawn in part.drawings
            if isinstance(drawn, Metrics)
            for metric in drawn.metrics
        },
    }


def _command(part: Part) -> str:
    return f"make experiments-pipelines ONLY={part.name}"


def table(part: Part, results: Mapping[str, Any]) -> str:
    """One row a figure of an evaluation of an arm, by seed; then the comparisons."""
    rows = [part.name]
    if results["is_pilot"]:
        rows.append(f"A PILOT of one seed, which decides nothing. Changed: {', '.join(results['changes']) or 'nothing'}.")
    rows += ["", f"{'figure':<26} {'arm, evaluation':<38} {'mean':>8}  by seed {results['seeds']}"]
    evaluated = [(arm, stage, each) for arm, stages in results["figures"].items() for stage, each in stages.items()]
    for name in dict.fromkeys(name for _, _, each in evaluated for found in each.values() for name in found):
        if name in _NOT_IN_TABLE:
            continue
        for arm, stage, each in evaluated:
            values = [found[name] for found in each.values() if name in found]
            if values:
                shown = " ".join(f"{value:.3f}" for value in values)
                rows.append(f"{name:<26} {f'{arm}, {stage}':<38} {sum(values) / len(values):>8.3f}  {shown}")
    rows += ["", f"{'difference':<66} {'mean':>7}  {'95 %, bootstrap':<18} {'95 %, Student':<18} {'expected':<9} shown"]
    for each in results["differences"]:
        name = f"{'* ' if each['is_deciding'] else '  '}{each['name']}"
        drawn = f"[{each['low']:+.3f}, {each['high']:+.3f}]"
        student = f"[{each['student_low']:+.3f}, {each['student_high']:+.3f}]" if "student_low" in each else "–"
        rows.append(f"{name:<66} {each['mean']:>+7.3f}  {drawn:<18} {student:<18} {each['expected']:<9} {each['verdict']}")
    rows.append("* decides. The bootstrap draws seeds, then problems of each; of one seed, problems alone.")
    return "\n".join(rows)


_NOT_IN_TABLE = ("accuracy_low", "accuracy_high", "num_tasks", "k", "void_fraction", "time_s")


def write_drawings(part: Part, runs: Runs, directory: Path) -> None:
    """The part's drawings as <part>.svg and <part>-<name>.svg."""
    for drawing in part.drawings:
        name = f"{part.name}-{drawing.name}" if drawing.name else part.name
        write_text(directory / f"{name}.svg", str(draw(drawing.plot(runs), is_standalone=True)) + "\n")


def write_results(part: Part, runs: Runs, directory: Path, *, overrides: Sequence[str] = ()) -> str:
    """The part's files in `directory`; its table."""
    results = summarise(part, runs, overrides=overrides)
    write_json(directory / f"{part.name}.json", results)
    write_drawings(part, runs, directory)
    text = table(part, results)
    write_text(directory / f"{part.name}.txt", text + "\n")
    return text


def write_together(results: Path) -> None:
    """pipelines.json: of each part that is there its seeds, bars and comparisons, and which parts were not run."""
    found = {name: results / "pipelines" / f"{name}.json" for name in PARTS}
    there = {name: read_json(path) for name, path in found.items() if path.exists()}
    together = {f"{name}, {bar}": what for name, each in there.items() for bar, what in each["bars"].items()}
    if (reward_model := results / "reward-model.json").exists():
        planted = read_json(reward_model)
        told = {**planted["bars"]["lowest_auc"], "from": planted["command"]}
        together["reward model, lowest AUC on a planted preference"] = told
    write_json(
        results / "pipelines.json",
        {
            "command": "make experiments-pipelines",
            "bars": together,
            "seeds": {name: each["seeds"] for name, each in there.items()},
            "not_run": [name for name in PARTS if name not in there],
            "differences": {name: each["differences"] for name, each in there.items()},
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(PARTS), help="one of them; all without it")
    parser.add_argument("--seeds", type=int, nargs="+", help="two or more, instead of each part's own")
    parser.add_argument("--pilot", action="store_true", help=f"one run of each arm, of seed {PILOT_SEED}")
    parser.add_argument("--set", action="append", default=[], help="of a pilot: a key of the recipe, as in stages.rl.steps=4")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "pipelines", help="holds a directory for each part")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures are written")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    options = parser.parse_args(arguments)
    if options.set and not options.pilot:
        parser.error("--set is for a pilot: the experiment is what its files say. Give --pilot, too.")
    if options.seeds is not None and len(options.seeds) < 2 and not options.pilot:
        parser.error("one seed decides nothing. Give two or more seeds, or --pilot.")
    has_failed = False
    for name in [options.only] if options.only else list(PARTS):
        part, directory = PARTS[name], options.results / "pipelines"
        seeds, runs = options.seeds or part.seeds, options.runs / name
        if options.pilot:
            seeds, runs, directory = [PILOT_SEED], options.runs / f"{name}-pilot", directory / "pilots"
        try:
            made = run_part(part, seeds, runs, jobs=options.jobs, overrides=options.set)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if made is None:
            has_failed = True
            continue
        print(write_results(part, made, directory, overrides=options.set) + "\n")
        if not options.pilot:
            write_together(options.results)
    return 1 if has_failed else 0  # a hypothesis that is not shown is a result, too


if __name__ == "__main__":
    sys.exit(main())
