"""The judge `dr_grpo`: the verdicts of the grader that CS336 assignment 5 hands out, each checked with that grader."""

import asyncio
import importlib.util

import pytest
from trajectories import trajectory

from strop.errors import UserError
from strop.rewards import MathReward, SumReward, make_reward, math_text
from strop.rewards.math_text import is_equal_to_dr_grpo
from strop.rewards.r1_zero import QuestionOnlyPart, R1ZeroPart, question_only_reward_fn, r1_zero_reward_fn
from strop.sandbox.inside.dr_grpo import _repeats
from strop.types import Task


@pytest.mark.parametrize(
    ("gold", "answer", "is_equal"),
    [
        ("72", " 72 ", True),
        ("72", "73", False),
        ("1072", "1,072", True),
        (r"\frac{3}{4}", r"\dfrac34", True),
        (r"\frac{1}{2}", "1/2", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{4}", "0.25", True),  # by sympy: one of the two is no fraction
        (r"\frac{1}{2}", r"\frac{2}{4}", False),  # not reduced
        ("2", r"\sqrt{4}", False),  # an integer is not computed
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("x+1", "1 + x", True),
        ("10x.5", "10.x.5", True),  # 10 times x times 0.5
        ("(1,2)", "(1, 2)", True),
        ("(1,2)", "[1,2]", False),
        (r"\text{Evelyn}", "evelyn", True),
        ("abc", "cba", False),  # three letters are words
        ("2^{10}", "1024", False),  # a power of two digits may hang
        (r"60^\circ", "60", True),
        ("5", "x = 5", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", True),
        (r"\boxed{72}", "72", True),
        (r"\boxed{72", r"\boxed{72", False),  # the gold's box does not close
        # Its misreadings. The judges of strop accept none of these.
        ("5", "5 a", True),  # a letter is a unit
        ("10", "10 percent", True),
        ("3 cm", "3 miles", True),
        (r"\frac{a+1}{2}", r"a+\frac{1}{2}", True),  # a fraction has no brackets
    ],
)
def test_verdicts_are_those_of_the_hand_outs_grader(gold, answer, is_equal):
    assert is_equal_to_dr_grpo(gold, answer, is_fast=True) is is_equal


def test_only_without_fast_it_asks_math_verify():
    assert not is_equal_to_dr_grpo("2", r"\sqrt{4}", is_fast=True)
    assert is_equal_to_dr_grpo("2", r"\sqrt{4}", is_fast=False)
    assert not is_equal_to_dr_grpo("2", r"\sqrt{5}", is_fast=False)
    assert not is_equal_to_dr_grpo("2", r"\sqrt{4}" + " or so" * 40, is_fast=False)


def test_a_text_repeats_if_over_a_fifth_of_its_substrings_do():
    assert _repeats("aaaa")  # 4 different ones of 10
    assert _repeats("abab")  # 7 of 10
    assert not _repeats("abca")  # 9 of 10: a occurs twice


@pytest.mark.parametrize("text", ["'a'", "a.b()", "1..b", "(1).b", "b1.b", "(1)[0]", "x.__y__", '"x"', "9**9**9**9**9"])
def test_text_that_sympy_would_run_as_a_program_is_not_equal(text):
    assert not is_equal_to_dr_grpo("1", f"{text}*0+1", is_fast=True)


def test_a_comparison_ends_at_its_deadline(monkeypatch):
    monkeypatch.setattr(math_text, "LIMIT_S", 0.2)
    assert not is_equal_to_dr_grpo("x", "(9!!!!)^9*x", is_fast=True)
    monkeypatch.undo()
    assert is_equal_to_dr_grpo("x+1", "1+x", is_fast=True)


IN_TAG, IN_BOX = "So. </think> <answer>{}</answer>", r"It is \boxed{{{}}}."


@pytest.mark.parametrize(("grade", "form"), [(r1_zero_reward_fn, IN_TAG), (question_only_reward_fn, IN_BOX)])
def test_the_functions_of_the_hand_out_take_the_judge(grade, form):
    assert grade(form.format("5 a"), "5")["reward"] == 0.0
    assert grade(form.format("5 a"), "5", judge="dr_grpo")["reward"] == 1.0
    assert grade(form.format("5 a"), ["4", "5"], judge="dr_grpo")["reward"] == 1.0
    assert grade(form.format(r"\sqrt{4}"), 2, judge="dr_grpo")["reward"] == 0.0
    assert grade(form.format(r"\sqrt{4}"), 2, False, judge="dr_grpo")["reward"] == 1.0
    assert grade("5 a", "5", judge="dr_grpo")["format_reward"] == 0.0


REWARDS = [
    (SumReward(parts={"accuracy": R1ZeroPart(judge="dr_grpo")}), IN_TAG),
    (SumReward(parts={"accuracy": QuestionOnlyPart(judge="dr_grpo")}), IN_BOX),
    (MathReward(judge="dr_grpo", needs_box=False), "<answer>{}</answer>"),
]


@pytest.mark.parametrize(("reward", "form"), REWARDS)
def test_rewards_take_the_judge(reward, form):
    async def accuracy(answer):
        opened = make_reward(reward)
        try:
            parts = await opened(Task(id="a", question="?", answer="5", source=""), trajectory(form.format(answer)))
            return parts["accuracy"], await opened.answer_part("accuracy").is_same("5", answer)
        finally:
            await opened.close()

    assert asyncio.run(accuracy("5 a")) == (1.0, True)
    assert asyncio.run(accuracy("6 a")) == (0.0, False)


@pytest.mark.parametrize("reward", [each for each, _ in REWARDS])
def test_without_its_library_no_run_starts(reward, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"strop\[cs336\]"):
        make_reward(reward)
