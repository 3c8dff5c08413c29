"""Writes the rows that the experiments on whole pipelines train on: sums, thoughts in two languages, remarks and pairs of them.

Every file is a pure function of its arguments, so that a second call writes the same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reward_model import NOUNS, POLITE, RUDE, pairs, response

from strop.run_directory import write_text
from strop.tasks import Split, make_tasks
from strop.tasks.generated import ArithmeticTasks

Row = Mapping[str, Any]

GRADES = range(2, 7)
"""Operands of a sum: the more, the harder."""
STEP_WORDS = {"en": ("now I add", "which makes"), "ru": ("теперь сложу", "получится")}
WRONG_STEPS = {"en": 0.3, "ru": 0.1}
"""Share of the demonstrated steps whose result is wrong, by the language that they are written in."""
MOST_REMARKS = 10
SHARES_LONGER = {"biased": 0.8, "always": 1.0, "clean": 0.5, "noisy-always": 1.0, "noisy-clean": 0.5}
"""Share of the pairs in which the chosen response is the longer one, by arm."""
SHARES_POLITE = {"noisy-always": 0.75, "noisy-clean": 0.75}
"""Share of the pairs in which the chosen response is the polite one, by arm; all of the others."""


def graded_sums(split: Split, *, num_of_grade: int) -> list[Row]:
    """Sums and differences of each grade in turn, all of them different."""
    rows: dict[str, Row] = {}
    for grade in GRADES:
        config = ArithmeticTasks(num_terms=grade, operators=("+", "-"), wording="{expression}")
        source = make_tasks(config, seed=grade, split=split)
        of_grade: dict[str, Row] = {}
        index = 0
        while len(of_grade) < num_of_grade:
            task = source.task(index)
            facts = {**task.facts, "grade": str(grade)}
            of_grade[task.question] = _row(f"grade-{grade}/{task.question}", task.question, task.answer, facts)
            index += 1
        rows |= of_grade
    return list(rows.values())


def thoughts(num: int, *, seed: int) -> list[Row]:
    """Sums of four digits with a demonstrated thought in steps, the language of each by a coin; some results are wrong."""
    source = make_tasks(ArithmeticTasks(num_terms=4, max_digits=1, operators=("+",)), seed=seed, split="train")
    draw = random.Random(seed)
    rows = []
    for index in range(num):
        task = source.task(index)
        expression = task.facts["expression"]
        facts = {"response": thought([int(digit) for digit in expression.split("+")], draw)}
        rows.append(_row(f"{index}/{expression}", expression, task.answer, facts))
    return rows


def thought(digits: list[int], draw: random.Random) -> str:
    """What a demonstrator thinks and answers: a wrong step is carried on, so that the answer is wrong with it."""
    total, steps = digits[0], []
    for digit in digits[1:]:
        language = draw.choice(list(STEP_WORDS))
        is_wrong = draw.random() < WRONG_STEPS[language]
        result = total + digit + (draw.choice((-2, -1, 1, 2)) if is_wrong else 0)
        adds, makes = STEP_WORDS[language]
        steps.append(f"{adds} {total}+{digit} {makes} {result}")
        total = result
    return f"<reason>{'. '.join(steps)}.</reason><answer>\\boxed{{{total}}}</answer>"


def remarks(num: int, *, seed: int) -> list[Row]:
    """Questions with a demonstrated list of 2 to `MOST_REMARKS` remarks, of which one is polite or rude by a coin."""
    draw = random.Random(seed)
    return [
        _row(
            f"{seed}/{number}",
            f"what of the {draw.choice(NOUNS)} {number}",
            "a polite answer",  # a task has to have one; what is right is said by pipelines_truth
            {"response": response(draw, draw.choice((POLITE, RUDE)), draw.randrange(1, MOST_REMARKS))},
        )
        for number in range(num)
    ]


def write_rows(directory: Path) -> None:
    """Every file that a recipe of experiments/pipelines/ reads."""
    _write(directory / "sums-demonstrated.jsonl", graded_sums("train", num_of_grade=1200))
    _write(directory / "sums-train.jsonl", graded_sums("train", num_of_grade=100))
    _write(directory / "sums-test.jsonl", graded_sums("test", num_of_grade=40))
    _write(directory / "thoughts.jsonl", thoughts(4000, seed=0))
    _write(directory / "remarks-train.jsonl", remarks(2000, seed=0))
    _write(directory / "remarks-test.jsonl", remarks(100, seed=1))
    for arm, share in SHARES_LONGER.items():
        _write(
            directory / f"pairs-{arm}.jsonl",
            map(asdict, pairs(1200, seed=0, share_longer=share, share_polite=SHARES_POLITE.get(arm, 1.0))),
        )


def _row(name: str, question: str, answer: str, facts: Mapping[str, str]) -> Row:
    return {"id": name, "question": question, "answer": answer, "source": "experiments", "facts": dict(facts)}


def _write(path: Path, rows: Iterable[Row]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
