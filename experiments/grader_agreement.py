r"""How often do the judges of answers agree on what a real model answers?

    make experiments-grader-agreement DATA=path/with/gsm8k/and/math500

SmolLM2-135M-Instruct answers 100 problems each of GSM8K and MATH-500, four times (the embedded half of smollm2_eval.py). It
follows no form, so its answer is the inside of its last box, else its last formula, else its last number. `dr_grpo` (the grader
that CS336 assignment 5 hands out), strop's default judge `form` and `math_verify` then judge each pair of label and answer.

Hypothesis, written before any run: most answers are wrong to all three, so each two agree on 97 % of the pairs or more; where
they do not, dr_grpo accepts less than the others (an integer written as an expression), or takes a letter for a unit.

The bars: 97 % agreement of each two judges. Figures, and every pair on which they differ, go to results/grader-agreement.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import grader
import smollm2_eval
from provenance import provenance
from smollm2_answers import NUMBER

from strop.answer_text import boxed
from strop.rewards import math_text
from strop.rewards.math import MathPart
from strop.run_directory import RunDirectory, read_lines, write_json, write_text

COMMAND = "make experiments-grader-agreement DATA=path/with/gsm8k/and/math500"
JUDGES = ("dr_grpo", "form", "math_verify")
AGREE_AT_LEAST = 0.97
_FORMULA = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)

Pair = tuple[str, str]  # label, answer


def answer_of(text: str) -> str | None:
    """What a response that follows no form says last."""
    if boxes := boxed(text):
        return boxes[-1].strip()
    formulas = ["".join(found).strip() for found in _FORMULA.findall(text)]
    return next(iter(reversed(formulas or NUMBER.findall(text))), None)


def pairs_of(run: RunDirectory, stage: str, labels: Sequence[str]) -> list[Pair]:
    """The label and the answer of each rollout that has one."""
    pairs = []
    for line in read_lines(run.stage(stage).rollouts(0)):
        trajectory = line["rollout"]["trajectory"]
        answer = answer_of(trajectory["turns"][-1]["completion_text"])
        if answer is not None:
            pairs.append((labels[trajectory["key"]["task_index"]], answer))
    return pairs


async def verdicts_of(pairs: Sequence[Pair], judge: str) -> list[bool]:
    """Whether the judge accepts each answer."""
    part = MathPart(judge=judge, verify_deadline_s=grader.PATIENCE_S)
    part.open(None)
    try:
        return [*await asyncio.gather(*(part.is_same(*pair) for pair in pairs))]
    finally:
        await part.close()


def agreement(pairs: Sequence[Pair], verdicts: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """Of each two judges: on how many pairs they agree, and on which they do not, equal pairs counted once."""
    table = {}
    for first, second in combinations(verdicts, 2):
        both = list(zip(pairs, verdicts[first], verdicts[second], strict=True))
        table[f"{first}, {second}"] = {
            "num": len(both),
            "agree": sum(one == other for _, one, other in both),
            "both_accept": sum(one and other for _, one, other in both),
            f"only_{first}": sorted({pair for pair, one, other in both if one and not other}),
            f"only_{second}": sorted({pair for pair, one, other in both if other and not one}),
        }
    return table


def table_of(results: Mapping[str, Any]) -> str:
    rows = [f"{'':<10} {'judges':<22} {'pairs':>6} {'agree':>6} {'both accept':>12}"]
    for benchmark, table in results["agreement"].items():
        for judges, each in table.items():
            rows.append(f"{benchmark:<10} {judges:<22} {each['num']:>6} {each['agree']:>6} {each['both_accept']:>12}")
            for name in (name for name in each if name.startswith("only_")):
                rows += [f"    {name.replace('_', ' ', 1)}: {answer!r} for {label!r}" for label, answer in each[name]]
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=grader.ROOT / "data", help="holds gsm8k/test.jsonl and math500/test.jsonl")
    parser.add_argument("--model", type=Path, default=grader.ROOT / "models" / "smollm2-135m")
    parser.add_argument("--runs", type=Path, default=grader.ROOT / "runs")
    parser.add_argument("--num", type=int, default=100, help="problems of each benchmark")
    parser.add_argument("--k", type=int, default=4, help="attempts at each problem")
    parser.add_argument("--results", type=Path, default=grader.RESULTS, help="where figures are written")
    options = parser.parse_args(arguments)
    math_text.LIMIT_S = grader.PATIENCE_S
    found: dict[str, Any] = {}
    runs: list[RunDirectory] = []
    for benchmark in smollm2_eval.BENCHMARKS:
        runs.append(RunDirectory(options.runs / f"smollm2-eval-{benchmark.stage}-embedded"))
        asyncio.run(smollm2_eval.evaluate(options, benchmark, ("engine.kind=torch",), runs[-1].path))
        labels = [each.text for each in grader.read_labels(options.data, None) if each.source == benchmark.folder]
        pairs = pairs_of(runs[-1], benchmark.stage, labels)
        found[benchmark.folder] = agreement(pairs, {judge: asyncio.run(verdicts_of(pairs, judge)) for judge in JUDGES})
    bars = {}
    for judges in next(iter(found.values())):
        share = sum(table[judges]["agree"] for table in found.values()) / sum(table[judges]["num"] for table in found.values())
        bars[judges] = {"value": share, "bar": f">= {AGREE_AT_LEAST}", "holds": share >= AGREE_AT_LEAST}
    results = {"command": COMMAND, "bars": bars, "provenance": provenance(runs, grader.ROOT), "agreement": found}
    write_json(options.results / "grader-agreement.json", results)
    write_text(options.results / "grader-agreement.txt", table_of(results))
    print(table_of(results), end="")
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
