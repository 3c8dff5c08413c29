"""What the judge `form` reads: relations, names, units, bases, words, brackets and matrices."""

import asyncio
import time

import pytest

from strop.rewards import MathReward, make_reward
from strop.rewards.math import MathVerifier
from strop.rewards.math_answers import canonical, pairs_to_compare
from strop.sandbox.protocol import PairVerdict

EQUAL = [
    (r"\$32,\!348", r"f(2) = \$32,\!348"),
    ("5, 120", "120, 5"),
    ("3, 100", "100, 3"),
    ("1, 100", "100, 1"),
    ("100, 200", "200, 100"),
    ("\\{1, 100\\}", "1, 100"),
    ("\\pi r^2 h", "\\pi h r^2"),
    ("\\frac13\\pi r^2 h", "\\frac{\\pi r^2 h}{3}"),
    ("2x + h", "h + 2x"),
    ("2l + 2w", "2w+2l"),
    ("\\frac{1}{2}h", "\\frac{h}{2}"),
    ("5+3m", "3m+5"),
    ("2m", "m+m"),
    ("1.5\\text{ million}", "1500000"),
    ("\\$1", "100 cents"),
    ("\\$0.50", "50 cents"),
    ("\\$36", "36"),
    ("\\$36", "\\$36.00"),
    ("\\$32,\\!348", "32348"),
    ("1, -2", "x=1 or x=-2"),
    ("-2, 3", "x=-2\\text{ or }x=3"),
    ("-2,3", "x=-2, x=3"),
    ("(1,2)", "(x,y)=(1,2)"),
    ("(-\\infty,2)\\cup(3,\\infty)", "x\\in(-\\infty,2)\\cup(3,\\infty)"),
    ("\\{1,2\\}", "x\\in\\{1,2\\}"),
    ("\\mathbb{R}", "(-\\infty,\\infty)"),
    ("p=2q", "q=p/2"),
    ("11,\\! 111,\\! 111,\\! 100", "11,111,111,100"),
    ("10,\\!080", "10080"),
    ("18", "18 dollars per day"),
    ("5", "5 m"),
    ("5", "5 apples"),
    ("45000", "45\\,000"),
    ("3, 5, 7", "7,5,3"),
    ("15\\mbox{ cm}^2", "15 cm^2"),
    ("15\\mbox{ cm}^2", "15"),
    ("10 \\text{ cm}", "10cm"),
    ("72", "$72$"),
    ("72", "$72"),
    ("x=1,2", "x=1 or x=2"),
    ("90^\\circ", "90"),
    ("90", "90^\\circ"),
    ("90^\\circ", "90 degrees"),
    ("3\\sqrt{13}", "3√13"),
    ("\\frac{14}{3}", "4 2/3"),
    ("(3,4]", "3<x\\le 4"),
    ("(3,4]", "3 < x \\leq 4"),
    ("5", "\\boldsymbol{5}"),
    ("(1,-2)", "\\big(1,-2\\big)"),
    (
        "\\begin{pmatrix} -1/3 \\\\ 2/3 \\\\ 5/3 \\end{pmatrix}",
        "\\begin{bmatrix}-\\frac13\\\\\\frac23\\\\\\frac53\\end{bmatrix}",
    ),
    ("72", "The answer is 72"),
    ("72", "The final answer is: $72$."),
    ("x=5", "5"),
    ("x=5", "x = 5"),
    ("5", "x=5"),
    ("45000", "45,000"),
    ("45000", "45{,}000"),
    ("10 \\text{ cm}", "100 mm"),
    ("10 \\text{ cm}", "10"),
    ("10 \\text{ cm}", "10cm"),
    ("864 \\mbox{ inches}^2", "864 square inches"),
    ("5", "2+3=5"),
    ("\\text{Evelyn}", "evelyn"),
    ("east", "\\text{East}"),
    ("\\text{(C)}", "C"),
    ("y = 2x + 3", "2x+3"),
    ("y = 2x + 3", "y=3+2x"),
    ("(2,\\infty)", "x>2"),
    ("(-\\infty, 2) \\cup (3, \\infty)", "x<2 or x>3"),
    ("x \\in [-2,7]", "[-2,7]"),
    ("x \\in [-2,7]", "-2\\le x\\le7"),
    ("52_8", "52_{8}"),
    ("4210_{5}", "4210_5"),
    ("1\\frac{4}{5}", "1.8"),
    ("1\\frac{4}{5}", "9/5"),
    ("137 \\frac{1}{2}", "137.5"),
    ("\\$18.90", "18.90"),
    ("\\$18.90", "18.9 dollars"),
    ("10,\\!080", "10080"),
    ("11,\\! 111,\\! 111,\\! 100", "11111111100"),
    ("\\frac{270}7\\text{ degrees}", "\\frac{270}{7}"),
    ("3, 5, 7", "7,5,3"),
    ("1,-2", "-2,1"),
    ("5.4 \\text{ cents}", "5.4"),
    ("(a+5)(b+2)", "(b+2)(a+5)"),
    ("\\{1\\pm\\sqrt{5},-2\\}", "\\{-2,1\\pm\\sqrt5\\}"),
    ("\\left(\\frac{3}{5},\\frac{8}{3}\\right]", "(0.6, 8/3]"),
    ("5x - 7y + 11z + 4 = 0", "4+5x-7y+11z=0"),
    ("6 - 5i", "-5i+6"),
    ("-\\sqrt{3}", "-√3"),
    ("\\frac{\\sqrt{3}}{3}", "1/\\sqrt{3}"),
    ("x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1", "1+x+x^2+x^3+x^4+x^5+x^6+x^7+x^8"),
    (".0000672", "6.72 \\times 10^{-5}"),
    ("180", "180°"),
    ("50", "50\\%"),
    ("6", "6 \\text{ students}"),
    ("2k", "2 k"),
    ("5r^5", "5 r^5"),
    ("3R^2", "3R^{2}"),
    ("288 \\pi", "288π"),
    ("-2,1", "x=-2, 1"),
    ("18", "18 dollars per day"),
    ("-125", "-125"),
]
UNEQUAL = [
    ("5, 120", "5120"),
    ("3, 100", "3100"),
    ("100, 200", "100200"),
    ("\\pi r^2 h", "\\pi r^2"),
    ("3x+2m", "3x+2"),
    ("x^2+5g", "x^2+5"),
    ("2m", "2s"),
    ("4s", "4"),
    ("6s^2", "6"),
    ("3", "3\\text{ million}"),
    ("24", "24\\text{ dozen}"),
    ("3", "3\\text{ or more}"),
    ("5", "5\\text{ factorial}"),
    ("\\frac12", "\\frac12\\text{ or less}"),
    ("\\$1", "1 cent"),
    ("5", "x=9^{9}+i=1=1=1=1=1=1=1=1=1=1=1=1=1=1=1=1=1=1=1=1"),
    ("3", "3 million"),
    ("10 \\text{ cm}", "10 m"),
    ("1, -2", "x=1 or x=2"),
    ("x=5", "y=5"),
    ("1.5\\text{ million}", "1.5"),
    ("45000", "45001 = 45000"),
    ("45000", "\\neq 45000"),
    ("45000", "\\ge 45000"),
    ("45000", "45001 \\to 45000"),
    ("45000", "45000_8"),
    ("10 \\text{ cm}", "10 m"),
    ("cat", "act"),
    ("\\text{cat}", "act"),
    ("x=5", "y=5"),
    ("5\\text{ cm}", "5 km"),
    ("7", "8=7"),
    ("2", "2!!"),
    ("2", "2_3"),
    ("2", "3=2"),
    ("72", "72 or 73"),
    ("52_8", "52_9"),
    ("(1,2)", "[1,2]"),
    ("(3,4]", "3<x<4"),
    ("(3,4]", "3<x\\le 5"),
    ("5", "x\\ge5"),
    ("5", "x=5 \\text{ or } x=6"),
    ("5 \\text{ cm}^2", "5 cm"),
    ("90^\\circ", "90 cm"),
    ("east", "west"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}2\\\\1\\end{pmatrix}"),
    ("y=2x+3", "y=2x+4"),
    ("5x - 7y + 11z + 4 = 0", "5x - 7y + 11z + 5 = 0"),
    ("5x - 7y + 11z + 4 = 0", "5x - 7y + 11z + 4"),
    ("p - q", "q-p"),
    ("15\\mbox{ cm}^2", "15 cm^3"),
    ("3, 5, 7", "3,5"),
    ("\\text{(C)}", "D"),
    ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}"),
    ("(0,9) \\cup (9,36)", "(0,36)"),
    ("x \\in [-2,7]", "(-2,7)"),
    ("-125", "-125_8"),
    ("2,125", r"n \leq 2,125"),
    (r"15\mbox{ cm}^2", r"15\mbox{ cm}^1"),
    ("5", "5 million"),
    ("5", "5 or 6"),
    ("5", "x = 5 = 6"),
    ("5", ""),
    ("", "5"),
]


