"""What is said of a pair of answers: the verdicts of math_verify, whatever the answer holds."""

import json
import random
import re
import sys

import pytest
from verify_support import judge, math_answers, needs_math

from strop.sandbox.inside.verify import judge as judge_payload
from strop.sandbox.protocol import AnswerPair, PairVerdict

EQUAL, UNEQUAL, UNREADABLE = PairVerdict.EQUAL, PairVerdict.UNEQUAL, PairVerdict.UNREADABLE


def test_answers_are_compared_by_meaning():
    cases = [
        (r"\frac{1}{2}", "0.5", EQUAL),
        (r"\frac{1}{2}", "0.51", UNEQUAL),
        ("p - q", "-q + p", EQUAL),
        ("p - q", "q - p", UNEQUAL),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", EQUAL),
        ("72", r"72\text{ dollars}", EQUAL),
        ("72", "x = 72", EQUAL),
        ("72", "72 or 73", UNEQUAL),
        (r"\{1,2\}", r"\{2, 1\}", EQUAL),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1.0 \\ 2 \end{pmatrix}", EQUAL),
        ("72", "", UNREADABLE),
        ("3", "}{", UNREADABLE),
    ]
    assert judge(*(case[:2] for case in cases)) == [case[2] for case in cases]


def test_gold_comes_first_for_the_judge_is_not_symmetric():
    assert judge(("1 < x < 2", "(1, 2)"), ("(1, 2)", "1 < x < 2")) == [EQUAL, UNEQUAL]


def test_a_pair_with_differences_is_equal_by_sympy_or_else_by_math_verify():
    cases = [
        (("}{", "{}}", ("2x", "x+x")), EQUAL),  # math_verify reads neither
        (("}{", "{}}", ("2x", "x+x"), ("1", "2")), UNREADABLE),  # not all are 0
        (("p - q", "-q + p", ("2x", "3x")), EQUAL),  # sympy says no
        (("p - q", "-q + p", ("2x", "}{")), EQUAL),  # sympy reads it not
        (("p - q", "q - p", ("2x", "3x")), UNEQUAL),
    ]
    assert judge(*(pair for pair, _ in cases)) == [verdict for _, verdict in cases]


def test_both_ways_to_compare_share_the_limit_of_their_pair():
    right = ("p - q", "-q + p", ("2x", "x+x"))
    hangs = ("p - q", "-q + p", ("3", "9^{9^{9^9}}"))  # math_verify alone would find them equal
    assert judge(right, hangs, right, pair_wall_s=2.0) == [EQUAL, PairVerdict.TIMEOUT, EQUAL]


def test_differences_that_are_no_tuple_are_refused():
    with pytest.raises(TypeError, match=r"^differences is of type list; it has to be tuple"):
        AnswerPair(gold="1", answer="2", differences=[("1", "2")])


def test_plain_numbers_and_equal_texts_need_no_process(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pairs = [("1,072", "1072.0"), ("1072", "1073"), (r"\text{Evelyn}", r"\text{Evelyn}"), ("3", "x" * 10_001)]
    assert judge(*pairs) == [EQUAL, UNEQUAL, EQUAL, UNREADABLE]


HOSTILE = {
    "nested braces": "{" * 4_900 + "x" + "}" * 4_900,
    "braces that never close": "{" * 9_900,
    "nested fractions": r"\frac{1}{" * 1_000 + "x" + "}" * 1_000,
    "nested roots": r"\sqrt{" * 1_500 + "x" + "}" * 1_500,
    "nested parentheses": "(" * 4_900 + "x" + ")" * 4_900,
    "import": "__import__('os').system('touch {canary}')",
    "lambda": r"(lambda: __import__('os').open('{canary}', 64))()",
    "attributes": "().__class__.__base__.__subclasses__()",
    "text with code": r"\text{{__import__('os').system('touch {canary}')}}",
    "the judge's own words": "0 equal\nequal\n0 equal",
    "a second box": r"7}} \boxed{{3}} {{",
    "NUL and surrogate": "\0\ud800",
    "very long": "1+" * 4_999 + "1",
    "many dollars": "$" * 9_999,
    "minus signs": "-" * 9_999 + "3",
    "powers of words": "final answer is " * 600,
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """By name of a hostile answer, its verdict between those on the honest pairs around it; and a path that none may touch."""
    canary = tmp_path_factory.mktemp("hostile") / "canary"
    honest = ("p - q", "-q + p")
    answers = [answer.format(canary=canary) if "{canary}" in answer else answer for answer in HOSTILE.values()]
    pairs = [pair for answer in answers for pair in (("3", answer), honest)]
    verdicts = judge(honest, *pairs, pair_wall_s=2.0)
    return {name: verdicts[2 * number : 2 * number + 3] for number, name in enumerate(HOSTILE)}, canary


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_not_equal_and_harms_no_other_pair(judged, name):
    verdicts, canary = judged
    before, verdict, after = verdicts[name]
    assert verdict in (UNEQUAL, UNREADABLE, PairVerdict.TIMEOUT)
    assert before is after is EQUAL
    assert not canary.exists()


def test_a_child_emits_indices_and_verdicts_and_nothing_of_the_answers(capfd):
    golds = ["p - q", r"\text{nobody may read this}", r"\sqrt{17} \text{ secret}"]
    pairs = [(gold, answer) for gold in golds for answer in ("x", "}{", r"\frac{a", "q")]
    lines = []
    judge_payload(json.dumps(pairs).encode(), lines.append)
    assert lines[0] == b"start"
    assert [re.fullmatch(rb"(\d+) (?:equal|unequal|unreadable)", line)[1] for line in lines[1:]] == [
        b"%d" % n for n in range(12)
    ]
    assert capfd.readouterr() == ("", "")


def variants(answers):
    """Real answers against what policies write: rewritten, as decimals, with a name in front, and wrong."""
    for number, gold in enumerate(answers):
        yield gold, gold.replace(r"\frac", r"\dfrac").replace(r"\left", "").replace(r"\right", "").replace(" ", "") + " "
        if fraction := re.fullmatch(r"\\frac\{(-?\d+)\}\{(\d+)\}", gold):
            yield gold, f"{fraction[1]}/{fraction[2]}"
            yield gold, f"{int(fraction[1]) / int(fraction[2]):.6f}"
        yield gold, f"x={gold}"
        yield gold, f"{gold}+1"
        yield gold, answers[(7 * number + 3) % len(answers)]


def assert_same_as_math_verify(pairs):
    from math_verify import parse, verify

    from strop.answer_text import exact_match

    pairs = [pair for pair in pairs if exact_match(*pair) is None]
    expected = []
    for gold, answer in pairs:
        read = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
        is_equal = all(read) and verify(*read, timeout_seconds=None)
        expected.append(UNREADABLE if not all(read) else EQUAL if is_equal else UNEQUAL)
    found = judge(*pairs, pair_wall_s=60.0)
    assert [each for each in zip(pairs, found, expected, strict=True) if each[1] is not each[2]] == []
    assert {EQUAL, UNEQUAL} <= set(expected)


@needs_math
def test_verdicts_on_real_answers_are_those_of_math_verify():
    assert_same_as_math_verify(random.Random(0).sample(list(variants(math_answers())), 150))


@needs_math
@pytest.mark.slow
def test_verdicts_on_all_real_answers_are_those_of_math_verify():
    assert_same_as_math_verify(list(variants(math_answers())))
