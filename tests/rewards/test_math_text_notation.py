"""One notation for answers: signs, style, numbers in words."""

from fractions import Fraction

import pytest

from strop.rewards.math_text import canonical, number_in_words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"The answer is $\left( \dfrac12,\ 1{,}000 \right)$.", r"( \frac{1}{2}, 1,000 )"),
        ("4 2/3", r"\frac{14}{3}"),
        (r"4\frac{2}{3}", r"\frac{14}{3}"),
        ("2½", r"\frac{5}{2}"),
        (r"-0.1\overline{6}", r"\frac{-1}{6}"),
        (r"1.\overline{27}", r"\frac{14}{11}"),
        ("Final Answer: The final answer is $(3,4]$. I hope it is correct.", "(3,4]"),
        (r"$$\boxed{**5**} ✓$$", "5"),
        ("x² + x₁", "x^{2} + x_{1}"),
        (r"\text{The sum is } 5", "The sum = 5"),
        ("is not equal to 5", "is not equal to 5"),
        (r"\{x \in \mathbb{R} \mid x > 2\}", "x > 2"),
        ("５", "5"),
        ("more than 5", "more than 5"),
        ("{1, 2}, {3}", "{1, 2}, {3}"),
        (r"\textcolor{red}{5} \tag{1}", "5"),
        (r"\begin{aligned} x &= 2 + 3 \\ &= 5 \end{aligned}", "x = 2 + 3 = 5"),
        (r"\text{Answer: } y = 2x", "y = 2x"),
        ("答案：5。", "5"),
        (r"\text{It is even}", r"\text{even}"),
        (r"\text{option C}", r"\text{C}"),
        ("5 (five)", "5"),
        ("5 (six)", "5 (six)"),
        (r"2.55 \times 10^{2}", "255"),
        ("1.5e-3", r"\frac{3}{2000}"),
        ("x**2 + 3*x + 2*pi", r"x^2 + 3x + 2\cdot \pi"),
        ("⁶⁵³⁄₂", r"\frac{653}{2}"),
        (r"90\degree", r"90^\circ"),
        ('{"answer": 650}', "650"),
        ("答案是 $(3,4]$。", "(3,4]"),
        ("5<|im_end|>", "5"),
        ("", ""),
    ],
)
def test_one_notation_for_what_a_text_says(text, expected):
    assert canonical(text) == expected


@pytest.mark.parametrize(
    "text", ["**5**", "$5$", "twenty-five", r"\frac{1}{2}", r"\boldsymbol{x} = 5", "2½", r"0.\overline{3}"]
)
def test_a_second_time_changes_nothing(text):
    assert canonical(canonical(text)) == canonical(text)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("zero", 0),
        ("nineteen", 19),
        ("Forty-Two", 42),
        ("two hundred and six", 206),
        ("one thousand two hundred thirty", 1230),
        ("twelve thousand", 12_000),
        ("minus three", -3),
        ("two thirds", Fraction(2, 3)),
        ("a half", Fraction(1, 2)),
        ("two three", None),
        ("twenty twelve", None),
        ("hundred", None),
        ("five apples", None),
        ("5", None),
        ("", None),
    ],
)
def test_numbers_in_words(words, value):
    assert number_in_words(words) == value
