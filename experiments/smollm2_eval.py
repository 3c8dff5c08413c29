"""SmolLM2-135M-Instruct on 200 GSM8K and 100 MATH-500 problems, through the embedded engine and through vLLM, in pairs.

    make experiments-smollm2-eval DATA=path/with/gsm8k/and/math500

Hypothesis, written before any run: the two engines sample from the same distribution with other roundings and other draws, so
on each benchmark the 95 % interval of the paired difference in accuracy holds 0, and so does that in length.

Each evaluation is a run directory below --runs and goes on where it was stopped. Figures go to results/smollm2-eval.{json,txt}.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.evaluation.compare import Comparison, compare
from strop.evaluation.results import read_eval
from strop.pipelines.evaluate import evaluate_model
from strop.pipelines.load import load_recipe
from strop.reports.evaluations import comparison_table
from strop.reports.progress import Silent
from strop.runs import write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
COMMAND = "make experiments-smollm2-eval DATA=path/with/gsm8k/and/math500"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SETTINGS = (
    "prompt=short",
    "tools.python.name=python",
    "engine.max_length=2048",
    "engine.slots=16",
    "limits.max_turns=3",
    "limits.max_response_tokens=64",
    "sampling.max_tokens=320",
    "reward.needs_box=false",  # it rarely writes the box; the answer tag is enough here
)


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="holds gsm8k/test.jsonl and math500/test.jsonl")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures are written")
    parser.add_argument("--num", type=int, help="problems of each benchmark; 200 and 100 by default")
    parser.add_argument("--k", type=int, default=1, help="attempts at each problem")
    options = parser.parse_args(arguments)
    for benchmark in BENCHMARKS:
        rows = options.data / benchmark.folder / "test.jsonl"
        if not rows.exists():
            print(f"error: no {rows}. Give --data (make: DATA=) the directory that holds it.", file=sys.stderr)
            return 2
    engines = {
        "embedded": ("engine.kind=torch",),
        "vllm": ("engine.kind=vllm", f'engine.python="{options.vllm_python.absolute()}"', "engine.eager=true"),
    }
    compared = {}
    for benchmark in BENCHMARKS:
        places = []
        for engine, words in engines.items():
            places.append(options.runs / f"smollm2-eval-{benchmark.stage}-{engine}-{options.num or benchmark.num}x{options.k}")
            asyncio.run(_evaluate(options, benchmark, words, places[-1]))
            print(f"{places[-1].name}: done", flush=True)
        compared[benchmark.stage] = compare(*(read_eval(place) for place in places)), places
    return _tell(options, compared)


async def _evaluate(options: argparse.Namespace, benchmark: Benchmark, engine: Sequence[str], place: Path) -> None:
    rows = (options.data / benchmark.folder / "test.jsonl").resolve()
    tasks = f'{{kind="jsonl", path="{rows}", test_path="{rows}", {benchmark.columns}}}'
    sizes = (f"num_tasks={options.num or benchmark.num}", f"k={options.k}", f"tasks={tasks}")
    overrides = [*SETTINGS, *engine, f"stages.model.tasks={tasks}", *(f"stages.{benchmark.stage}.{each}" for each in sizes)]
    recipe = load_recipe(ROOT / "recipes" / "eval" / "math.toml", overrides, name=place.name)
    await evaluate_model(recipe, options.model, place, stage=benchmark.stage, progress=Silent())


def _tell(options: argparse.Namespace, compared: dict[str, tuple[Comparison, list[Path]]]) -> int:
    """Write and print what was found; 1 where the hypothesis does not hold."""
    results: dict[str, Any] = {"command": COMMAND, "model": MODEL, "settings": list(SETTINGS), "benchmarks": {}}
    lines = []
    for name, (comparison, places) in compared.items():
        holds = {
            each.metric: each.paired.difference.low <= 0 <= each.paired.difference.high
            for each in comparison.metrics
            if each.metric in ("accuracy", "length_tokens")
        }
        found = [dict(read_eval(place).result) for place in places]
        results["benchmarks"][name] = {
            "embedded": found[0],
            "vllm": found[1],
            "comparison": comparison.as_json(),
            "interval_holds_0": holds,
        }
        told = ", ".join(f"{metric} {'yes' if held else 'no'}" for metric, held in holds.items())
        lines.append(f"{name}: {comparison.num_shared} problems; the interval of the difference holds 0: {told}")
        for engine, each in zip(("embedded", "vllm"), found, strict=True):
            interval = f"[{each['accuracy_low']:.3f}, {each['accuracy_high']:.3f}]"
            lines.append(f"  {engine:<9} accuracy {each['accuracy']:.3f} {interval}, {each['tokens']} tokens")
        table = comparison_table(comparison)
        lines += ["  " + "".join(f"{cell:<18}" for cell in row).rstrip() for row in (table.columns, *table.rows)]
    write_json(options.results / "smollm2-eval.json", results)
    text = "\n".join(lines) + "\n"
    write_text(options.results / "smollm2-eval.txt", text)
    print(text)
    return 0 if all(all(each["interval_holds_0"].values()) for each in results["benchmarks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