@pytest.fixture(scope="module")
def verdict_of():
    verifier = MathVerifier(deadline_s=20.0)
    with asyncio.Runner() as runner:
        yield lambda gold, answer: runner.run(verifier.verify_form(gold, answer))
        runner.run(verifier.close())


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_answers_of_equal_meaning_are_right(verdict_of, gold, answer):
    assert verdict_of(gold, answer) is PairVerdict.EQUAL


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_answers_that_say_something_else_are_wrong(verdict_of, gold, answer):
    assert verdict_of(gold, answer) is not PairVerdict.EQUAL


@pytest.mark.parametrize(
    ("gold", "answer", "pairs"),
    [
        ("(3,4]", r"3<x\le 4", []),
        ("5", "2+3=5", [("5", "2+3")]),
        ("10 cm", "1 m", [("10", "100")]),
        (r"3\sqrt{13}", "3√13", []),
        (r"(1,\frac12)", "(1, 0.5)", [(r"\frac{1}{2}", "0.5")]),
        ("x=5", "y=5", None),
        ("cat", "act", None),
    ],
)
def test_what_is_left_to_compare(gold, answer, pairs):
    assert pairs_to_compare(gold, answer) == pairs


def test_one_notation_for_each_sign():
    assert canonical(r"The answer is $\left( \dfrac12,\ 1{,}000 \right)$.") == r"( \frac{1}{2}, 1,000 )"
    assert canonical("4 2/3") == canonical(r"4\frac{2}{3}") == r"\frac{14}{3}"


