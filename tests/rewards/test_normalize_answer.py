import time

import pytest

from strop.rewards.math import equal_by_spelling
from strop.rewards.math_text import based, cleaned


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"3\sqrt{13}.", r"3\sqrt{13}"),
        ("1.25.", "1.25"),
        (r"15\mbox{ cm}^2\,", r"15\mbox{ cm}^2"),
        (r"x + 1 \; .~", "x + 1"),
        ("p - q .", "p - q"),
        (r"\text{0.3888}", "0.3888"),
        (r"\displaystyle 72", "72"),
        (r"\displaystyle\frac{1}{2}", r"\frac{1}{2}"),
        (r"\$1,072.00", "1072.00"),
        ("1.25", "1.25"),
        ("and so on...", "and so on..."),
        (r"$\text{Evelyn}$", r"\text{Evelyn}"),
        (r"$\displaystyle p - q$.", "p - q"),
        ("$3$ and $4$", "$3$ and $4$"),
        ("$", "$"),
        ("", ""),
    ],
)
def test_a_full_stop_and_what_wraps_a_number_do_not_matter(answer, expected):
    assert cleaned(answer) == expected


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("18", "18 dollars", True),
        ("18", r"18\text{ cm}", True),
        ("18", r"18 \text{ eggs per day}", True),
        ("18", "19 dollars", None),
        ("18", "$18", True),
        ("0.45", r"45\%", None),  # left to math_verify
        (r"5\text{ cm}", r"5\text{ m}", None),  # a unit is never taken from the label
        ("3", r"\frac{6}{2}", True),
        ("-3", r"-\dfrac{ 6 }{ 2 }", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", "2/4", True),
        (r"\frac{1}{2}", r"-\frac{1}{2}", False),
        (r"\frac{1}{2}", r"\frac{-1}{-2}", True),
        (r"\frac{1}{3}", "0.333333", None),  # somebody may have rounded: left to math_verify
        (r"\frac{1}{0}", r"\frac{2}{0}", None),
        ("3", r"\displaystyle 3", None),
        ("52_8", "52_{8}", True),
        ("52_8", "52_9", False),
        ("40_9", "40_10", False),
        (r"864 \mbox{ inches}^2", r"864 \text{ inches}^{3}", False),
        (r"864 \mbox{ inches}^2", r"864 \text{ inches}", False),
        (r"864 \mbox{ inches}^2", r"864 \text{ inches}^{2}", None),
        ("52_8", "25_8", False),
        ("52_8", "42", None),
        ("x", "y", None),
        ("", "", False),
    ],
)
def test_what_is_plain_is_said_without_algebra(gold, answer, expected):
    assert equal_by_spelling(gold, answer) is expected


def test_a_number_of_another_base_is_its_digits_and_its_base():
    assert based("4210_{5}") == (4210, 5)
    assert based(r"$ 4210 _ { 5 } $.") == (4210, 5)
    assert based("a_5") is None


@pytest.mark.parametrize("unit", [" ", "- ", ".", r"\,", "~ .", r"\text{", r"0\text{a}", "{", "-", "9", " and "])
def test_no_text_takes_long(unit):
    text = unit * (4_000 // len(unit)) + "x"
    started = time.process_time()
    equal_by_spelling(cleaned(text), cleaned("7" + text))
    equal_by_spelling("7", text)
    equal_by_spelling(r"\frac{1}{2}", text[:190] + "/")
    equal_by_spelling(r"\frac{1}{2}", text)
    cleaned(text + unit * 100)
    assert time.process_time() - started < 1.0  # measured: some milliseconds
