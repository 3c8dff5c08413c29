"""experiments/grader_agreement.py: what a response answers, and how often judges agree on it."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import grader_agreement


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So 3, thus \boxed{\frac{1}{2}}, by $x = 4$.", r"\frac{1}{2}"),
        (r"From $x = 4$ and \(y = 5\) follow 9 steps.", "y = 5"),
        (r"Hence \[ 2^3 = 8 \] in 4 steps", "2^3 = 8"),
        ("She has 3, then 1,200 left.", "1,200"),
        ("I do not know.", None),
    ],
)
def test_the_answer_is_the_last_box_else_the_last_formula_else_the_last_number(text, answer):
    assert grader_agreement.answer_of(text) == answer


def test_judges_agree_where_both_accept_or_both_reject():
    pairs = [("5", "5"), ("5", "5 a"), ("2", r"\sqrt{4}"), ("2", "3"), ("2", "3")]
    verdicts = {judge: asyncio.run(grader_agreement.verdicts_of(pairs, judge)) for judge in ("dr_grpo", "form")}
    assert verdicts == {"dr_grpo": [True, True, False, False, False], "form": [True, False, True, False, False]}
    assert grader_agreement.agreement(pairs, verdicts) == {
        "dr_grpo, form": {
            "num": 5,
            "agree": 3,
            "both_accept": 1,
            "only_dr_grpo": [("5", "5 a")],
            "only_form": [("2", r"\sqrt{4}")],
        }
    }