@pytest.mark.parametrize(
    "unit", ["(", "{", r"\boldsymbol{", "=", "<", "\\,", "1 ", "x", r"\text{", r"\frac", "-", "1,", "_", "&", r"\cup "]
)
def test_a_hostile_answer_takes_little_time(unit):
    started = time.perf_counter()
    pairs_to_compare("5", (unit * 4_000)[:4_000])
    pairs_to_compare((unit * 4_000)[:4_000], "5")
    pairs_to_compare("5", f"x{unit * 60} = 5")
    assert time.perf_counter() - started < 1.0


def test_a_text_that_is_too_long_is_wrong(verdict_of):
    assert verdict_of("5", "5" * 5_000) is PairVerdict.UNEQUAL


@pytest.mark.parametrize(("judge", "is_right"), [("form", 0.0), ("math_verify", 1.0)])
def test_the_key_judge_chooses(judge, is_right):
    from trajectories import TASK, trajectory

    reward = make_reward(MathReward(judge=judge, verify_deadline_s=20.0))
    answered = trajectory(rf"<answer>\boxed{{73 = {TASK.answer}}}</answer>")

    async def score():
        try:
            return (await reward(TASK, answered))["accuracy"]
        finally:
            await reward.close()

    assert asyncio.run(score()) == is_right
